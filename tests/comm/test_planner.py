"""A scheme that changes between steps: DDP's own bits while it is off, equal replicas, nothing lost, off for good."""

from __future__ import annotations

import itertools
import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import CATALOGUE, Scheme, allowed, catalogue_settings
from accel.comm.compressor_memory import reshard
from accel.comm.cost_model.choice import ObservedStep
from accel.comm.engine.binding import Binding
from accel.comm.hooks import CommState, hook
from accel.comm.layout import Layout
from accel.comm.ranks.channel import GlooChannel
from accel.comm.selection.offers import self_test
from accel.comm.selection.planner import Planner, StepRecorder
from accel.comm.selector import AutoComm
from tests.comm.cases import (
    SECONDS,
    Given,
    Phases,
    backward,
    gradients,
    lacks,
    mean_gradient,
    message,
    module,
    residual,
    same_everywhere,
)
from tests.comm.few import few
from tests.comm.ranks import on_ranks, run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
"""Of DDP."""
TWO_OR_FOUR = [2, pytest.param(4, marks=pytest.mark.slow)]


def planned(**options: Any) -> tuple[DistributedDataParallel, Planner]:
    ddp = module(**options)
    planner = Planner(ddp, timeout=SECONDS)
    ddp.register_comm_hook(planner, hook)
    return ddp, planner


@on_ranks(2)
def test_off_is_ddps_own_all_reduce_to_the_bit(rank: int, world: int) -> None:
    for name, options in OPTIONS.items():
        bare, (ddp, planner) = module(**options), planned(**options)
        for step in range(6):
            planner.use(Scheme("int8") if step in (2, 3) else None)
            got, want = backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step))
            assert torch.equal(got, want) == (step not in (2, 3)), (name, step)
        planner.close()
        assert torch.equal(backward(ddp, gradients(rank, 9)), backward(bare, gradients(rank, 9))), name


@pytest.mark.parametrize("world", TWO_OR_FOUR)
@on_ranks(per_host=None)
def test_each_way_is_the_hook_of_its_own_state(rank: int, world: int) -> None:
    for way in allowed("lossy", by_hosts=world > 2):
        ddp, planner = planned(find_unused_parameters=True)  # DDP keeps its first buckets
        other = module(find_unused_parameters=True)
        state = CommState(other, timeout=SECONDS, **catalogue_settings(way)._asdict())
        other.register_comm_hook(state, hook)
        planner.use(way)
        for step in range(3):
            got, want = backward(ddp, gradients(rank, step)), backward(other, gradients(rank, step))
            assert torch.equal(got, want), way
            assert same_everywhere(got), way
        planner.close()
        state.close()


@pytest.mark.parametrize("world", TWO_OR_FOUR)
@on_ranks(per_host=None)
def test_after_each_change_replicas_are_equal_and_nothing_is_lost(rank: int, world: int) -> None:
    ddp, planner = planned()
    ways: list[Scheme | None] = [None, *(Scheme(name) for name in ("int8", "1-bit", "powersgd 16", "half"))]
    if world > 2:
        ways += [Scheme("int8", True), Scheme("exact", True)]
    ways += [None, Scheme("1-bit"), Scheme("int8")]
    applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
    for step, way in enumerate(way for way in ways for _ in range(2)):
        planner.use(way)
        got = backward(ddp, gradients(rank, step))
        assert same_everywhere(got), way
        applied, wanted = applied + got.double(), wanted + mean_gradient(world, step)
    left = residual(planner)
    # Of some 16 to 20 steps in float32; half precision alone rounds what is never fed back.
    assert lacks(applied + left, wanted) < 2**-8
    assert left.any()
    backward(ddp, gradients(rank, 50))
    planner.release()
    assert len(planner._routes) == 1
    assert torch.isfinite(backward(ddp, gradients(rank, 50))).all()
    planner.close()


