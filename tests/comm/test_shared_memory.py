"""A channel through shared memory gives what one over sockets does, and is used only where all ranks can map it."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from accel.comm.ranks import shared_memory
from accel.comm.ranks.channel import Channel, ConnectionBroken, GlooChannel
from accel.comm.ranks.shared_memory import SharedMemoryChannel, through_memory
from tests.comm.test_channel import everywhere

SECONDS = timedelta(seconds=20)
HALF = 4096


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Areas of a page each, so that what is sent takes many turns."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(shared_memory, "HALF_BYTES", HALF)


def made(count: int) -> list[Channel]:
    store = HashStore()
    return everywhere(count, lambda rank: through_memory(GlooChannel(store, range(count), rank, SECONDS), SECONDS))


@pytest.fixture(params=[2, 3, 5])
def channels(request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    found = made(request.param)
    assert all(isinstance(one, SharedMemoryChannel) for one in found)
    yield found
    for one in found:
        one.close()


def values_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_those_of_all_ranks(channels: list[Channel], dtype: torch.dtype) -> None:
    sizes = (1, 5, 17, HALF // 8, HALF // 2, HALF + 3, 5 * HALF + 1, 0)
    count = len(channels)

    def summed(rank: int) -> list[Tensor]:
        found = [values_of(rank, numel, dtype) for numel in sizes]
        for values in found:
            channels[rank].all_reduce(values)
        return found

    everyone = everywhere(count, summed)
    for number, numel in enumerate(sizes):
        want = sum(values_of(rank, numel, dtype).double() for rank in range(count))
        for found in everyone:
            assert torch.equal(found[number], everyone[0][number])
            assert torch.allclose(
                found[number].double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 * (dtype.itemsize == 2) + 1e-6
            )


def test_not_finite_values_reach_every_rank(channels: list[Channel]) -> None:
    def summed(rank: int) -> Tensor:
        values = torch.ones(3 * HALF)
        values[rank :: 7 * len(channels)] = float("nan") if rank else float("inf")
        channels[rank].all_reduce(values)
        return values

    found = everywhere(len(channels), summed)
    assert all(torch.equal(each, found[0]) or torch.equal(each.isnan(), found[0].isnan()) for each in found)
    assert found[0].isinf().sum() > 0 and found[0].isnan().sum() > 0


@pytest.mark.parametrize("seed", range(4))
def test_any_calls_in_any_order_bring_what_was_sent(channels: list[Channel], seed: int) -> None:
    """Sizes that differ by rank, nothing at all, more than fits into an area, one collective after another."""
    draw, count = random.Random(seed), len(channels)
    sizes = [0, 1, 100, HALF // 4, HALF, HALF + 1, 3 * HALF + 5]
    calls = [
        (
            draw.choice(["exchange", "all_gather", "all_reduce"]),
            [[draw.choice(sizes) for _ in range(count)] for _ in range(count)],
        )
        for _ in range(12)
    ]

    def content(number: int, source: int, target: int, numel: int) -> Tensor:
        return (torch.arange(numel) * 7 + 31 * number + 5 * source + 3 * target).to(torch.uint8)

    def work(rank: int) -> list[str]:
        wrong = []
        for number, (kind, matrix) in enumerate(calls):
            if kind == "exchange":
                sends = [content(number, rank, to, matrix[rank][to]) for to in range(count)]
                receives = [torch.zeros(matrix[source][rank], dtype=torch.uint8) for source in range(count)]
                channels[rank].exchange(sends, receives)
                want = [content(number, source, rank, matrix[source][rank]) for source in range(count)]
                wrong += [kind for r in range(count) if r != rank and not torch.equal(receives[r], want[r])]
            elif kind == "all_gather":
                out = [torch.zeros(matrix[0][source], dtype=torch.uint8) for source in range(count)]
                own = content(number, rank, 0, matrix[0][rank])
                channels[rank].all_gather(own, out)
                wrong += [kind for r in range(count) if not torch.equal(out[r], content(number, r, 0, matrix[0][r]))]
            else:
                values = torch.full((matrix[0][0],), float(rank))
                channels[rank].all_reduce(values)
                wrong += [kind] * int((values != sum(range(count))).sum())
        return wrong

    assert everywhere(count, work) == [[]] * count


def test_what_lies_next_to_the_values_stays(channels: list[Channel]) -> None:
    def work(rank: int) -> Tensor:
        whole = torch.full((4 * HALF,), 9.0)
        channels[rank].all_reduce(whole[HALF : 3 * HALF])
        return whole

    for whole in everywhere(len(channels), work):
        assert torch.equal(whole[:HALF], torch.full((HALF,), 9.0))
        assert torch.equal(whole[3 * HALF :], torch.full((HALF,), 9.0))
        assert torch.equal(whole[HALF : 3 * HALF], torch.full((2 * HALF,), 9.0 * len(channels)))


def _no_memory(*_: Any) -> int:
    raise OSError("no room")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("_anonymous_file", lambda: -1),
        ("_opened", lambda *_: None),
    ],
)
def test_sockets_are_used_where_memory_cannot_be_shared(
    name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, name, replacement)
    found = made(3)
    assert [type(one) for one in found] == [GlooChannel] * 3
    for one in found:
        one.close()


def test_where_one_rank_cannot_map_an_area_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share a network but not their process numbers."""
    opened, refusals = shared_memory._opened, iter([True])
    monkeypatch.setattr(shared_memory, "_opened", lambda *given: None if next(refusals, False) else opened(*given))
    assert [type(one) for one in made(4)] == [GlooChannel] * 4


