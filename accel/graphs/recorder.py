"""What records work on the GPU and runs it again: CUDA's graphs, behind an interface that has a stand-in in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

_T = TypeVar("_T")


class RecordedGraph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Run it again, on the memory that it was recorded with."""

    def reset(self) -> None:
        """Give its memory back."""


class GraphRecorder(Protocol):
    """Records work."""

    @property
    def device(self) -> torch.device:
        """Where the work runs."""

    def aside(self, run: Callable[[], _T]) -> _T:
        """Run it as it must be run before it is recorded: on a stream of its own."""

    def record(self, run: Callable[[], _T]) -> tuple[RecordedGraph, _T]:
        """Record it, without running it on the device."""

    def waits(self) -> None:
        """Wait for all work of the device."""


class CudaRecorder:
    """Records CUDA graphs that share a pool of memory: they never run at the same time.

    Args:
        device: of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def aside(self, run: Callable[[], _T]) -> _T:
        """Run on a side stream, as captured libraries want it."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return run()
        finally:
            current.wait_stream(self._stream)

    def record(self, run: Callable[[], _T]) -> tuple[RecordedGraph, _T]:
        """Capture on the side stream; threads of a loader, which pin memory, may go on."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            before = torch.cuda.current_stream(self.device)
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = run()
            except BaseException:
                torch.cuda.set_stream(before)
                self._unwind()
                raise
        return graph, result

    def _unwind(self) -> None:
        """Let the allocator end what a capture that was invalidated has begun.

        torch without pytorch/pytorch#180395 leaves it under way, and the next `empty_cache` fails on it. There is no
        public function for it. The pool is not released: it is this recorder's, and newer torch does so by itself.
        """
        end: Callable[[int | None, Any], None] | None = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # torch has ended it
                end(self.device.index, self._pool)

    def waits(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)
