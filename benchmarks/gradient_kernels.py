"""Kernels of gradient compressors on a GPU: 100 MB encoded, summed over ranks, and searched for the largest.

    python -m benchmarks.gpu.sections gradient_kernels FILE

For each op: milliseconds launched (median, 20 and 80 %) and, where it waits for nothing, of the device alone (replays
of a graph with cold caches), the bytes it must move at least in a second, and the share of the device's measured copy
bandwidth that is. Rivals: the reference in plain torch, which goes over the vector in tiles for a CPU's cache; the same
arithmetic on whole tensors, eager and compiled; and torch.topk. Nothing is timed whose result is wrong. Runs as part of
`make gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.comm import dgc
from accel.kernels import quantise, sign_pack, threshold
from accel.kernels.codes.block_code import BlockCode
from accel.kernels.support import Cost
from benchmarks.gpu.device_times import launched, replayed_flushed
from benchmarks.gpu.rows import Figures, bytes_per_s, growing, tried
from benchmarks.kernels import code_rivals
from benchmarks.render import Row

ELEMENTS = 25_000_000  # 100 MB of float32, no multiple of a block
RANKS = 8

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One op on one input."""

    name: str
    ours: Call
    cost: Cost
    right: Callable[[], bool]
    """Whether `ours` gives what it should."""
    rivals: dict[str, Call] = field(default_factory=dict)
    waits: bool = False
    """Whether it waits for the device, and so can't be replayed as a graph."""


def cases(device: str, elements: int = ELEMENTS) -> Iterator[Case]:
    """Yield all cases, on inputs of one size."""
    generator = torch.Generator(device).manual_seed(0)
    values, residual = (torch.randn(elements, device=device, generator=generator) for _ in range(2))
    yield from _codes("int8", quantise.CODE, values, residual)
    yield from _codes("1-bit", sign_pack.CODE, values, residual)
    yield from _thresholds(values)
    for share in (0.001, 1 / 64):
        yield _largest(values, share)


