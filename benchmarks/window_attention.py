"""Window attention on a GPU: fused op against eager, SDPA with folded bias, FlexAttention and torch.compile.

    python3 -m benchmarks.window_attention [--out FILE] [--no-training]

Stage 1 of Swin-T (56 x 56 tokens, 3 heads of 32 channels, windows of 7, shifted by 3) in fp16 over batch sizes: median
and quantiles of forward and of forward + backward, and the share of the device's measured copy bandwidth that the op's
least traffic comes to. All start from the same qkv map and end with the same map, so rivals roll and cut. Then Swin-T
of timm is trained in mixed precision, four ways in turns. Nothing is timed whose result is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.files import write_atomic
from accel.kernels.window_attention import Spec, cost, shifted_window_attention, shifted_window_attention_ref
from accel.kernels.window_regions import merge, partition, relative_index, shift_regions

BATCHES = (1, 8, 32, 128)
SPEC = Spec(heads=3, window=(7, 7), shift=(3, 3), scale=32**-0.5)
SIZE = (56, 56)
TOLERANCE = 5e-3
"""Relative RMS error in fp16, of outputs and gradients."""

Op = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median: float
    low: float
    """20 % quantile."""
    high: float
    """80 % quantile."""


def fused(qkv: Tensor, table: Tensor) -> Tensor:
    """Attend with the fused op."""
    return shifted_window_attention(qkv, table, heads=SPEC.heads, window=SPEC.window, shift=SPEC.shift)


def _cut(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    windows = partition(qkv.roll((-SPEC.shift[0], -SPEC.shift[1]), (1, 2)), SPEC.window)
    q, k, v = windows.view(len(windows), SPEC.tokens, 3, SPEC.heads, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def _joined(out: Tensor) -> Tensor:
    return merge(out.transpose(1, 2).flatten(2), SPEC.window, SIZE).roll(SPEC.shift, (1, 2))


def _bias(table: Tensor) -> Tensor:
    return table[relative_index(SPEC.window, table.device).view(-1)].view(SPEC.tokens, SPEC.tokens, -1).permute(2, 0, 1)


def _mask(device: torch.device) -> Tensor:
    regions = shift_regions(SIZE, SPEC.window, SPEC.shift, device)
    return torch.where(regions[:, :, None] == regions[:, None, :], 0.0, SPEC.mask_value)


def eager(qkv: Tensor, table: Tensor) -> Tensor:
    """Attend as the published code does under autocast: products in half precision, softmax in fp32."""
    q, k, v = _cut(qkv)
    scores = (q * SPEC.scale) @ k.transpose(-2, -1)
    scores = scores + _bias(table)
    mask = _mask(qkv.device)
    scores = (scores.view(-1, len(mask), *scores.shape[1:]) + mask[None, :, None]).flatten(0, 1)
    return _joined(scores.softmax(-1).to(v.dtype) @ v)


def sdpa(qkv: Tensor, table: Tensor) -> Tensor:
    """Attend with scaled_dot_product_attention, bias and mask folded into one tensor."""
    q, k, v = _cut(qkv)
    mask = _mask(qkv.device)
    folded = (_bias(table) + mask[:, None]).to(q.dtype).repeat(len(q) // len(mask), 1, 1, 1)
    return _joined(F.scaled_dot_product_attention(q, k, v, folded, scale=SPEC.scale))


def flex(qkv: Tensor, table: Tensor) -> Tensor:
    """Attend with FlexAttention, bias and mask as score modifications."""
    from torch.nn.attention.flex_attention import flex_attention

    regions = shift_regions(SIZE, SPEC.window, SPEC.shift, qkv.device)
    index, windows = relative_index(SPEC.window, qkv.device), len(regions)

    def modified(score: Tensor, w: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = regions[w % windows, i] != regions[w % windows, j]
        return score + table[index[i, j], h] + torch.where(apart, SPEC.mask_value, 0.0)

    q, k, v = (x.contiguous() for x in _cut(qkv))
    out = _compiled_flex(flex_attention)(q, k, v, score_mod=modified, scale=SPEC.scale)
    return _joined(out)


_flex: list[Any] = []


def _compiled_flex(function: Any) -> Any:
    if not _flex:
        _flex.append(torch.compile(function, dynamic=False))
    return _flex[0]


def ops() -> dict[str, Op]:
    """Return the fused op and its rivals by name."""
    return {"fused": fused, "eager": eager, "sdpa": sdpa, "compile": torch.compile(eager, dynamic=False), "flex": flex}


def inputs(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return qkv, table and the gradient that comes back."""
    torch.manual_seed(batch)
    channels = 32 * SPEC.heads
    qkv = torch.randn(batch, *SIZE, 3 * channels, device="cuda", dtype=torch.float16, requires_grad=True)
    table = torch.randn(SPEC.entries, SPEC.heads, device="cuda", requires_grad=True)
    return qkv, table, torch.randn(batch, *SIZE, channels, device="cuda", dtype=torch.float16)


