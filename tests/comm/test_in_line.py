"""Stages issued as on a GPU: in one thread, in one order, with what threads compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.comm.ranks.channel import ConnectionBroken, NcclChannel
from tests.comm import in_line_cases as cases
from tests.comm.cases import COMPRESSORS
from tests.comm.ranks import run_ranks


def test_one_thread_issues_everything_in_the_order_of_buckets() -> None:
    first, second = run_ranks(cases.order, 2)
    assert first["threads"] == second["threads"] == 1
    assert first["order"] == second["order"]
    # Both exchanges of a bucket come before DDP goes on, so that its map of used parameters comes after them too.
    buckets = len(first["order"]) // 3
    assert first["order"] == [one for i in range(buckets) for one in ("exchange", "exchange", f"bucket {i}")]
    assert buckets > 3
    assert first["mean"].equal(second["mean"])


@pytest.mark.slow
def test_it_computes_what_threads_compute() -> None:
    for found in run_ranks(cases.as_threads, 4, per_host=2):
        assert found.keys() == COMPRESSORS.keys()
        assert all(found.values()), found


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


@pytest.mark.slow
def test_a_failure_is_told_on_all_ranks() -> None:
    for found in run_ranks(cases.fails, 2, meet=False):
        assert "no room for the codes" in found["said"]
        assert found["said"].startswith("CommError")