@few([name for name in CATALOGUE if name not in ("exact", "half")], ("dgc 1%", "powersgd 4", "1-bit"))
@on_ranks(2, per_host=2)
def test_residuals_of_another_scheme_are_sent_or_wait_while_no_rank_uses_a_parameter(
    rank: int, world: int, names: tuple[str, ...]
) -> None:
    starts = list(itertools.accumulate((torch.Size(shape).numel() for shape in Given.SHAPES), initial=0))
    parts = [slice(low, high) for low, high in itertools.pairwise(starts)]
    out = (6, 8)  # one that is encoded, one that is sent as it is
    for name, by_hosts in itertools.product(names, (False, True)):  # of one host: nothing is compressed
        ddp, planner = planned(find_unused_parameters=True)
        planner.use(Scheme("int8"))
        applied = sum(backward(ddp, gradients(rank, step)).double() for step in range(2))
        before = residual(planner)
        planner.use(Scheme(name, by_hosts))
        given: list[Any] = gradients(rank, 2)
        for i in out:
            given[i] = None
        got = backward(ddp, given)
        after, wanted = residual(planner), sum(mean_gradient(world, step) for step in range(3))
        for i in out:
            wanted[parts[i]] -= mean_gradient(world, 2)[parts[i]]  # type: ignore[index]
            assert before[parts[i]].any()
            # By hosts the ranks' residuals are summed, in float32.
            assert lacks(after[parts[i]], before[parts[i]]) < 1e-6, (name, by_hosts)
        for part in parts:  # of roundings of float32
            assert lacks((applied + got + after)[part], wanted[part]) < 1e-5, (name, by_hosts)  # type: ignore[index]
        assert same_everywhere(got)
        planner.close()


@on_ranks(2, per_host=2)
def test_no_scheme_is_for_complex_or_sparse_gradients(rank: int, world: int) -> None:
    for model in (Phases(), nn.Embedding(8, 4, sparse=True)):
        planner = Planner(DistributedDataParallel(model), timeout=SECONDS)
        assert planner.schemes("lossy") == []
        planner.close()


@on_ranks(2)
def test_a_planner_is_saved_and_pickled(rank: int, world: int) -> None:
    options = {"find_unused_parameters": True}
    ddp, planner = planned(**options)
    planner.use(Scheme("int8"))
    for step in range(3):
        backward(ddp, gradients(rank, step))
    saved, copy = planner.state_dict(), pickle.loads(pickle.dumps(planner))
    want = backward(ddp, gradients(rank, 3))
    again = module(**options)
    copy.bind(again)
    again.register_comm_hook(copy, hook)
    copy.use(Scheme("int8"))
    assert torch.equal(backward(again, gradients(rank, 3)), want)
    assert copy.step == 4
    states: list[Any] = [None] * world
    dist.all_gather_object(states, saved)
    ddp, fresh = planned(**options)
    fresh.load_state_dict(reshard(states, world)[rank])
    fresh.use(Scheme("int8"))
    assert torch.equal(backward(ddp, gradients(rank, 3)), want)
    for one in (planner, copy, fresh):
        one.close()


@on_ranks(2)
def test_the_hook_comes_off_and_goes_on_again(rank: int, world: int) -> None:
    for name in ("plain", "views", "static"):
        bare, (ddp, planner) = module(**OPTIONS[name]), planned(**OPTIONS[name])
        planner.use(Scheme("int8"))
        for step in range(2):
            backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step))
        before = residual(planner)
        kept = name == "static"  # more than a new reducer knows: its hook stays, switched off
        assert planner.take_off() != kept
        for step in range(2, 6):
            assert torch.equal(backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step))), name
        assert (len(ddp._comm_hooks), planner.step) == ((1, 6) if kept else (0, 2)), name
        planner.put_on()
        planner.put_on()
        planner.use(Scheme("int8"))
        got = backward(ddp, gradients(rank, 6)).double()
        assert (got + residual(planner) - before - mean_gradient(world, 6)).abs().max() < 1e-3, name
        planner.close()


@on_ranks(3)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    assert "must be a DistributedDataParallel module, got Given" in message(lambda: Planner(Given()))  # type: ignore[arg-type]
    hooked = module()
    hooked.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[misc]
    assert "must have no communication hook yet" in message(lambda: Planner(hooked))
    _, planner = planned()
    said = message(lambda: planner.use(Scheme("int9")))
    assert "schemes must be of the catalogue (exact, half, int8" in said
    planner.close()
    assert "must be bound first" in message(lambda: planner.use(Scheme("int8")))
    assert message(lambda: AutoComm(module(), watch=0)) == "InvalidArgument: watch must be at least 1 step, got 0"
    assert "allow must be one of" in message(lambda: AutoComm(module(), "anything"))
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert "must have all 3 ranks" in message(lambda: AutoComm(module(process_group=pair), "lossy"))


