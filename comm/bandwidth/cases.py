"""The operations of the bandwidth table: their buffers, what they should compute, and how often a byte crosses a link.

S is the size of the table's row, as nccl-tests defines it, n the number of ranks, t the time:

    algbw = S / t        busbw = algbw · factor(n)

| operation      | S is                           | factor     | on torch        |
|----------------|--------------------------------|------------|-----------------|
| all_reduce     | the buffer                     | 2(n−1)/n   | in place only   |
| reduce_scatter | the input, n blocks            | (n−1)/n    | both            |
| all_gather     | the output, n blocks           | (n−1)/n    | both            |
| all_to_all     | the input, n blocks            | (n−1)/n    | out of place    |
| broadcast      | the buffer                     | 1          | in place only   |
| send_recv      | what goes to the next rank     | 1          | out of place    |

Contents are small whole numbers, so that sums are exact in every type and the result can be compared to the last bit:
element i of rank r holds (a(i) + r) mod m, a(i) spread over 0 … m−1. A reduced element depends on a(i) alone and is
looked up in a table of m entries, whatever n is.

Source: nccl-tests, doc/PERFORMANCE.md (github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PRIME = 127  # fits int8, and neighbouring blocks never look alike
_CHUNK = 1 << 22  # elements compared or made at once: 32 MiB of whole numbers beside a buffer of any size

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in the group that is measured."""

    group: Any
    ranks: tuple[int, ...]
    """Global ranks of the group, in its order."""
    index: int
    """Own position in `ranks`."""
    device: torch.device

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)


@dataclass
class Case:
    """One operation on buffers of one size."""

    run: Callable[[], None]
    fill: Callable[[], None]
    """Write the inputs, and something wrong where the result goes."""
    output: Tensor
    expected: Callable[[int, int], Tensor]
    """(start, stop) → what `output[start:stop]` holds after one run."""
    repeatable: bool
    """A second run without `fill` gives the same result."""

    def wrong(self) -> int:
        """Count elements that differ from what one run should give."""
        count = self.output.numel()
        starts = range(0, count, _CHUNK)
        parts = ((self.output[start : start + _CHUNK], start, min(start + _CHUNK, count)) for start in starts)
        return sum(int((part.cpu() != self.expected(start, stop)).sum()) for part, start, stop in parts)


@dataclass(frozen=True)
class Operation:
    """A row of the table above."""

    name: str
    factor: Callable[[int], float]
    make: Callable[[RankPlace, int, torch.dtype, str, bool], Case]
    """(place, elements of S, type, reduction, in place) → buffers."""
    places: tuple[bool, ...]
    """In place (True), out of place (False), in the order they are measured."""
    blocks: bool = False
    """S is n equal blocks."""
    reduces: bool = False
    alone: bool = True
    """Works with one rank."""


