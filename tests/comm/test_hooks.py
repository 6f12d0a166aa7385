"""What hooks compute: sums, residuals, void steps, DDP's options, resuming; on four ranks, as two hosts of two."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Exact
from accel.comm.compressor_memory import reshard
from accel.comm.engine import gradient_engine
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from tests.comm.cases import (
    COMPRESSORS,
    SECONDS,
    STARTS,
    Given,
    backward,
    buckets,
    flat,
    gradients,
    lacks,
    make,
    mean_gradient,
    residual,
    same_everywhere,
)
from tests.comm.few import few
from tests.comm.ranks import on_ranks, run_ranks

# Of one encoding of values and one of their sum: half a step of bfloat16 and of float16, half of 1/127 of the largest.
# A 1-bit step keeps the direction at best; error feedback makes up for it.
FIRST_ERROR = {"exact": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "int8": 2 / 127, "1-bit": 1.2, "1-bit twice": 1.4}
FIRST_ERROR |= dict.fromkeys(("PowerSGD", "ACP-SGD", "DGC"), 1.0)
FEEDBACK = few(COMPRESSORS, ("1-bit twice", "PowerSGD"))


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative error by the norm."""
    return ((got.double() - want).norm() / want.norm()).item()


@few(COMPRESSORS, ("int8", "1-bit twice", "PowerSGD"))
@on_ranks(4, per_host=2)
def test_applied_and_residual_add_up_to_the_sum_of_gradients(rank: int, world: int, names: tuple[str, ...]) -> None:
    """The same bits on all ranks, and the first step as near as the encoding is fine."""
    for name, hierarchical in itertools.product(names, (False, True)):
        what, compressor = (name, hierarchical), COMPRESSORS[name]()
        feedback = compressor.takes_feedback
        ddp, state = make(compressor, torch.float64, hierarchical=hierarchical, error_feedback=feedback)
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        for step in range(3):
            got = backward(ddp, gradients(rank, step, torch.float64))
            want = mean_gradient(world, step, torch.float64)
            assert same_everywhere(got), what
            assert step or apart(got, want) < FIRST_ERROR[name], what
            applied, wanted = applied + got, wanted + want
        left = residual(state)
        # Over three steps of twelve tensors, four ranks: roundings of the sums. Without a residual (exact) the law is
        # that the sum is right.
        assert lacks(applied + left, wanted) < 1e-13, what
        assert name == "exact" or left.norm() / wanted.norm() > 1e-6, what
        assert buckets(state) >= 4
        state.close()


@FEEDBACK
@on_ranks(4, per_host=2)
def test_residual_of_a_parameter_waits_while_no_rank_uses_it(rank: int, world: int, names: tuple[str, ...]) -> None:
    """At the last step one is left out on all ranks, another on all but one."""
    there, here = slice(STARTS[6], STARTS[7]), slice(STARTS[3], STARTS[4])
    for name, hierarchical in itertools.product(names, (False, True)):
        compressor = COMPRESSORS[name]()
        options = {"hierarchical": hierarchical, "error_feedback": compressor.takes_feedback}
        ddp, state = make(compressor, torch.float64, find_unused_parameters=True, **options)
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        for step in range(3):
            given: list[Any] = gradients(rank, step, torch.float64)
            want = mean_gradient(world, step, torch.float64)
            if step == 2:
                before = residual(state)
                given[6] = None
                want[there] = 0
                given[3] = given[3] if rank == 0 else None
                want[here] = gradients(0, step, torch.float64)[3].reshape(-1) / world
            applied, wanted = applied + backward(ddp, given).double(), wanted + want
        left = residual(state)
        assert lacks(applied + left, wanted) < 1e-13, (name, hierarchical)
        assert torch.equal(before[there], left[there]), (name, hierarchical)
        assert left[there].any() == (name != "exact"), (name, hierarchical)
        assert same_everywhere(applied), (name, hierarchical)
        state.close()