class Clock:
    """A clock that stands where it is put."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def recording(clock: Clock) -> StepRecorder:
    """Return a recorder that is on."""
    recorder = StepRecorder(torch.device("cpu"), clock, lambda: (0.0, 0.0))
    recorder.on = True
    return recorder


def average(recorder: StepRecorder, size: int, extra: float = 0.0) -> torch.futures.Future[torch.Tensor]:
    """Let a bucket of so many bytes be ready; return the future to be set when it is averaged."""
    layout = Layout(0, ("a",), (torch.Size([size]),), torch.uint8, True)
    engine: Any = SimpleNamespace(binding=SimpleNamespace(layout=lambda bucket: layout), divide_s=0.0)
    bucket: Any = SimpleNamespace(buffer=lambda: torch.empty(size, dtype=torch.uint8))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        engine.divide_s += extra
        return done

    recorder.average(engine, bucket, reduce)
    return done


def play(
    recorder: StepRecorder,
    clock: Clock,
    at: float,
    ready: list[float],
    done: list[float],
    sizes: list[int],
    extra: float = 0.0,
) -> None:
    """Play a step that begins at `at`; times count from there."""
    clock.now = at
    recorder.end_step()
    recorder.begin_step()
    ends = []
    for when, size in zip(ready, sizes, strict=True):
        clock.now = at + when
        ends.append(average(recorder, size, extra))
    for when, end in zip(done, ends, strict=True):
        clock.now = at + when
        end.set_result(torch.empty(0))


def test_medians_over_steps_count_from_the_first_bucket() -> None:
    clock = Clock()
    times = recording(clock)
    for at, late in ((0.0, 0.0), (10.0, 1.0), (20.0, 5.0)):
        play(times, clock, at, [0.0, 2.0], [3.0, 4.0 + late], [100, 50])
    clock.now = 29.0
    times.end_step()
    assert len(times) == 3
    assert times.observed() == ObservedStep((100, 50), (0.0, 2.0), 5.0, 10.0)


def test_steps_with_other_buckets_do_not_count() -> None:
    clock = Clock()
    times = recording(clock)
    play(times, clock, 0.0, [0.0], [90.0], [100])
    play(times, clock, 100.0, [0.0, 1.0], [1.0, 2.0], [60, 40])
    clock.now = 107.0
    times.end_step()
    assert times.observed() == ObservedStep((60, 40), (0.0, 1.0), 2.0, 7.0)


def test_the_hooks_own_work_is_known_apart() -> None:
    clock = Clock()
    times = recording(clock)
    play(times, clock, 0.0, [0.0, 0.0], [1.0, 1.0], [100, 100], extra=0.25)
    clock.now = 4.0
    times.end_step()
    assert times.observed() == ObservedStep((100, 100), (0.0, 0.0), 1.0, 4.0, 0.5)


def test_work_of_a_step_goes_to_the_next_steps_first_bucket() -> None:
    clock, used = Clock(), Clock()
    times = StepRecorder(torch.device("cpu"), clock, lambda: (used.now, used.now / 3))
    times.on = True
    play(times, clock, 0.0, [0.0], [1.0], [100])
    used.now = 0.75
    clock.now = 4.0
    times.end_step()
    used.now = 9.0  # of no recorded step
    assert times.observed()[-2:] == (0.75, 0.25)


def test_nothing_is_noted_outside_of_a_step() -> None:
    times = recording(Clock())
    average(times, 100)
    times.end_step()
    assert len(times) == 0
    assert len(times.layouts) == 1


def outcomes(rank: int, world: int) -> list[str]:
    def tested() -> str:
        return self_test(Binding(DistributedDataParallel(nn.Linear(2, 2)), None, "AutoComm"), timedelta(seconds=30))

    right = GlooChannel.all_reduce

    def wrong_on_one(self: GlooChannel, values: torch.Tensor) -> None:
        right(self, values)
        values[3] += rank == 1

    with mock.patch.object(GlooChannel, "all_reduce", wrong_on_one):
        wrong = tested()
    return [tested(), wrong]


def test_a_channel_that_is_wrong_on_one_rank_is_named_on_all() -> None:
    expected = ["", "all_reduce of GlooChannel gave other numbers than torch's own"]
    assert run_ranks(outcomes, 2) == [expected, expected]