def modulus(dtype: torch.dtype, ranks: int, summed: bool) -> int:
    """Return m, as large as the exact sum of `ranks` numbers below m allows, 127 at most.

    Raises:
        ValueError: if not even zeros and ones can be summed exactly.
    """
    if not summed:
        return _PRIME
    largest = torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps)
    m = min(_PRIME, largest // ranks + 1)
    if m < 2:
        raise ValueError(
            f"a sum over {ranks} ranks can't be checked exactly in {str(dtype).removeprefix('torch.')}, which holds "
            f"whole numbers up to {largest}; choose a wider type"
        )
    return m


def _spread(start: int, stop: int, m: int) -> Tensor:
    """Return a(start) … a(stop − 1)."""
    # 40503 is the golden ratio of 16 bits: neighbours land far apart, and a shifted buffer does not match.
    return ((torch.arange(start, stop, dtype=torch.int64) * 40503) >> 4) % m


def _values(start: int, stop: int, rank: int, m: int, dtype: torch.dtype) -> Tensor:
    return ((_spread(start, stop, m) + rank) % m).to(dtype)


def _write(buffer: Tensor, rank: int, m: int, offset: int = 0) -> None:
    """Fill `buffer` with the elements of `rank` from `offset` on."""
    for start in range(0, buffer.numel(), _CHUNK):
        stop = min(start + _CHUNK, buffer.numel())
        buffer[start:stop] = _values(offset + start, offset + stop, rank, m, buffer.dtype)


def _reduced(m: int, ranks: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the reduced value for each a in 0 … m−1."""
    table = (torch.arange(m)[:, None] + torch.arange(ranks)[None, :]) % m
    reduced = {"sum": table.sum(1), "min": table.amin(1), "max": table.amax(1)}[reduction]
    return reduced.to(dtype)


def _empty(place: RankPlace, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=place.device)


def _all_reduce(place: RankPlace, count: int, dtype: torch.dtype, reduction: str, in_place: bool) -> Case:
    m = modulus(dtype, place.size, reduction == "sum")
    buffer, table = _empty(place, count, dtype), _reduced(m, place.size, reduction, dtype)
    op = REDUCTIONS[reduction]
    return Case(
        run=lambda: _done(dist.all_reduce(buffer, op=op, group=place.group)),
        fill=lambda: _write(buffer, place.index, m),
        output=buffer,
        expected=lambda start, stop: table[_spread(start, stop, m)],
        repeatable=False,
    )


def _reduce_scatter(place: RankPlace, count: int, dtype: torch.dtype, reduction: str, in_place: bool) -> Case:
    m, block = modulus(dtype, place.size, reduction == "sum"), count // place.size
    source, table = _empty(place, count, dtype), _reduced(m, place.size, reduction, dtype)
    first = place.index * block
    output = source[first : first + block] if in_place else _empty(place, block, dtype)
    op, scatter = REDUCTIONS[reduction], _collective("reduce_scatter_single", "reduce_scatter_tensor")

    def fill() -> None:
        output.fill_(m)
        _write(source, place.index, m)

    return Case(
        run=lambda: _done(scatter(output, source, op=op, group=place.group)),
        fill=fill,
        output=output,
        expected=lambda start, stop: table[_spread(first + start, first + stop, m)],
        repeatable=not in_place,
    )


def _all_gather(place: RankPlace, count: int, dtype: torch.dtype, reduction: str, in_place: bool) -> Case:
    block = count // place.size
    output = _empty(place, count, dtype)
    gather = _collective("all_gather_single", "all_gather_into_tensor")
    first = place.index * block
    source = output[first : first + block] if in_place else _empty(place, block, dtype)

    def fill() -> None:
        output.fill_(_PRIME)
        _write(source, place.index, _PRIME)

    def expected(start: int, stop: int) -> Tensor:
        where = torch.arange(start, stop)
        return ((_spread(0, block, _PRIME)[where % block] + where // block) % _PRIME).to(dtype)

    return Case(
        run=lambda: _done(gather(output, source, group=place.group)),
        fill=fill,
        output=output,
        expected=expected,
        repeatable=True,
    )


def _all_to_all(place: RankPlace, count: int, dtype: torch.dtype, reduction: str, in_place: bool) -> Case:
    block = count // place.size
    source, output = _empty(place, count, dtype), _empty(place, count, dtype)
    first = place.index * block

    def fill() -> None:
        output.fill_(_PRIME)
        _write(source, place.index, _PRIME)

    def expected(start: int, stop: int) -> Tensor:
        where = torch.arange(start, stop)
        own = _spread(first, first + block, _PRIME)
        return ((own[where % block] + where // block) % _PRIME).to(dtype)

    return Case(
        run=lambda: _done(dist.all_to_all_single(output, source, group=place.group)),
        fill=fill,
        output=output,
        expected=expected,
        repeatable=True,
    )


def _broadcast(place: RankPlace, count: int, dtype: torch.dtype, reduction: str, in_place: bool) -> Case:
    buffer = _empty(place, count, dtype)

    def fill() -> None:
        if place.index == 0:
            _write(buffer, 0, _PRIME)
        else:
            buffer.fill_(_PRIME)

    return Case(
        run=lambda: _done(dist.broadcast(buffer, src=place.ranks[0], group=place.group)),
        fill=fill,
        output=buffer,
        expected=lambda start, stop: _values(start, stop, 0, _PRIME, dtype),
        repeatable=True,
    )


def _send_recv(place: RankPlace, count: int, dtype: torch.dtype, reduction: str, in_place: bool) -> Case:
    """Send to the next rank and receive from the one before, as nccl-tests does."""
    source, output = _empty(place, count, dtype), _empty(place, count, dtype)
    after, before = (place.index + 1) % place.size, (place.index - 1) % place.size

    def fill() -> None:
        output.fill_(_PRIME)
        _write(source, place.index, _PRIME)

    def run() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, source, place.ranks[after], group=place.group),
                dist.P2POp(dist.irecv, output, place.ranks[before], group=place.group),
            ]
        )
        for work in works:
            work.wait()

    return Case(
        run=run,
        fill=fill,
        output=output,
        expected=lambda start, stop: _values(start, stop, before, _PRIME, dtype),
        repeatable=True,
    )


def _done(work: object) -> None:
    """Take what a synchronous collective returns, which is nothing."""


def _collective(name: str, older: str) -> Callable[..., Any]:
    """Return torch's collective `name`, which is called `older` before torch 2.13."""
    collective: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return collective


def _ring(n: int) -> float:
    return 2 * (n - 1) / n


def _half_ring(n: int) -> float:
    return (n - 1) / n


def _whole(n: int) -> float:
    return 1.0


_ROWS = (
    Operation("all_reduce", _ring, _all_reduce, (True,), reduces=True),
    Operation("reduce_scatter", _half_ring, _reduce_scatter, (False, True), blocks=True, reduces=True),
    Operation("all_gather", _half_ring, _all_gather, (False, True), blocks=True),
    Operation("all_to_all", _half_ring, _all_to_all, (False,), blocks=True),
    Operation("broadcast", _whole, _broadcast, (True,)),
    Operation("send_recv", _whole, _send_recv, (False,), alone=False),
)
OPERATIONS = {operation.name: operation for operation in _ROWS}


def elements(operation: Operation, size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the elements of a row: `size_bytes` rounded down to whole blocks, one element (a block) at least."""
    unit = ranks if operation.blocks else 1
    return max(size_bytes // dtype.itemsize // unit, 1) * unit