@FEEDBACK
@on_ranks(4, per_host=2)
def test_a_void_step_arrives_and_leaves_the_residual_alone(rank: int, world: int, names: tuple[str, ...]) -> None:
    for name, hierarchical in itertools.product(names, (False, True)):
        compressor = COMPRESSORS[name]()
        ddp, state = make(compressor, hierarchical=hierarchical, error_feedback=compressor.takes_feedback)
        for step in range(2):
            backward(ddp, gradients(rank, step))
        before = residual(state)
        for bad in (float("inf"), float("nan")):
            given = gradients(rank, 3)
            if rank == 1:
                given[6][20, 20] = bad
            assert not torch.isfinite(backward(ddp, given)[STARTS[6] + 20 * 40 + 20]), (name, hierarchical)
        assert torch.equal(before, residual(state)), (name, hierarchical)
        assert torch.isfinite(backward(ddp, gradients(rank, 4))).all(), (name, hierarchical)
        state.close()


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "float64": {"dtype": torch.float64},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "one bucket": {"bucket_cap_mb": 25},
    "no_sync": {},
}
"""Options of DDP, and dtypes."""


@few(MODES, ("static graph, views", "unused", "no_sync"))
@on_ranks(4, per_host=2)
def test_options_and_dtypes_of_ddp(rank: int, world: int, names: tuple[str, ...]) -> None:
    bounds = {"float16": 2**-9, "bfloat16": 2**-6}
    for name, hierarchical in itertools.product(names, (False, True)):
        dtype = MODES[name].get("dtype", torch.float32)
        compressor = Exact() if hierarchical else Half()
        ddp, state = make(compressor, hierarchical=hierarchical, **MODES[name])
        for step in range(3):
            given, want = gradients(rank, step, dtype), mean_gradient(world, step, dtype)
            if name == "unused":
                given[3] = None if rank == 1 else torch.zeros(64, 16)  # type: ignore[call-overload]
                given[8] = None  # type: ignore[call-overload]
                for i in (3, 8):
                    want[STARTS[i] : STARTS[i + 1]] = 0
            if name == "no_sync":
                with ddp.no_sync():
                    ddp.zero_grad(set_to_none=True)
                    ddp(given).backward()
                ddp(given).backward()
                got, want = flat([p.grad for p in ddp.parameters()]), 2 * want  # type: ignore[misc]
            else:
                got = backward(ddp, given)
            assert same_everywhere(got), (name, hierarchical)
            assert apart(got, want) < max(1e-6 if hierarchical else 2**-7, bounds.get(name, 0)), (name, hierarchical)
        state.close()


RESUMED = {
    "int8, flat": ("int8", False),
    "1-bit, hosts": ("1-bit", True),
    "PowerSGD, hosts": ("PowerSGD", True),
    "DGC, flat": ("DGC", False),
}


@few(RESUMED, ("PowerSGD, hosts",))
@on_ranks(4, per_host=2)
def test_resuming_equals_not_stopping(rank: int, world: int, names: tuple[str, ...]) -> None:
    """After 3 steps: with the same ranks to the bit, and the rest of the sum on two ranks."""
    for name, hierarchical in map(RESUMED.__getitem__, names):

        def fresh() -> tuple[DistributedDataParallel, CommState]:
            # With find_unused_parameters DDP keeps its first buckets, so that both runs quantise alike.
            options = {"hierarchical": hierarchical, "error_feedback": True, "find_unused_parameters": True}  # noqa: B023
            return make(COMPRESSORS[name](), **options)  # noqa: B023

        ddp, state = fresh()
        whole = [backward(ddp, gradients(rank, step)) for step in range(6)]
        state.close()
        ddp, first = fresh()
        for step in range(3):
            assert torch.equal(backward(ddp, gradients(rank, step)), whole[step]), name
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        through_pickle, left = pickle.loads(pickle.dumps(first)), residual(first)
        assert left.any()
        first.close()
        ddp, second = fresh()
        second.load_state_dict(saved)
        for step in range(3, 6):
            assert torch.equal(backward(ddp, gradients(rank, step)), whole[step]), name
        assert second.step == 6
        second.close()
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004, find_unused_parameters=True)
        through_pickle.bind(ddp)
        ddp.register_comm_hook(through_pickle, hook)
        assert torch.equal(backward(ddp, gradients(rank, 3)), whole[3]), name
        through_pickle.close()

        states: list[Any] = [None] * world
        dist.all_gather_object(states, saved)
        pair = dist.new_group([0, 1])
        if rank < 2:
            ddp, fewer = make(COMPRESSORS[name](), group=pair, error_feedback=True)
            fewer.load_state_dict(reshard(states, 2)[rank])
            got = backward(ddp, gradients(rank, 3)).double() + backward(ddp, gradients(rank, 4)).double()
            assert lacks(got + residual(fewer, pair), left + mean_gradient(2, 3) + mean_gradient(2, 4)) < 1e-5, name
            fewer.close()


