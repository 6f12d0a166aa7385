"""What a repeated eager call of each fused op costs the host, without a GPU: a driver that launches nothing.

    python -m benchmarks.launch_cost [--record]

Triton's binder, keys and compiled kernels are its own (`benchmarks.kernels.no_op_driver`). `bare` is what no op can do
without: torch's own operators that a call runs (outputs, sums, what autograd asks of any function of Python) and the
launches of its kernels with all arguments bound. What is above it is ours. "by triton" is the same call launched as
`kernel[grid](…)`, as it was before kernels had plans.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import click
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import fifths

if TYPE_CHECKING:
    from accel.kernels.launching import LaunchPlan
    from accel.kernels.optimizers.rules import Kind

_CALLS, _BATCHES = 20, 200
_MOST_BATCHES = 10 * _BATCHES
_QUIET = 1.1
"""Factor of its least time that a fixed piece of Python may take before and after a round that counts."""

RECORD = Record(
    "launch-cost",
    "host time of repeated eager calls with a driver that launches nothing, µs",
    {
        "call": Column("op and pass", "call"),
        "launches": Column("of kernels", "launches"),
        "call_us": Column("the call, median of the rounds", "call µs", ":.1f"),
        "bare_us": Column("what no op can do without, median", "bare µs", ":.1f"),
        "own_us": Column("the difference, median", "ours µs [20, 80 %]", "{own_us:.1f} [{own_p20:.1f}, {own_p80:.1f}]"),
        "own_p20": Column("20th percentile of the rounds"),
        "own_p80": Column("80th percentile"),
        "triton_us": Column("the call, launched by Triton's own binder, median", "by triton µs", ":.1f"),
    },
    key=("call",),
    head=f"{SOURCE}. {_BATCHES} rounds of {_CALLS} calls each, in turns, with a driver that launches nothing; medians "
    "of the processor's time. They are the quietest of up to ten times as many, by a fixed piece of Python beside "
    "each.",
)
LINE = (
    "{call:44} {launches:2} launches: {call_us:6.1f} µs, bare {bare_us:5.1f}, "
    "ours {own_us:5.1f} [{own_p20:.1f}, {own_p80:.1f}], "
    "by triton {triton_us:6.1f}"
)


class Call(NamedTuple):
    """A call to be timed."""

    name: str
    run: Callable[[], Any]
    """The op."""
    torchs: Callable[[], Any] = lambda: None
    """What of it is torch's: the same outputs, through a function of Python where the op is differentiated."""


