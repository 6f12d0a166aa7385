"""The operations of the bandwidth table: their buffers, what they should compute, and how often a byte crosses a link.

S is the size of the table's row, as nccl-tests defines it, n the number of ranks, t the time:

    algbw = S / t        busbw = algbw · factor(n)

| operation      | S is                           | factor     | measured      |
|----------------|--------------------------------|------------|---------------|
| all_reduce     | the buffer                     | 2(n−1)/n   | in place      |
| reduce_scatter | the input, n blocks            | (n−1)/n    | out of place  |
| all_gather     | the output, n blocks           | (n−1)/n    | out of place  |
| all_to_all     | the input, n blocks            | (n−1)/n    | out of place  |
| broadcast      | the buffer                     | 1          | in place      |
| send_recv      | what goes to the next rank     | 1          | out of place  |

Reductions are sums. Contents are small whole numbers, so that sums are exact in every type and the result can be
compared to the last bit: element i of rank r holds (a(i) + r) mod m, a(i) spread over 0 … m−1. A reduced element
depends on a(i) alone and is looked up in a table of m entries, whatever n is.

Source: nccl-tests, doc/PERFORMANCE.md (github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.profiler.errors import InvalidArgument

_PRIME = 127  # fits int8, and neighbouring blocks never look alike
_CHUNK = 1 << 22  # elements compared or made at once: 32 MiB of whole numbers beside a buffer of any size


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

    place: RankPlace
    source: Tensor
    output: Tensor
    run: Callable[[], object]
    expected: Callable[[int, int], Tensor]
    """(start, stop) → what `output[start:stop]` holds after one run."""
    m: int = _PRIME
    repeatable: bool = True
    """A second run without `fill` gives the same result."""

    def fill(self) -> None:
        """Write the inputs, and something wrong where the result goes."""
        self.output.fill_(self.m)
        for start in range(0, self.source.numel(), _CHUNK):
            stop = min(start + _CHUNK, self.source.numel())
            self.source[start:stop] = _values(start, stop, self.place.index, self.m, self.source.dtype)

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
    make: Callable[[RankPlace, int, torch.dtype], Case]
    """(place, elements of S, type) → buffers."""
    blocks: bool = False
    """S is n equal blocks."""
    alone: bool = True
    """Works with one rank."""


def modulus(dtype: torch.dtype, ranks: int) -> int:
    """Return m, as large as the exact sum of `ranks` numbers below m allows, 127 at most.

    Raises:
        InvalidArgument: if not even zeros and ones can be summed exactly.
    """
    largest = torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps)
    m = min(_PRIME, largest // ranks + 1)
    if m < 2:
        raise InvalidArgument(
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


def _sums(m: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over the ranks for each a in 0 … m−1."""
    return ((torch.arange(m)[:, None] + torch.arange(ranks)[None, :]) % m).sum(1).to(dtype)


def _buffers(place: RankPlace, dtype: torch.dtype, *counts: int) -> list[Tensor]:
    return [torch.empty(count, dtype=dtype, device=place.device) for count in counts]


def _all_reduce(place: RankPlace, count: int, dtype: torch.dtype) -> Case:
    m = modulus(dtype, place.size)
    (buffer,), sums = _buffers(place, dtype, count), _sums(m, place.size, dtype)
    run = partial(dist.all_reduce, buffer, group=place.group)
    return Case(place, buffer, buffer, run, lambda start, stop: sums[_spread(start, stop, m)], m, repeatable=False)


def _reduce_scatter(place: RankPlace, count: int, dtype: torch.dtype) -> Case:
    m, block = modulus(dtype, place.size), count // place.size
    (source, output), sums = _buffers(place, dtype, count, block), _sums(m, place.size, dtype)
    first, scatter = place.index * block, _collective("reduce_scatter_single", "reduce_scatter_tensor")
    run = partial(scatter, output, source, group=place.group)
    return Case(place, source, output, run, lambda start, stop: sums[_spread(first + start, first + stop, m)], m)


def _all_gather(place: RankPlace, count: int, dtype: torch.dtype) -> Case:
    block = count // place.size
    source, output = _buffers(place, dtype, block, count)
    gather = _collective("all_gather_single", "all_gather_into_tensor")
    run = partial(gather, output, source, group=place.group)
    return Case(place, source, output, run, _by_blocks(0, block, dtype))


def _all_to_all(place: RankPlace, count: int, dtype: torch.dtype) -> Case:
    block = count // place.size
    source, output = _buffers(place, dtype, count, count)
    run = partial(dist.all_to_all_single, output, source, group=place.group)
    return Case(place, source, output, run, _by_blocks(place.index * block, block, dtype))