def check_hosts(rank: int, world: int, per_host: int) -> None:
    """Compare what comes by hosts with the mean, for so many ranks on each."""
    os.environ.update(GROUP_RANK=str(rank // per_host), LOCAL_WORLD_SIZE=str(per_host))
    for name in ("exact", "int8"):
        ddp, state = make(COMPRESSORS[name](), hierarchical=True)
        for step in range(2):
            got = backward(ddp, gradients(rank, step))
            assert same_everywhere(got), (name, per_host)
            bound = 1e-6 if name == "exact" or per_host == world else 2 / 127
            assert apart(got, mean_gradient(world, step)) < bound, (name, per_host)
        assert len(state.topology.hosts) == world // per_host
        state.close()


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (6, [3]),
        pytest.param(6, [2], marks=pytest.mark.slow),
        pytest.param(12, [1, 2, 3, 4, 6, 12], marks=pytest.mark.slow),
        pytest.param(16, [1, 2, 4, 8, 16], marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_by_hosts_equals_flat_for_every_shape(rank: int, world: int, sizes: list[int]) -> None:
    for per_host in sizes:
        check_hosts(rank, world, per_host)


@on_ranks(2, per_host=2)
def test_one_host_alone_loses_nothing(rank: int, world: int) -> None:
    for name, compressor in COMPRESSORS.items():
        feedback = compressor().takes_feedback
        ddp, state = make(compressor(), torch.float64, hierarchical=True, error_feedback=feedback)
        for step in range(3):
            got = backward(ddp, gradients(rank, step, torch.float64))
            assert lacks(got, mean_gradient(world, step, torch.float64)) < 1e-14, name
        assert not residual(state).any(), name
        state.close()


@on_ranks(4, per_host=2)
def test_a_state_that_is_bound_to_other_hosts_takes_its_residuals_along(rank: int, world: int) -> None:
    for name in ("int8", "ACP-SGD"):
        os.environ.update(GROUP_RANK=str(rank // 2))
        ddp, state = make(COMPRESSORS[name](), torch.float64, hierarchical=True, error_feedback=True)
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        for step in range(5):
            if step == 3:
                os.environ.update(GROUP_RANK=str(rank % 2))
                state.bind(ddp)
            got = backward(ddp, gradients(rank, step, torch.float64))
            assert same_everywhere(got), name
            applied, wanted = applied + got, wanted + mean_gradient(world, step, torch.float64)
        left = residual(state)
        assert lacks(applied + left, wanted) < 1e-13, name
        assert left.any(), name
        state.close()


@on_ranks(1)
def test_one_rank_alone_gets_its_own_gradients(rank: int, world: int) -> None:
    ddp, state = make(COMPRESSORS["int8"](), hierarchical=True)
    assert torch.equal(backward(ddp, gradients(rank, 0)), flat(gradients(rank, 0)))
    state.close()


@on_ranks(2)
def test_future_chains_and_a_dropped_state_ends_its_threads(rank: int, world: int) -> None:
    def twice(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the classes
        return hook(state, bucket).then(lambda done: done.value() * 2)

    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004)
    state = CommState(ddp, timeout=SECONDS)
    ddp.register_comm_hook(state, twice)
    for step in range(2):
        got = backward(ddp, gradients(rank, step)).double()
        assert (got - 2 * mean_gradient(world, step)).abs().max() < 1e-5
    threads = [one for one in threading.enumerate() if one.name.startswith("accel-comm")]
    assert threads
    ddp = state = None  # type: ignore[assignment]
    gc.collect()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def late_rank(rank: int, world: int) -> tuple[float, float]:
    """Let rank 1 take long to connect; return when its groups were made (0 elsewhere), and when the state was."""

    made, stages = 0.0, gradient_engine.pipeline_stages

    def late(*given: Any) -> Any:
        nonlocal made
        found = stages(*given)
        if rank == 1:
            time.sleep(0.5)
            made = time.monotonic()
        return found

    gradient_engine.pipeline_stages = late
    state = CommState(DistributedDataParallel(Given()), Exact(), timeout=SECONDS)
    found = made, time.monotonic()
    state.close()
    return found


def test_a_state_is_made_when_every_rank_has_connected() -> None:
    """It may be closed at once: that cut off ranks that were still connecting."""
    found = run_ranks(late_rank, 3)
    assert all(ready >= found[1][0] > 0 for _, ready in found)
