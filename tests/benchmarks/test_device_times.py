"""Times of a played GPU, whose graphs take what their calls say: the arithmetic is what is tested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import device_times as bench


class Played:
    """Replays take the milliseconds of the calls that were captured; the first one three times that."""

    def __init__(self) -> None:
        self.now = self.captured = 0.0
        self.capturing, self.first = False, True
        self.calls: list[str] = []

    def work(self, name: str, took_ms: float) -> str:
        if self.capturing:
            self.captured += took_ms
            self.calls.append(name)
        return name

    def replay(self) -> None:
        self.now += self.captured * (3 if self.first else 1)
        self.first = False

    @contextlib.contextmanager
    def graph(self, _: Any) -> Iterator[None]:
        self.captured, self.capturing, self.first, self.calls = 0.0, True, True, []
        yield
        self.capturing = False

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    device = Played()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda: stream,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=device.replay),
        "graph": device.graph,
        "Event": device.event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device


def test_a_replay_is_shared_among_its_calls(played: Played) -> None:
    calls = [lambda: played.work("a", 1.0), lambda: played.work("b", 2.0), lambda: played.work("c", 3.0)]
    found = bench.replayed(calls)
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)  # the slow first replay is not counted
    assert played.calls == ["a", "b", "c"] * 3  # 8 calls at least, each set in its turn


def test_many_sets_come_once_in_a_graph(played: Played) -> None:
    bench.replayed([lambda: played.work("a", 1.0)] * 20)
    assert len(played.calls) == 20


def test_the_flush_is_taken_off(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    words = SimpleNamespace(amax=lambda: played.work("flush", 0.5))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: words)
    assert bench.replayed_flushed(lambda: played.work("a", 0.25)).median == pytest.approx(0.25)
    assert played.calls == ["flush", "a"] * bench.LEAST_CALLS


@pytest.mark.parametrize(("bytes_each", "count"), [(3e6, 80), (240e6, 2), (1e12, 2), (59e6, 5)])
def test_sets_are_four_times_the_cache(bytes_each: float, count: int) -> None:
    assert bench.sets(bytes_each, 60_000_000) == count
