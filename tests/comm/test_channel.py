"""Channels over gloo: what they ask of the store, and how many sockets they hold."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from accel.comm.ranks import channel
from accel.comm.ranks.channel import ConnectionBroken, GlooChannel


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


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each group for a large one, whose ranks are connected on demand."""
    monkeypatch.setattr(channel, "_CONNECTED", 0)


@pytest.mark.usefixtures("large")
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


@pytest.mark.usefixtures("large")
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


def test_a_group_is_freed_while_a_message_is_there_that_nobody_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an abort: with connections made on demand, gloo's own thread then never ends, and is waited for."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    one, other = made(2)[0]
    everywhere(2, lambda rank: (one, other)[rank].swap(1 - rank, torch.ones(3), torch.zeros(3)))
    given_up = one._open().recv([torch.zeros(1000)], 1, 0)
    time.sleep(0.2)  # until the other rank knows that it is waited for
    del given_up
    threading.Thread(target=lambda: other._open().send([torch.ones(1000)], 0, 0), daemon=True).start()
    time.sleep(0.2)
    freeing = threading.Thread(target=one.abort, daemon=True)
    freeing.start()
    freeing.join(20)
    assert not freeing.is_alive()
    other.abort()


def test_a_peer_that_never_comes_is_told_as_other_broken_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ConnectionBroken):
        GlooChannel(HashStore(), range(2), 0, timedelta(seconds=0.5))