def microseconds(run: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> float:
    """Return the processor's time of a call, the mean over a batch."""
    began = clock()
    for _ in range(_CALLS):
        run()
    return 1e6 * (clock() - began) / _CALLS


_least_us = float("inf")


def _yardstick_us() -> float:
    """Return the time of a piece of Python that is always the same."""
    return microseconds(lambda: [each * each for each in range(40)])


def quiet_rounds(runs: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Return the times of calls made in turns, of rounds in which the machine was quiet.

    A machine that others use is half as fast from second to second. Where it is never quiet, the quietest rounds count.
    """
    global _least_us
    rounds: list[tuple[float, list[float]]] = []
    before = _yardstick_us()
    for count in range(_MOST_BATCHES):
        times = [microseconds(run) for run in runs]
        after = _yardstick_us()
        rounds.append((max(before, after), times))
        _least_us, before = min(_least_us, after), after
        if count + 1 >= _BATCHES and sum(slowest <= _QUIET * _least_us for slowest, _ in rounds) >= _BATCHES:
            break
    rounds.sort(key=lambda each: each[0])
    return [times for _, times in rounds[:_BATCHES]]


@contextmanager
def replaced(launch: Callable[..., None]) -> Iterator[None]:
    """Let plans launch in another way."""
    from accel.kernels.launching import LaunchPlan, LaunchSequence, PreparedLaunches

    with ExitStack() as stack:
        stack.enter_context(patch.object(LaunchPlan, "__call__", launch))
        for several in (LaunchSequence, PreparedLaunches):
            stack.enter_context(patch.object(several, "__call__", several.launch_each))
        yield


def launched(call: Callable[[], Any]) -> list[Callable[[], None]]:
    """Return the launches of a call with all arguments bound."""
    from accel.kernels.launching import LaunchPlan

    launches: list[Callable[[], None]] = []
    keep = LaunchPlan.__call__

    def noted(plan: LaunchPlan, *tensors: Tensor | None) -> None:
        keep(plan, *tensors)
        (bound,) = plan._bound.values()
        run, function, packed, rest = bound.run, bound.function, bound.packed, bound.rest
        x, y, z = plan._launched
        launches.append(lambda: run(x, y, z, 0, function, packed, None, None, None, *tensors, *rest))

    with replaced(noted):
        call()
    return launches


def by_triton(plan: LaunchPlan, *tensors: Tensor | None) -> None:
    """Launch as `kernel[grid](…)` does."""
    plan._launch_by_triton(*tensors)


def measure(call: Call) -> Row:
    """Time one call."""
    for _ in range(3):  # compiled, bound, known
        call.run()
    launches = launched(call.run)

    def bare() -> None:
        call.torchs()
        for launch in launches:
            launch()

    rounds = quiet_rounds([call.run, bare])
    with replaced(by_triton):
        triton_us = statistics.median(each for (each,) in quiet_rounds([call.run]))
    call_us, bare_us = (statistics.median(each) for each in zip(*rounds, strict=True))
    return {
        "call": call.name,
        "launches": len(launches),
        "call_us": call_us,
        "bare_us": bare_us,
        **fifths([own - least for own, least in rounds]).named("own_us", "own_p20", "own_p80"),
        "triton_us": triton_us,
    }


class _Empty(torch.autograd.Function):
    """What autograd asks of a function of Python: saves, allocates, returns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor,
        shape: Sequence[int],
        sums: Sequence[int] = (),
        added: Sequence[int] = (),
        third: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, other, third)
        ctx.sums, ctx.added = sums, added
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, other, third = ctx.saved_tensors
        # In the op's order, and kept until the call ends as there: memory taken anew costs more than a sum.
        grads_of = [torch.empty_like(x), torch.empty_like(other) if ctx.needs_input_grad[1] else None]
        between = [x.new_empty(shape, dtype=torch.float32) for shape in (*ctx.added, ctx.sums) if shape]
        # By torch, whose sums take their time on a CPU.
        added = [partial_sums.sum(0, keepdim=True) for partial_sums in between[: len(ctx.added)]]
        of_third = None if third is None else added[-1].view(third.shape)
        return *grads_of, None, None, None, of_third


class _Sums(TorchDispatchMode):
    """Notes the shapes of what torch sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.dim_IntList:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def _summed(call: Callable[[], Any]) -> list[tuple[int, ...]]:
    with _Sums() as noted:
        call()
    shapes: list[tuple[int, ...]] = noted.shapes
    return shapes


class _Operators(TorchFunctionMode):
    """Notes torch's operators that make or change a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor) and func.__name__ != "__get__":
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return result


def again(call: Callable[[], Any]) -> Callable[[], None]:
    """Return torch's operators of a call, on the same tensors and without what stands between them."""
    call()
    with _Operators() as noted:
        call()

    def run() -> None:
        for operator in noted.calls:
            operator()

    return run


def _backward_of(out: Tensor, inputs: Sequence[Tensor]) -> Callable[[], Any]:
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _window_attention() -> Iterator[Call]:
    yield from _windows("window_attention", 7, 56)
    # One window of one head: torch's sums of the bias gradient would take ten times as long as what is to be measured.
    yield from _windows("window_attention 16x16", 16, 16, heads=1)
    yield from _windows("window_attention 16x16 by cosines", 16, 16, heads=1, by_cosines=True)
    yield from _windows("window_attention with dropout", 7, 56, dropout=0.1)


def _windows(
    name: str, side: int, size: int, heads: int = 3, by_cosines: bool = False, **options: Any
) -> Iterator[Call]:
    from accel.kernels.window_attention import shifted_window_attention

    qkv, table = torch.randn(1, size, size, 96 * heads).half(), torch.randn((2 * side - 1) ** 2, heads).half()
    trained, shape = (qkv.clone().requires_grad_(), table.clone().requires_grad_()), (1, size, size, 32 * heads)
    scale = torch.ones(heads, requires_grad=True) if by_cosines else None
    sums = (2, heads, side**2, side**2) if side < 8 else (2, size**2, heads)  # of the bias gradient or the softmax
    attend: Callable[..., Tensor] = partial(
        shifted_window_attention, heads=heads, window=(side, side), shift=(side // 2, side // 2), **options
    )
    learnt = (*trained, scale) if scale is not None else trained
    train: Callable[..., Tensor] = partial(attend, *trained, head_scale=scale)
    backward = _backward_of(train(), learnt)
    empty = partial(_Empty.apply, *trained, shape, sums, _summed(backward), scale)
    use: Callable[..., Tensor] = partial(attend, qkv, table, head_scale=None if scale is None else scale.detach())
    yield Call(f"{name}, no gradient", use, partial(qkv.new_empty, shape))
    yield Call(f"{name}, forward", train, empty)
    yield Call(f"{name}, backward", backward, _backward_of(empty(), learnt))


def _rows() -> Iterator[Call]:
    from accel.kernels.compact import compact
    from accel.kernels.gather_rows import gather_rows
    from accel.kernels.threshold import at_least, block_maxima

    x, index = torch.randn(4096, 8, 9), torch.zeros(4096, dtype=torch.int64)
    yield Call("gather_rows, no gradient", lambda: gather_rows(x, index), lambda: x.new_empty(4096, 9))
    trained = x.clone().requires_grad_()

    def empty() -> Tensor:
        out: Tensor = _Empty.apply(trained, index, (4096, 9))  # type: ignore[no-untyped-call]
        return out

    yield Call("gather_rows, forward", lambda: gather_rows(trained, index), empty)
    backward = _backward_of(gather_rows(trained, index), [trained])
    yield Call("gather_rows, backward", backward, _backward_of(empty(), [trained]))
    rows, mask = torch.randn(4096, 8), torch.ones(4096, dtype=torch.bool)

    def compacted() -> None:
        mask.new_empty(1024, dtype=torch.int64), mask.cumsum(0)[-1].clone(), rows.new_empty(1024, 8)
        rows.new_full((), 0.0)

    yield Call("compact, no gradient", lambda: compact(rows, mask, 1024), compacted)
    source = rows.clone().requires_grad_()

    def taken() -> Tensor:
        mask.new_empty(1024, dtype=torch.int64), mask.cumsum(0)[-1].clone(), rows.new_full((), 0.0)
        out: Tensor = _Empty.apply(source, mask, (1024, 8))  # type: ignore[no-untyped-call]
        return out

    yield Call("compact, forward", lambda: compact(source, mask, 1024), taken)
    backward = _backward_of(compact(source, mask, 1024).rows, [source])
    yield Call("compact, backward", backward, _backward_of(taken(), [source]))
    values, least = torch.randn(1 << 20), torch.tensor(2.0)
    yield Call("block_maxima", lambda: block_maxima(values), lambda: values.new_empty(2048))

    def selected() -> None:
        values.new_empty(256, dtype=torch.int32).cumsum(0)[-1].clone()
        values.new_empty(1024, dtype=torch.int64), values.new_empty(1024)

    yield Call("at_least", lambda: at_least(values, least, 1024), selected)


def _codes() -> Iterator[Call]:
    from accel.kernels import quantise, sign_pack

    values = torch.randn(1 << 20)
    for name, code in (("quantise", quantise.CODE), ("sign_pack", sign_pack.CODE)):
        encoded = torch.zeros(2, code.encoded_bytes(len(values), code.block), dtype=torch.uint8)
        out, lost = torch.empty_like(values), torch.empty_like(values)
        yield Call(f"{name}, encode", partial(code.encode, values, encoded[0], residual=lost, lost=lost))
        yield Call(f"{name}, decode_sum", partial(code.decode_sum, encoded, out))


def _targets() -> Iterator[Call]:
    from accel.kernels.fcos_targets import (
        Fcos3dGts,
        FcosConfig,
        FcosGts,
        FcosPoints,
        fcos3d_targets,
        fcos_targets,
    )
    from accel.kernels.simota import simota_assign

    points = FcosPoints.regular([(32, 32), (16, 16)], [8, 16], [(-1.0, 64.0), (64.0, 1e8)], torch.device("cpu"))
    gts = FcosGts(torch.rand(2, 10, 4), torch.zeros(2, 10, dtype=torch.int64), torch.ones(2, 10, dtype=torch.bool))
    config = FcosConfig(background=80)
    total = 32 * 32 + 16 * 16

    def outputs() -> None:
        gts.labels.new_empty(2, total), gts.boxes.new_empty(2, total, 4), gts.boxes.new_empty(2, total)

    yield Call("fcos_targets", lambda: fcos_targets(points, gts, config), outputs)
    solid = Fcos3dGts(
        gts.boxes, gts.labels, gts.valid, torch.rand(2, 10, 9), torch.rand(2, 10, 2), torch.rand(2, 10), gts.labels
    )
    yield Call(
        "fcos3d_targets",
        lambda: fcos3d_targets(points, solid, config),
        again(lambda: fcos3d_targets(points, solid, config)),
    )
    boxes, cls, obj = torch.rand(2, 1024, 4), torch.randn(2, 1024, 80), torch.randn(2, 1024)
    cells, strides = torch.rand(1024, 2), torch.full((1024,), 8.0)
    truths, labels = torch.rand(2, 10, 4), torch.zeros(2, 10, dtype=torch.int64)

    def assign() -> None:
        simota_assign(boxes, cls, obj, cells, strides, truths, labels, check=False)

    yield Call("simota_assign", assign, again(assign))
    output, table = torch.randn(2, 1024, 85), torch.rand(2, 10, 5)  # as a head hands them over

    def assign_slices() -> None:
        parts = output[..., :4], output[..., 5:], output[..., 4]
        simota_assign(*parts, cells, strides, table[..., 1:], labels, check=False)

    yield Call("simota_assign, slices of an output", assign_slices, again(assign_slices))


def _optimizers() -> Iterator[Call]:
    from accel.kernels.optimizers.rules import Batch, Hypers
    from accel.kernels.optimizers.update import Updater

    kinds: tuple[tuple[Kind, int], ...] = (("sgd", 1), ("adam", 2), ("lamb", 2), ("lars", 1))
    for kind, states in kinds:
        for tensors in (4, 100) if kind == "adam" else (4,):
            values = [[torch.ones(64) for _ in range(tensors)] for _ in range(2 + states)]
            steps = [torch.ones(()) for _ in range(tensors)] if states == 2 else []
            batch = Batch(Hypers(lr=0.1, beta1=0.9, beta2=0.99), values[0], values[1], values[2:], steps=steps)
            yield Call(
                f"fused {kind}, step of {tensors} tensors",
                partial(Updater(kind), [batch]),
                partial(torch.autograd.graph.increment_version, batch.params),
            )


def calls() -> Iterator[Call]:
    """Yield the calls of all ops."""
    yield from _window_attention()
    yield from _rows()
    yield from _codes()
    yield from _targets()
    yield from _optimizers()


@contextmanager
def no_op() -> Iterator[None]:
    """Run kernels on tensors of the CPU, and launch nothing."""
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined
    from accel.kernels import support
    from benchmarks.kernels import no_op_driver

    no_op_driver.install()
    before, support._interpreted = support._interpreted, True
    try:
        yield
    finally:
        support._interpreted = before


@click.command()
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(record: bool) -> None:
    """Time repeated eager calls of the fused ops."""
    torch.set_num_threads(1)
    rows = []
    with no_op():
        for call in calls():
            rows.append(measure(call))
            click.echo(LINE.format_map(rows[-1]))
    if record:
        RECORD.write(rows)


if __name__ == "__main__":
    main()