def _by_blocks(first: int, block: int, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    """Return what is expected of elements [first, first + block) of each rank, in rank order."""

    def expected(start: int, stop: int) -> Tensor:
        where = torch.arange(start, stop)
        return ((_spread(first, first + block, _PRIME)[where % block] + where // block) % _PRIME).to(dtype)

    return expected


def _broadcast(place: RankPlace, count: int, dtype: torch.dtype) -> Case:
    (buffer,) = _buffers(place, dtype, count)
    run = partial(dist.broadcast, buffer, src=place.ranks[0], group=place.group)
    return Case(place, buffer, buffer, run, lambda start, stop: _values(start, stop, 0, _PRIME, dtype))


def _send_recv(place: RankPlace, count: int, dtype: torch.dtype) -> Case:
    """Send to the next rank and receive from the one before, as nccl-tests does."""
    source, output = _buffers(place, dtype, count, count)
    after, before = (place.index + 1) % place.size, (place.index - 1) % place.size

    def run() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, source, place.ranks[after], group=place.group),
                dist.P2POp(dist.irecv, output, place.ranks[before], group=place.group),
            ]
        )
        for work in works:
            work.wait()

    return Case(place, source, output, run, lambda start, stop: _values(start, stop, before, _PRIME, dtype))


def _collective(name: str, older: str) -> Callable[..., Any]:
    """Return torch's collective `name`, which is called `older` before torch 2.13."""
    collective: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return collective


_ROWS = (
    Operation("all_reduce", lambda n: 2 * (n - 1) / n, _all_reduce),
    Operation("reduce_scatter", lambda n: (n - 1) / n, _reduce_scatter, blocks=True),
    Operation("all_gather", lambda n: (n - 1) / n, _all_gather, blocks=True),
    Operation("all_to_all", lambda n: (n - 1) / n, _all_to_all, blocks=True),
    Operation("broadcast", lambda n: 1.0, _broadcast),
    Operation("send_recv", lambda n: 1.0, _send_recv, alone=False),
)
OPERATIONS = {operation.name: operation for operation in _ROWS}


def elements(operation: Operation, size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the elements of a row: `size_bytes` rounded down to whole blocks, one element (a block) at least."""
    unit = ranks if operation.blocks else 1
    return max(size_bytes // dtype.itemsize // unit, 1) * unit


LINKS = ("intra", "inter", "world")


@dataclass(frozen=True)
class LinkClass:
    """A link class: the sets of ranks that communicate at the same time."""

    name: str
    sets: tuple[tuple[int, ...], ...]
    """Global ranks; no rank is in two of them."""

    @property
    def size(self) -> int:
        """Ranks of the largest set: what n stands for."""
        return max(map(len, self.sets))

    def own(self, rank: int) -> tuple[int, ...]:
        """Return the set that `rank` is in, or () if it stands aside."""
        return next((ranks for ranks in self.sets if rank in ranks), ())


def links_of(nodes: Sequence[tuple[int, ...]]) -> list[LinkClass]:
    """List the link classes that differ: `intra` alone, `inter` alone, or all three."""
    total = sum(map(len, nodes))
    if len(nodes) == 1:
        return [LinkClass("intra", tuple(nodes))]
    inter = LinkClass("inter", (tuple(node[0] for node in nodes),))
    if total == len(nodes):
        return [inter]
    intra = LinkClass("intra", tuple(node for node in nodes if len(node) > 1))
    return [intra, inter, LinkClass("world", (tuple(range(total)),))]


def groups_of(links: list[LinkClass], backend: str, timeout: timedelta) -> dict[str, Any]:
    """Make the process groups of `links`; every rank of the job calls this together.

    Returns:
        For each link class this rank's group, None where it stands aside.
    """
    rank, own = dist.get_rank(), {}
    for link in links:
        groups = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in link.sets]
        own[link.name] = next((group for group, ranks in zip(groups, link.sets, strict=True) if rank in ranks), None)
    return own


def sent_bytes(loopback: bool, root: Path = Path("/sys/class/net")) -> int | None:
    """Return the bytes this network namespace has sent so far, over `lo` or over everything else.

    None where the counters can't be read. Bridges and bonds count what their members count as well, so only interfaces
    without members below them are summed.
    """
    total, seen = 0, False
    try:
        interfaces = sorted(root.iterdir())
    except OSError:
        return None
    for interface in interfaces:
        if (interface.name == "lo") is not loopback or any(interface.glob("lower_*")):
            continue
        try:
            total += int((interface / "statistics/tx_bytes").read_text(encoding="ascii"))
            seen = True
        except (OSError, ValueError):
            continue
    return total if seen else None
