"""Window attention on a GPU: the fused op against eager, SDPA, timm's fused path, torch.compile and FlexAttention.

    python -m benchmarks.gpu.sections window_attention FILE

Stage 1 of Swin-T (56 x 56 tokens, 3 heads of 32 channels, windows of 7, shifted by 3) in fp16 over batch sizes, forward
and forward + backward; then the large windows of Swin-B at 384 pixels (12 x 12) and of Swin V2 (16 x 16, without its
cosines, for which no rival has a path). Timed are what the device takes (replays of a graph over inputs that no cache
holds, benchmarks/gpu/device_times.py) and what a caller waits for (launched). The roofline's share is of the device's
time: the least traffic of the op at the device's measured copy bandwidth, over that time. Nothing is timed whose result
is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.window_attention import Spec, cost, shifted_window_attention_ref
from accel.kernels.window_attention.regions import shift_regions
from benchmarks.gpu.device_times import launched, replayed, sets
from benchmarks.gpu.rows import Figures, growing, tried
from benchmarks.kernels.window_rivals import Op, Rivals

BATCHES = (32, 1, 128, 8)
"""Those first that a target is about."""
CHANNELS = 32
"""Of a head."""


class Layer(NamedTuple):
    """A layer that is timed."""

    spec: Spec
    size: tuple[int, int]
    """Height and width of its map, tokens."""


SPEC = Spec(heads=3, window=(7, 7), shift=(3, 3), scale=CHANNELS**-0.5)
SIZE = (56, 56)
STAGE_1 = Layer(SPEC, SIZE)
LARGE = (
    Layer(Spec(heads=4, window=(12, 12), shift=(6, 6), scale=CHANNELS**-0.5), (96, 96)),
    Layer(Spec(heads=4, window=(16, 16), shift=(8, 8), scale=CHANNELS**-0.5), (64, 64)),
)
LARGE_BATCHES = (32, 8)
TOLERANCE = 5e-3
"""Relative RMS error in fp16, of outputs and gradients."""

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(batch: int, device: str = "cuda", seed: int = 0, layer: Layer = STAGE_1) -> Inputs:
    """Return qkv, table and the gradient that comes back."""
    draw = torch.Generator(device).manual_seed(1000 * batch + seed)
    spec, size = layer
    channels = CHANNELS * spec.heads
    qkv = torch.randn(batch, *size, 3 * channels, device=device, dtype=torch.float16, generator=draw)
    table = torch.randn(spec.entries, spec.heads, device=device, generator=draw)
    dout = torch.randn(batch, *size, channels, device=device, dtype=torch.float16, generator=draw)
    return qkv.requires_grad_(), table.requires_grad_(), dout


def error(op: Op, qkv: Tensor, table: Tensor, dout: Tensor, layer: Layer = STAGE_1) -> float:
    """Return the largest relative RMS error of output and gradients, against fp64."""
    exact_qkv, exact_table = (x.detach().double().requires_grad_() for x in (qkv, table))
    spec, size = layer
    regions = shift_regions(size, spec.window, spec.shift, qkv.device)
    exact = shifted_window_attention_ref(exact_qkv, exact_table, None, regions, spec)
    wanted = [exact, *torch.autograd.grad(exact, (exact_qkv, exact_table), dout.double())]
    out = op(qkv, table)
    found = [out, *torch.autograd.grad(out, (qkv, table), dout)]
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def forward(op: Op, given: Inputs) -> Tensor:
    """Attend without gradients."""
    with torch.no_grad():
        return op(given[0], given[1])


def both(op: Op, given: Inputs) -> tuple[Tensor, ...]:
    """Attend, and return the gradients of qkv and table."""
    return torch.autograd.grad(op(given[0], given[1]), given[:2], given[2])


def rows(
    bytes_per_s: float, flops_per_s: float, layers: Sequence[Layer] = (STAGE_1,), batches: Sequence[int] = BATCHES
) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer, batch size and op."""
    for layer, batch in product(layers, batches):
        spec, size = layer
        windows = batch * size[0] * size[1] // spec.tokens
        forward_cost, backward_cost = (cost(windows, spec, CHANNELS, 2, backward=b) for b in (False, True))
        floors = [part.seconds(flops_per_s, bytes_per_s) * 1e3 for part in (forward_cost, backward_cost)]
        given = [inputs(batch, seed=seed, layer=layer) for seed in range(sets(forward_cost.bytes))]
        name_of_window = "x".join(map(str, spec.window))
        for name, op in Rivals(spec, size, torch.device("cuda")).ops().items():
            row = {"op": name, "batch": batch, "window": name_of_window}
            yield tried(row, partial(measured, op, given, floors, layer))
        del given
        torch.cuda.empty_cache()


def measured(op: Op, given: Sequence[Inputs], floors: Sequence[float], layer: Layer = STAGE_1) -> dict[str, Any]:
    """Return the times of an op that is right; `floors` are those of forward and backward, ms."""
    found = error(op, *given[0], layer)
    if not found <= TOLERANCE:
        return {"failed": f"relative error {found:.2g} is above {TOLERANCE}"}
    device_forward = replayed([partial(forward, op, one) for one in given])
    device_both = replayed([partial(both, op, one) for one in given])
    return {
        "error": found,
        "forward_device_ms": device_forward._asdict(),
        "both_device_ms": device_both._asdict(),
        "roofline_forward": floors[0] / device_forward.median,
        "roofline_both": sum(floors) / device_both.median,
        "forward_ms": launched(partial(forward, op, given[0]))._asdict(),
        "both_ms": launched(partial(both, op, given[0]))._asdict(),
    }


def everything() -> Figures:
    """Measure the device, then the ops; yield each figure as it is found, rows together."""
    from accel.profiler.trace import roofline

    limits = roofline.measure(torch.device("cuda"), [torch.float16])
    yield "gb_per_s", limits.gb_per_s
    roof = limits.gb_per_s * 1e9, limits.gflops["float16"] * 1e9
    yield from growing("rows", rows(*roof))
    yield from growing("large_windows", rows(*roof, LARGE, LARGE_BATCHES))
