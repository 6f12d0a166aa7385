"""What a recording that fails leaves behind on CUDA, on stand-ins for torch's functions."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel.graphs.recorder import CudaRecorder


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)


class Graph:
    """A captured graph."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Cuda:
    """The state that torch keeps: the stream, and pools that are recorded to."""

    def __init__(self) -> None:
        self.first, self.side = Stream("first"), Stream("side")
        self.current = self.first
        self.recorded_to: list[Any] = []
        self.frees_pool = False
        self.draws_are_captured = False

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Stream, capture_error_mode: str, pool: Any = "own") -> Iterator[None]:
        """End the capture before the stream goes back, as torch does."""
        assert not self.recorded_to, "captures_underway.empty()"
        before, self.current = self.current, stream
        self.recorded_to.append(pool)
        self.draws_are_captured = True
        try:
            yield
        except RuntimeError as error:
            if self.frees_pool:
                self.recorded_to.remove(pool)
            raise RuntimeError("CUDA error: a capture was invalidated") from error
        self.recorded_to.remove(pool)
        self.draws_are_captured = False
        self.current = before

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.recorded_to:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded_to.remove(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    own, handles = Cuda(), itertools.count(1)
    parts: dict[str, Any] = {
        "Stream": lambda device: own.side,
        "graph_pool_handle": lambda: (0, next(handles)),
        "CUDAGraph": Graph,
        "current_stream": lambda device=None: own.current,
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, value in parts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("set_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(own, name))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", own.end, raising=False)
    return own


def waits() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("frees_pool", [False, True])
def test_a_recording_that_fails_leaves_nothing_behind(cuda: Cuda, frees_pool: bool) -> None:
    cuda.frees_pool = frees_pool  # torch with and without pytorch/pytorch#180395
    recorder = CudaRecorder(torch.device("cuda", 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):  # and not what follows of it
            recorder.record(waits)
        assert cuda.current is cuda.first
        assert cuda.recorded_to == []
        assert not cuda.draws_are_captured
    assert recorder.record(lambda: 3)[1] == 3


def test_graphs_share_memory_as_long_as_one_of_them_lives(cuda: Cuda) -> None:
    """torch refuses a pool that no graph uses any more while a tensor of it lives."""
    pools: list[Any] = []
    recorder = CudaRecorder(torch.device("cuda", 0))
    record = lambda: recorder.record(lambda: pools.append(cuda.recorded_to[-1]))[0]  # noqa: E731
    first, second = record(), record()
    first.reset()
    third = record()
    assert pools[0] == pools[1] == pools[2]
    second.reset()
    third.reset()
    record()
    assert pools[3] != pools[0]


def test_a_step_that_autograd_holds_on_to_is_named(cuda: Cuda) -> None:
    def backward() -> None:
        raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")

    with pytest.raises(RuntimeError, match="holds on to an earlier step"):
        CudaRecorder(torch.device("cuda", 0)).record(backward)


class Made:
    """What a recording has made so far."""


@pytest.mark.parametrize("why", ["CUDA out of memory", "the legacy stream depends on it"])
def test_a_recording_that_fails_keeps_nothing_alive(cuda: Cuda, why: str) -> None:
    """Not even until the next garbage collection, before which an eager call needs the memory."""
    made: list[weakref.ref[Made]] = []

    def fails() -> None:
        own = Made()
        made.append(weakref.ref(own))
        raise RuntimeError(why)

    recorder = CudaRecorder(torch.device("cuda", 0))
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            recorder.record(fails)
        assert made[0]() is None
    finally:
        gc.enable()


def test_work_aside_that_fails_is_waited_for(cuda: Cuda) -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.aside(waits)
    assert cuda.first.waited == ["side"]
    assert cuda.current is cuda.first
