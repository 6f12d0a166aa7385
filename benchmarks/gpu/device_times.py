"""How long a GPU takes: calls launched one by one, and what the device alone takes, with cold caches.

`launched` is what a caller waits for: the host's work for each call is in it wherever that takes longer than the
device's. `replayed` has the calls in a CUDA graph, so that the host does nothing between them. One set of inputs would
lie in the second cache from the second call on (an H200 has 50 to 60 MB of it); so the graph goes through as many sets
as are four times that cache together, and what the calls return is kept, so that no output is written twice.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.spread import Spread, extremes, fifths

Call = Callable[[], Any]

CACHES = 4
"""Times the second cache that all sets of inputs are together."""
LEAST_CALLS = 8
"""In a graph: below 1 ms the host may be late with the next replay."""
REPLAYS = 20
_FLUSHED_BYTES = 256 << 20
_LONG_MS = 400.0


def launched(call: Call) -> Spread:
    """Time a call as a caller sees it, the caches emptied before each; ms, 20 and 80 %.

    A call of seconds is made three times: the first has warmed up nothing that counts beside it.
    """
    from triton import testing

    first_ms = _once(call)
    if first_ms > _LONG_MS:
        return extremes([first_ms, _once(call), _once(call)])
    median, low, high = testing.do_bench(call, quantiles=[0.5, 0.2, 0.8])
    return Spread(median, low, high)


def _once(call: Call) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def sets(bytes_each: float, cache_bytes: int | None = None) -> int:
    """Return how many sets of inputs to go through, where a call moves so many bytes."""
    if cache_bytes is None:
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    return max(2, -int(-CACHES * cache_bytes // bytes_each))


def replayed(calls: Sequence[Call]) -> Spread:
    """Time the replays of a graph that makes all calls, one for each set of inputs; ms of one call."""
    turns = -(-LEAST_CALLS // len(calls))
    return fifths([time / (turns * len(calls)) for time in _replays(list(calls) * turns)])


def replayed_flushed(call: Call) -> Spread:
    """Time a call whose inputs come only once: a flush before each, whose own time is taken off.

    The flush reads: one that writes leaves what the next call must wait for, until it is in memory.
    """
    words = torch.ones(_FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
    both = [words.amax, call] * LEAST_CALLS
    alone = statistics.median(_replays([words.amax] * LEAST_CALLS))
    return fifths([(time - alone) / LEAST_CALLS for time in _replays(both)])


def _replays(calls: Sequence[Call]) -> list[float]:
    """Return the ms of each replay of a graph that makes these calls one after another."""
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):  # compiled, and workspaces allocated, before anything is captured
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    del kept
    # The first finds the caches as the capture left them, and the host not yet ahead of the device.
    return [one.elapsed_time(following) for one, following in itertools.pairwise(events[1:])]
