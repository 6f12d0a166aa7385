"""Channels over gloo: sums of every size, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

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


def made(count: int) -> list[GlooChannel]:
    store = HashStore()
    return everywhere(count, lambda rank: GlooChannel(store, range(count), rank, timedelta(seconds=20)))


@pytest.mark.parametrize("count", [3, 6])
def test_sums_are_those_of_all_ranks_for_every_size(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    channels = made(count)

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
    """As after an abort."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    one, other = made(2)
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
