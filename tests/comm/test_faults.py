"""Faults: every rank gets an error with rank and cause in time, no thread is left, nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Exact
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.selection.planner import Planner
from tests.comm import cases
from tests.comm.cases import SECONDS, Given, backward, gradients, message
from tests.comm.ranks import on_ranks, run_ranks


@on_ranks(3)
def test_bad_input_is_refused_in_one_sentence(rank: int, world: int) -> None:
    def refuses(text: str, call: Callable[[], Any]) -> None:
        said = message(call)
        assert said.startswith("InvalidArgument: "), said
        assert text in said, said
        assert "\n" not in said

    model = Given()
    ddp = DistributedDataParallel(model)
    state = CommState(ddp, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    said = message(lambda: ddp.register_comm_hook(state, hook))
    assert said.startswith("RuntimeError")
    assert "can only be called once" in said
    state.close()
    refuses("must be bound first", lambda: backward(ddp, gradients(rank, 0)))
    stateless = DistributedDataParallel(Given())
    stateless.register_comm_hook(None, hook)
    refuses("must be a CommState or an AutoComm, got NoneType", lambda: backward(stateless, gradients(rank, 0)))
    other = DistributedDataParallel(Given())
    state = CommState(Given(), timeout=SECONDS)
    other.register_comm_hook(state, hook)
    refuses("pass the module that DDP wraps", lambda: backward(other, gradients(rank, 0)))
    state.close()
    refuses("compressor must be a Compressor, got 'int8'", lambda: CommState(model, "int8"))  # type: ignore[arg-type]
    feedback = "error_feedback=True needs a compressor that uses it, got Exact()"
    refuses(feedback, lambda: CommState(model, Exact(), error_feedback=True))
    refuses("timeout must be positive", lambda: CommState(model, timeout=timedelta()))
    refuses("must have parameters, got none", lambda: CommState(nn.ReLU()))

    unfit: tuple[tuple[str, nn.Module, Callable[[nn.Module], Any]], ...] = (
        (
            "gradients must be dense, got a sparse one of 'weight'",
            nn.Embedding(10, 4, sparse=True),
            lambda ddp: ddp(torch.tensor([1, 2])).sum(),
        ),
        (
            "must be real floating point, got torch.complex64 of 'weight'",
            nn.Linear(5, 4, bias=False, dtype=torch.complex64),
            lambda ddp: ddp(torch.ones(5, dtype=torch.complex64)).abs().sum(),
        ),
    )
    for text, net, loss in unfit:
        own = DistributedDataParallel(net)
        state = CommState(own, Int8(), timeout=SECONDS)
        own.register_comm_hook(state, hook)
        refuses(text, lambda: loss(own).backward())  # noqa: B023
        state.close()

    # What differs between ranks, and is named on all of them.
    kind = Int8() if rank else Half()
    refuses("all ranks must have the same compressor, got Half(", lambda: CommState(model, kind, timeout=SECONDS))
    narrow = nn.Linear(3 + rank, 2)
    shapes = "all ranks must have the same parameters' names, shapes and dtypes"
    refuses(shapes, lambda: CommState(narrow, timeout=SECONDS))
    os.environ.update(GROUP_RANK=str(min(rank, 1)))
    uneven = "as many ranks on each host, got 1 on host 0, 2 on host 1"
    refuses(uneven, lambda: CommState(model, hierarchical=True, timeout=SECONDS))
    planned = DistributedDataParallel(Given())
    half = dist.new_group([0])
    said = message(lambda: CommState(model, process_group=half, timeout=SECONDS).close())
    assert said.startswith(
        "nothing raised" if rank == 0 else f"InvalidArgument: rank {rank} is not in process_group"
    ), said
    if rank:
        said = message(lambda: CommState(model, timeout=timedelta(seconds=0.5)))
        assert "waits for rank 0, which made no CommState within 0.5 s" in said
        said = message(lambda: Planner(planned, patience=timedelta(seconds=0.5)))
        assert "waits for rank 0, which made no Planner within 0.5 s" in said
    dist.barrier()


@pytest.mark.parametrize("hierarchical", [False, True], ids=["flat", "hosts"])
def test_rank_that_dies_is_named_on_all_others(hierarchical: bool) -> None:
    found = run_ranks(cases.dies, 4, hierarchical, per_host=2, meet=False)
    assert found.pop(1) == 3
    for one in found:
        assert one["said"].startswith("CommError: rank ")
        assert "because rank 1 has ended" in one["said"]
        assert one["again"] == one["said"]
        assert one["seconds"] < cases.WAIT.total_seconds()
        assert one["closing"] < cases.WAIT.total_seconds()


def test_rank_with_other_buckets_is_named_on_all_ranks() -> None:
    for rank, one in enumerate(run_ranks(cases.different_buckets, 3, meet=False)):
        assert one["said"].startswith(f"CommError: rank {rank} stopped at step 1, bucket 0")
        assert "all ranks must have the same buckets" in one["said"]
        assert one["seconds"] < cases.WAIT.total_seconds()


def test_rank_that_hangs_is_named_while_it_hangs() -> None:
    found = run_ranks(cases.hangs, 3, meet=False)
    for one in (found[0], found[2]):
        assert "because rank 1 has ended, hangs outside of communication, or is cut off: it gave" in one["said"]
    assert found[1]["said"].startswith("CommError")


def test_compressor_that_raises_on_one_rank_is_told_to_all() -> None:
    for rank, one in enumerate(run_ranks(cases.compressor_fails, 3, meet=False)):
        assert "no room for the codes" in one["said"]
        assert ("because rank 1 failed at" in one["said"]) == (rank != 1)
        assert one["seconds"] < cases.WAIT.total_seconds()