def _codes(name: str, code: BlockCode, values: Tensor, residual: Tensor) -> Iterator[Case]:
    numel, block = len(values), code.block
    size = code.encoded_bytes(numel, block)
    out, lost, total = values.new_empty(size, dtype=torch.uint8), torch.empty_like(values), torch.zeros_like(values)
    rows = values.new_empty(RANKS - 1, -(-size // 16) * 16, dtype=torch.uint8)[:, :size]

    def encode() -> None:
        code.encode(values, out, block, residual, lost)

    def encode_plainly() -> None:
        code.encode_ref(values, out, block, residual, lost)

    def kept() -> bool:
        encode()
        code.decode_sum(out[None], total)
        return _near(total + lost, values + residual, 4)

    rivals = {"plain": encode_plainly, **_whole(code_rivals.encode, code.bits, values, residual, block)}
    yield Case(f"{name} encode", encode, code.cost_encode(numel, block), kept, rivals)
    for row in rows:
        code.encode(values.roll(1), row, block)

    def decode_sum() -> None:
        code.decode_sum(rows, total, block, True)

    def sum_plainly() -> None:
        code.decode_sum_ref(rows, total, block, True)

    def summed() -> bool:
        total.copy_(residual)
        decode_sum()
        found = total.clone()
        total.copy_(residual)
        sum_plainly()
        return _near(found, total, 4 * RANKS)

    cost = code.cost_decode_sum(numel, RANKS - 1, block, add=True)
    rivals = {"plain": sum_plainly, **_whole(code_rivals.decode_sum, code.bits, rows, numel, block)}
    yield Case(f"{name} sum of {RANKS - 1}", decode_sum, cost, summed, rivals)

    def decode() -> None:
        code.decode_sum(rows[:1], total, block)

    def decoded() -> bool:
        decode()
        found = total.clone()
        code.decode_sum_ref(rows[:1], total, block)
        return torch.equal(found, total)

    cost = code.cost_decode_sum(numel, 1, block)
    rivals = {
        "plain": lambda: code.decode_sum_ref(rows[:1], total, block),
        **_whole(code_rivals.decode_sum, code.bits, rows[:1], numel, block),
    }
    yield Case(f"{name} decode", decode, cost, decoded, rivals)


def _whole(function: Call, *arguments: Any) -> dict[str, Call]:
    """Return the rivals that work on whole tensors; a compiler for a CPU is none."""
    on_gpu = any(isinstance(each, Tensor) and each.is_cuda for each in arguments)
    compiled: Any = torch.compile(function, dynamic=False) if on_gpu else None
    rivals = {"whole tensors": partial(function, *arguments)}
    return {**rivals, **({"whole tensors, compiled": partial(compiled, *arguments)} if on_gpu else {})}


def _near(found: Tensor, expected: Tensor, roundings: int) -> bool:
    """Tell whether two tensors are equal to some roundings of their largest element."""
    bound = roundings * torch.finfo(found.dtype).eps * float(expected.abs().max())
    return float((found - expected).abs().max()) <= bound


def _thresholds(values: Tensor) -> Iterator[Case]:
    numel = len(values)

    def same_maxima() -> bool:
        return torch.equal(threshold.block_maxima(values), threshold.block_maxima_ref(values))

    yield Case(
        "maxima of blocks",
        lambda: threshold.block_maxima(values),
        threshold.cost_block_maxima(numel),
        same_maxima,
        {"plain": lambda: threshold.block_maxima_ref(values)},
    )
    maxima, count = threshold.block_maxima(values), max(numel // 1000, 1)
    least = values.abs().topk(count).values[-1].clone()
    blocks = int((maxima >= least).sum())
    for name, given in (("", None), (" by maxima", maxima)):
        yield Case(
            f"at least a threshold{name}",
            lambda given=given: threshold.at_least(values, least, count, given),
            threshold.cost_at_least(numel, count, blocks=None if given is None else blocks),
            lambda given=given: _same_found(values, least, count, given),  # type: ignore[misc]
            {"plain": lambda: threshold.at_least_ref(values, least, count)},
        )


def _same_found(values: Tensor, least: Tensor, count: int, maxima: Tensor | None) -> bool:
    found = threshold.at_least(values, least, count, maxima)
    expected = threshold.at_least_ref(values, least, count)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _largest(values: Tensor, share: float) -> Case:
    count = max(int(len(values) * share), 1)

    def topk() -> Tensor:
        return values.abs().topk(count, sorted=False).indices

    def right() -> bool:
        found, expected = (values[one].abs().sort().values for one in (dgc.largest(values, count), topk()))
        return torch.equal(found, expected)

    # Every value is read once, at least, and every position is written.
    cost = Cost(flops=len(values), bytes=4 * len(values) + 8 * count)
    rivals: dict[str, Call] = {"plain": lambda: dgc._largest(values, count, by_kernels=False), "torch.topk": topk}
    return Case(f"largest {share:.2%}", lambda: dgc.largest(values, count), cost, right, rivals, waits=True)


def rows(bandwidth: float) -> Iterator[Row]:
    """Yield a row for each case."""
    for case in cases("cuda"):
        yield tried({"op": case.name, "elements": ELEMENTS}, partial(_row, case, bandwidth))


def _row(case: Case, bandwidth: float) -> Row:
    if not case.right():
        return {"failed": "the result is wrong: nothing is timed"}
    called = launched(case.ours)
    device = called if case.waits else replayed_flushed(case.ours)
    floor_ms = case.cost.seconds(math.inf, bandwidth) * 1e3
    rivals = {name: tried({}, partial(_timed, call)) for name, call in case.rivals.items()}
    return {
        "ms": called._asdict(),
        "device_ms": None if case.waits else device._asdict(),
        "gb_per_s": case.cost.bytes / device.median / 1e6,
        "roofline": floor_ms / device.median,
        "rivals_ms": rivals,
        "speedup": {name: row["median"] / called.median for name, row in rivals.items() if "failed" not in row},
    }


def _timed(call: Call) -> Row:
    return launched(call)._asdict()


def everything() -> Figures:
    """Measure; yield the rows so far."""
    yield from growing("rows", rows(bytes_per_s()))
