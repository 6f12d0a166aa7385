"""What records work on the GPU and runs it again: CUDA's graphs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from accel.errors import InvalidState

_T = TypeVar("_T")
_STILL_HELD = (
    "autograd holds on to an earlier step on another stream, by its loss or an output; delete those (del loss) before "
    "the first captured step"
)


class CudaGraph:
    """A CUDA graph that its recorder knows to be alive."""

    def __init__(self, graph: torch.cuda.CUDAGraph, alive: weakref.WeakSet[CudaGraph]) -> None:
        self._graph, self._alive = graph, alive
        self.replay = graph.replay
        alive.add(self)

    def reset(self) -> None:
        """Give its memory back."""
        self._alive.discard(self)
        self._graph.reset()


class CudaRecorder:
    """Records CUDA graphs that share a pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def aside(self, run: Callable[[], _T]) -> _T:
        """Run on a side stream, as captured libraries want it."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return run()
        finally:
            current.wait_stream(self._stream)

    def record(self, run: Callable[[], _T]) -> tuple[CudaGraph, _T]:
        """Capture on the side stream; threads of a loader, which pin memory, may go on."""
        graph = torch.cuda.CUDAGraph()
        if not self._alive:  # torch refuses a pool that no graph uses any more, as long as a tensor of it lives
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            before = torch.cuda.current_stream(self.device)
            try:
                with self._capturing(graph):
                    result = run()
            except BaseException:
                torch.cuda.set_stream(before)
                try:
                    self._unwind()
                finally:
                    torch.cuda.set_stream(before)
                raise
        return CudaGraph(graph, self._alive), result

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the block; raise what it raises, and not that the capture has failed for it."""
        first: BaseException | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    yield
                except BaseException as error:
                    first = error
                    raise
        except BaseException:
            if first is None:
                raise
        try:
            if first is not None and "legacy stream" in str(first):
                raise InvalidState(_STILL_HELD) from first
            if first is not None:
                raise first
        finally:
            del first  # its traceback has this frame: a cycle, in which what was captured would live on

    def _unwind(self) -> None:
        """Let allocator and generator end what a capture that was invalidated has begun.

        torch without pytorch/pytorch#180395 leaves it under way: the next `empty_cache` fails on it, and the next draw
        ("Offset increment outside graph capture", torch 2.11). There is no public function for the first; the generator
        learns it from a capture that ends well. The pool is not released: it is this recorder's, and newer torch does
        so by itself.
        """
        end: Callable[[int | None, Any], None] | None = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # torch has ended it
                end(self.device.index, self._pool)
        with contextlib.suppress(RuntimeError):
            number = torch.zeros((), device=self.device)
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                number.zero_()  # torch warns of a capture of nothing

    def waits(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)
