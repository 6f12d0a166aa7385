"""What records work on the GPU and runs it again: CUDA's graphs, behind an interface that has a stand-in in tests."""

from __future__ import annotations

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
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], _T]) -> tuple[RecordedGraph, _T]:
        """Capture on the side stream; threads of a loader, which pin memory, may go on."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = run()
        return graph, result

    def waits(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)
