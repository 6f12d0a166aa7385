"""Stages issued as on a GPU: in one thread, in one order, with what threads compute; here over gloo."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from accel.comm.engine import pipeline
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.ranks.channel import ConnectionBroken, GlooChannel, NcclChannel
from tests.comm import cases
from tests.comm.cases import COMPRESSORS, SECONDS, Given, backward, gradients, make, same_everywhere
from tests.comm.ranks import on_ranks, run_ranks


def in_line(on: bool = True) -> None:
    """Let this rank's states issue stages as on a GPU."""
    pipeline.in_line = lambda device: on


@on_ranks(2)
def test_one_thread_issues_everything_in_the_order_of_buckets(rank: int, world: int) -> None:
    """On a rank that is slow to encode as on the other."""
    noted: list[tuple[str, int]] = []

    def noting(call: Any, what: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            noted.append((what, threading.get_ident()))
            return call(*args, **kwargs)

        return called

    def noting_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the classes
        found = hook(state, bucket)
        noted.append((f"bucket {bucket.index()}", threading.get_ident()))
        return found

    encode = Int8.encode

    def slowly(*args: Any) -> None:
        time.sleep(0.01 * rank)
        encode(*args)

    in_line()
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004, find_unused_parameters=True)
    state = CommState(ddp, Int8(64), timeout=SECONDS)
    ddp.register_comm_hook(state, noting_hook)
    backward(ddp, gradients(rank, 0))
    Int8.encode = slowly  # type: ignore[method-assign]
    GlooChannel.exchange = noting(GlooChannel.exchange, "exchange")  # type: ignore[method-assign]
    noted.clear()
    assert same_everywhere(backward(ddp, gradients(rank, 1)))
    # Both exchanges of a bucket come before DDP goes on, so that its map of used parameters comes after them too.
    buckets = len(noted) // 3
    assert buckets > 3
    assert [what for what, _ in noted] == [
        what for i in range(buckets) for what in ("exchange", "exchange", f"bucket {i}")
    ]
    assert len({thread for _, thread in noted}) == 1
    state.close()


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_it_computes_what_threads_compute(rank: int, world: int) -> None:
    for name, compressor in COMPRESSORS.items():
        means = []
        for on in (False, True):
            in_line(on)
            ddp, state = make(compressor(), hierarchical=True, error_feedback=compressor().takes_feedback)
            means.append([backward(ddp, gradients(rank, step)) for step in range(3)])
            state.close()
        assert all(map(torch.equal, *means)), name
        assert same_everywhere(means[1][-1]), name


class Group:
    """Stands in for one of NCCL."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.called.append(name)


def test_an_aborted_group_of_nccl_is_not_shut_down_nor_used_again() -> None:
    channel = NcclChannel.__new__(NcclChannel)
    channel.rank, channel.size, channel._group = 0, 2, (group := Group())
    channel.abort()
    channel.abort()
    channel.close()
    assert group.called == ["abort"]
    pair = [torch.ones(2), torch.ones(2)]
    for call in (lambda: channel.all_reduce(pair[0]), lambda: channel.exchange(pair, pair)):
        with pytest.raises(ConnectionBroken, match="the group was closed"):
            call()


def fails(rank: int, world: int) -> dict[str, Any]:
    """Let a compressor raise on one rank."""
    in_line()
    return cases.compressor_fails(rank, world)


@pytest.mark.slow
def test_a_failure_is_told_on_all_ranks() -> None:
    for found in run_ranks(fails, 2, meet=False):
        assert "no room for the codes" in found["said"]
        assert found["said"].startswith("CommError")
