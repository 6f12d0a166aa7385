"""Channels over gloo: what they ask of the store, and how many sockets they hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from accel.comm.ranks.channel import GlooChannel


def everywhere(count: int, work: Callable[[int], Any]) -> list[Any]:
    found: list[Any] = [None] * count

    def run(rank: int) -> None:
        found[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def sockets() -> int:
    """Return the open descriptors of this process, in which all the ranks are."""
    return len(os.listdir("/proc/self/fd"))


def made(count: int) -> tuple[list[GlooChannel], HashStore, int]:
    store, before = HashStore(), sockets()
    channels = everywhere(count, lambda rank: GlooChannel(store, range(count), rank, timedelta(seconds=20)))
    return channels, store, sockets() - before


def test_making_one_costs_each_rank_as_much_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    held = {}
    for count in (2, 4, 12):
        channels, store, opened = made(count)
        assert store.num_keys() == count  # each has told its address, and nobody has asked for one
        held[count] = opened / count
        for one in channels:
            one.close()
    assert held[12] <= held[2]  # it was one to each of the others


def test_a_rank_connects_to_those_that_it_speaks_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    channels, _, _ = made(12)

    def next_to_next(rank: int) -> float:
        values, nothing = torch.full((3,), float(rank)), torch.empty(0)
        received = torch.zeros(3)
        for even in (True, False):  # in pairs, first 0 and 1, then 1 and 2
            peer = rank + 1 if (rank % 2 == 0) == even else rank - 1
            if 0 <= peer < 12:
                channels[rank].swap(peer, values if peer > rank else nothing, received if peer < rank else nothing)
        return float(received[0])

    base = sockets()
    assert everywhere(12, next_to_next) == [0.0] + [float(rank - 1) for rank in range(1, 12)]
    assert sockets() - base <= 2 * 11  # a connection has two ends, both of them here
    for one in channels:
        one.close()


@pytest.mark.parametrize("count", [3, 6])
def test_sums_are_those_of_all_ranks_for_every_size(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    channels, _, _ = made(count)

    def summed(rank: int) -> list[torch.Tensor]:
        found = []
        for numel in (1, 100, 10_000, 40_000):  # direct, direct, shares, a ring
            values = torch.full((numel,), rank + 0.1)
            channels[rank].all_reduce(values)
            found.append(values)
        return found

    want = sum(torch.tensor(rank + 0.1).double() for rank in range(count))
    everyone = everywhere(count, summed)
    for found in everyone:
        for values, first in zip(found, everyone[0], strict=True):
            assert torch.equal(values, first)
            assert torch.allclose(values.double(), want, rtol=1e-6)
    for one in channels:
        one.close()