def error(op: Op, qkv: Tensor, table: Tensor, dout: Tensor) -> float:
    """Return the largest relative RMS error of output and gradients, against fp64."""
    exact_qkv, exact_table = (x.detach().double().requires_grad_() for x in (qkv, table))
    regions = shift_regions(SIZE, SPEC.window, SPEC.shift, qkv.device)
    exact = shifted_window_attention_ref(exact_qkv, exact_table, None, regions, SPEC)
    wanted = [exact, *torch.autograd.grad(exact, (exact_qkv, exact_table), dout.double())]
    out = op(qkv, table)
    found = [out, *torch.autograd.grad(out, (qkv, table), dout)]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def timed(call: Callable[[], Any], *, captured: bool = False) -> Timing:
    """Time a call with cold caches between repetitions; captured, replays of a graph: what the device takes alone."""
    from triton import testing

    measure = testing.do_bench_cudagraph if captured else testing.do_bench
    median, low, high = measure(call, quantiles=[0.5, 0.2, 0.8])
    return Timing(median, low, high)


def measured(bytes_per_s: float, flops_per_s: float) -> list[dict[str, Any]]:
    """Return a row for each op and batch size."""
    rows = []
    for batch in BATCHES:
        qkv, table, dout = inputs(batch)
        windows = batch * SIZE[0] * SIZE[1] // SPEC.tokens
        forward, backward = (cost(windows, SPEC, 32, 2, backward=b) for b in (False, True))
        floors = [part.seconds(flops_per_s, bytes_per_s) * 1e3 for part in (forward, backward)]
        for name, op in ops().items():
            row: dict[str, Any] = {"op": name, "batch": batch}
            try:
                row |= _row(op, qkv, table, dout, floors)
            except Exception as failed:  # a rival that can't do this size is a result
                row["failed"] = f"{type(failed).__name__}: {str(failed)[:200]}"
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _row(op: Op, qkv: Tensor, table: Tensor, dout: Tensor, floors: list[float]) -> dict[str, Any]:
    found = error(op, qkv, table, dout)
    if not found <= TOLERANCE:
        return {"failed": f"relative error {found:.2g} is above {TOLERANCE}"}

    def forward() -> Tensor:
        with torch.no_grad():
            return op(qkv, table)

    def both() -> Any:
        return torch.autograd.grad(op(qkv, table), (qkv, table), dout)

    one, two = timed(forward), timed(both)
    device = timed(forward, captured=True)
    return {
        "error": found,
        "forward_ms": asdict(one),
        "forward_device_ms": asdict(device),
        "both_ms": asdict(two),
        "roofline_forward": floors[0] / device.median,
        "roofline_both": sum(floors) / two.median,
    }


# -- training ----------------------------------------------------------------------------------------------------------


def training(batch: int = 128, steps: int = 200) -> dict[str, Any]:
    """Train timm's Swin-T in mixed precision: plain, fused, compiled, and both; step times in turns, and the losses."""
    kinds = {"eager": (False, False), "fused": (True, False), "compile": (False, True), "both": (True, True)}
    trainers = {name: _Trainer(batch, *kind) for name, kind in kinds.items()}
    losses = {name: [trainer.step() for _ in range(steps)] for name, trainer in trainers.items() if name != "both"}
    for _ in range(3):
        trainers["both"].step()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(10):
        for name, trainer in trainers.items():
            times[name].append(trainer.block(5))
    base = losses["eager"]
    return {
        "step_ms": {name: sorted(values) for name, values in times.items()},
        "speedup": {name: _ratios(times["eager"], values) for name, values in times.items()},
        "losses": {name: values[:: max(1, steps // 20)] for name, values in losses.items()},
        "last_losses": {name: sum(values[-20:]) / 20 for name, values in losses.items()},
        "first_difference": max(abs(a - b) for a, b in zip(base[:5], losses["fused"][:5], strict=True)),
    }


def _ratios(before: list[float], after: list[float]) -> list[float]:
    ratios = sorted(a / b for a, b in zip(before, after, strict=True))
    return [ratios[len(ratios) // 2], ratios[0], ratios[-1]]


class _Trainer:
    def __init__(self, batch: int, fuse: bool, compiled: bool) -> None:
        import timm

        from accel.kernels.window_dropins import fuse_window_attention

        torch.manual_seed(0)
        self.model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0).cuda()
        if fuse:
            fuse_window_attention(self.model)
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        draw = torch.Generator("cuda").manual_seed(1)
        self.images = [torch.randn(batch, 3, 224, 224, device="cuda", generator=draw) for _ in range(4)]
        self.labels = [torch.randint(1000, (batch,), device="cuda", generator=draw) for _ in range(4)]
        self.done = 0

    def step(self) -> float:
        return float(self._step())

    def _step(self) -> Tensor:
        turn = self.done % len(self.images)
        self.done += 1
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(self.model(self.images[turn]), self.labels[turn])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def block(self, steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps * 1e3


def everything(*, train: bool = True) -> dict[str, Any]:
    """Measure the device, the op and, if asked, the training."""
    from accel.profiler import roofline

    limits = roofline.measure(torch.device("cuda"), [torch.float16])
    bytes_per_s, flops_per_s = limits.gb_per_s * 1e9, limits.gflops["float16"] * 1e9
    found: dict[str, Any] = {"gb_per_s": limits.gb_per_s, "rows": measured(bytes_per_s, flops_per_s)}
    if train:
        found["training"] = training()
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures there as JSON.")
@click.option("--no-training", is_flag=True, help="Leave the training runs out.")
def main(out: Path | None, no_training: bool) -> None:
    """Measure window attention on this machine's GPU."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        sys.exit(2)
    found = everything(train=not no_training)
    print(json.dumps(found.get("training", {}).get("speedup", {})))
    if out is not None:
        write_atomic(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
