"""Channels over gloo: sums, in the messages that the model counts, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from accel.comm.ranks import channel
from accel.comm.ranks.channel import SMALL_BYTES, ConnectionBroken, GlooChannel, sum_small, sums_directly
from tests.comm.simulated import Counting
from tests.comm.threaded_ranks import together


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
    """As after an abort: with connections made on demand, gloo's own thread then never ends, and is waited for."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    one, other = made(2)
    everywhere(2, lambda rank: (one, other)[rank].exchange([torch.ones(3)] * 2, [torch.zeros(3)] * 2))
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


SIZES = (2, 3, 4, 6, 8, 16, 64)


@pytest.mark.sample(5)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_right_and_the_same_bits_on_every_rank(
    size: int, directly: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "sums_directly", lambda size, nbytes: directly)
    for numel in (1, size, 37):  # fewer elements than ranks: some have no share
        given = torch.randn(size, numel, dtype=torch.float64).to(dtype)

        def work(line, given=given):  # type: ignore[no-untyped-def]
            values = given[line.rank].clone()
            sum_small(line, values)
            return values

        found = together(size, work)
        want = given.double().sum(0)
        for one in found:
            assert torch.equal(one, found[0])
        # Of size − 1 roundings in float32 or wider, and one to the dtype.
        wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        bound = (wide * size + torch.finfo(dtype).eps) * given.double().abs().sum(0)
        assert ((found[0].double() - want).abs() <= bound).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_sends_everything_in_one_round_or_a_rings_bytes_in_two(size: int) -> None:
    for nbytes in (4, 64, 1000, 4096, 20_000, SMALL_BYTES - 4):
        line = Counting(size - 1, size)
        sum_small(line, torch.zeros(nbytes // 4))  # type: ignore[arg-type]
        if sums_directly(size, nbytes):
            assert (line.messages, line.bytes) == (size - 1, (size - 1) * nbytes)
        else:
            assert line.messages <= 2 * (size - 1)
            assert line.bytes <= 2 * (size - 1) / size * nbytes + 2 * 4 * size  # shares of whole elements


def test_the_size_up_to_which_ranks_hear_each_other_directly_falls_with_their_number() -> None:
    limits = [sum(sums_directly(size, nbytes) for nbytes in range(4, SMALL_BYTES, 64)) for size in SIZES]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == len(range(4, SMALL_BYTES, 64))  # two ranks send the same bytes either way
    assert 64 * limits[SIZES.index(6)] < SMALL_BYTES / 4