def test_a_rank_is_known_as_alive_before_another_can_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, known = shared_memory._opened, []

    def note(*given: int) -> Tensor | None:
        area = opened(*given)
        assert area is not None
        known.append(int(area[:HALF].view(torch.int64)[shared_memory._PROCESS]))
        return area

    monkeypatch.setattr(shared_memory, "_opened", note)
    for one in made(2):
        one.close()
    assert known == [os.getpid()] * 4


def test_a_system_without_memory_files_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _no_memory)
    assert shared_memory._anonymous_file() == -1
    monkeypatch.delattr(os, "memfd_create")
    assert shared_memory._anonymous_file() == -1


def test_another_area_under_the_same_number_is_not_taken() -> None:
    file = shared_memory._anonymous_file()
    try:
        os.pwrite(file, bytes([7] * 16), shared_memory._TOKEN_AT)
        assert shared_memory._opened(os.getpid(), file, *[7] * 16) is not None
        assert shared_memory._opened(os.getpid(), file, *[8] * 16) is None
        assert shared_memory._opened(os.getpid(), 0, *[7] * 16) is None  # no area
        assert shared_memory._opened(2**22 + 1, file, *[7] * 16) is None  # no process
    finally:
        os.close(file)


def test_nothing_stays_open_but_what_the_sockets_need() -> None:
    def descriptors() -> set[str]:
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if os.path.exists(link)}

    channels = made(2)
    assert not [name for name in descriptors() if "memfd" in name]
    for one in channels:
        one.close()


def test_a_peer_that_has_gone_is_a_broken_connection() -> None:
    one, other = made(2)
    other.abort()
    other.close()
    with pytest.raises(ConnectionBroken):
        one.all_reduce(torch.ones(10 * HALF))
    one.close()


def alone(process: int, timeout: timedelta) -> SharedMemoryChannel:
    """The channel of rank 0 of two, whose peer is a process that never signals."""
    areas = [torch.zeros(shared_memory.HEAD_BYTES + 2 * HALF, dtype=torch.uint8) for _ in range(2)]
    channel = SharedMemoryChannel((0, 1), 0, areas, timeout)
    channel._heads[1][shared_memory._PROCESS] = process
    return channel


def test_a_peer_whose_process_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_LOOK_S", 0.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ConnectionBroken, match="the process of rank 1 has ended"):
        alone(ended.pid, timedelta(hours=1)).all_reduce(torch.ones(10))
    zombie = subprocess.Popen(["true"])  # nobody has asked for its status yet
    with pytest.raises(ConnectionBroken, match="the process of rank 1 has ended"):
        alone(zombie.pid, timedelta(hours=1)).all_reduce(torch.ones(10))
    zombie.wait()


def test_a_peer_that_does_not_come_is_named() -> None:
    with pytest.raises(ConnectionBroken, match=r"rank 1 did not come within 0\.01 s"):
        alone(os.getpid(), timedelta(seconds=0.01)).all_reduce(torch.ones(10))
