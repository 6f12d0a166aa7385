"""Measurements beside the clocks during ordinary steps: workers, DDP's exchange of gradients, other processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.profiler.cgroup import Throttle
from accel.profiler.evidence import WorkerShare
from accel.profiler.host import CrowdMeter, ThreadMeter, ThreadTime

_DDP_TIMES_EVERY = 100
"""Steps between two that DDP times; torch's default."""


class Span:
    """The growth of a counter within the observed spans."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._from: float | None = None

    def begin(self, value: float) -> None:
        """Begin a span."""
        self._from = value

    def end(self, value: float) -> None:
        """End the span."""
        self._sum = self.total(value)
        self._from = None

    def total(self, value: float) -> float:
        """Return the growth so far."""
        return self._sum + (value - self._from if self._from is not None else 0.0)


class Workers:
    """Times of the loader's worker processes, between their first and last readings."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[ThreadMeter, ThreadTime, ThreadTime]] = {}

    def sample(self, pids: Iterable[int]) -> None:
        """Read their times: 4 µs each."""
        for pid in pids:
            if pid in self._times:
                meter, first, last = self._times[pid]
                self._times[pid] = (meter, first, meter.read() or last)
                continue
            meter = ThreadMeter(pid)
            now = meter.read()
            if now is not None:
                self._times[pid] = (meter, now, now)

    def shares(self) -> list[WorkerShare]:
        """Return how each worker spent its time."""
        shares = [(pid, first.share_until(last)) for pid, (_, first, last) in self._times.items()]
        return [WorkerShare(pid=pid, share=share) for pid, share in shares if share is not None]

    def close(self) -> None:
        """Close the files of all."""
        for meter, _, _ in self._times.values():
            meter.close()


class DdpWait:
    """How long DDP's all-reduce goes on after the last gradient has been computed, by DDP's own timers."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._timed: list[DistributedDataParallel] = []

    def sample(self, modules: Sequence[nn.Module]) -> None:
        """Read the times of the last backward pass: 40 µs a model."""
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                if not any(module is timed for timed in self._timed):
                    module._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
                    self._timed.append(module)
                times = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
                exchange, hidden = (times.get(f"backward_{n}", 0) for n in ("comm_time", "compute_comm_overlap_time"))
                if exchange:
                    self._seconds.append(max(0, exchange - hidden) * 1e-9)

    def stop(self) -> None:
        """Restore DDP's default rate of timing."""
        for module in self._timed:
            module._set_ddp_runtime_logging_sample_rate(_DDP_TIMES_EVERY)  # type: ignore[no-untyped-call]
        self._timed.clear()

    def mean(self) -> float | None:
        """Return the mean, s; None without DDP."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None


class Crowd:
    """Cores kept busy by other processes, over all observed stretches.

    Args:
        launched: the other ranks under the same launcher belong to this run.
    """

    def __init__(self, *, launched: bool) -> None:
        self._meter = CrowdMeter(launched=launched)
        self._throttle = Throttle()
        self._stretches: list[tuple[float, float]] = []
        self._throttled: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin a stretch."""
        self._meter.cores()
        self._throttle.share()
        self._began = time.perf_counter()

    def end(self) -> None:
        """End the stretch."""
        cores, throttled = self._meter.cores(), self._throttle.share()
        if throttled is not None:
            self._throttled.append(throttled)
        if cores is not None:
            self._stretches.append((time.perf_counter() - self._began, cores))

    def cores(self) -> float | None:
        """Return the mean, or None if no stretch was long enough."""
        total = sum(seconds for seconds, _ in self._stretches)
        return sum(seconds * cores for seconds, cores in self._stretches) / total if total else None

    def throttled(self) -> float | None:
        """Return the largest share of periods in which the quota throttled this run, or None without a quota."""
        return max(self._throttled, default=None)
