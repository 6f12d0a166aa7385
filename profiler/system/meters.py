"""What is read beside the clocks while the loop takes ordinary steps: workers, gradient buckets, other processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.profiler.cgroup import Throttle
from accel.profiler.evidence import WorkerShare
from accel.profiler.host import CrowdMeter, ThreadMeter, ThreadTime

_DDP_TIMES_EVERY = 100
"""Steps from one that DDP times to the next; torch's default."""


class Span:
    """A counter's growth while it was looked at."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._from: float | None = None

    def begin(self, value: float) -> None:
        """Look at it from here on."""
        self._from = value

    def end(self, value: float) -> None:
        """Look away."""
        self._sum = self.total(value)
        self._from = None

    def total(self, value: float) -> float:
        """Return the growth so far."""
        return self._sum + (value - self._from if self._from is not None else 0.0)


class Workers:
    """The loader's worker processes, from first to last sight."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[ThreadMeter, ThreadTime, ThreadTime]] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Read their times: 4 µs each."""
        for pid in pids:
            if pid in self._seen:
                meter, first, last = self._seen[pid]
                self._seen[pid] = (meter, first, meter.read() or last)
                continue
            meter = ThreadMeter(pid)
            now = meter.read()
            if now is not None:
                self._seen[pid] = (meter, now, now)

    def shares(self) -> list[WorkerShare]:
        """Return how each spent its time."""
        found = [(pid, first.share_until(last)) for pid, (_, first, last) in self._seen.items()]
        return [WorkerShare(pid=pid, share=share) for pid, share in found if share is not None]

    def close(self) -> None:
        """Close the files of all."""
        for meter, _, _ in self._seen.values():
            meter.close()


class Exposed:
    """How long DDP's all-reduce goes on after the last gradient is there, by DDP's own clocks."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._timed: list[DistributedDataParallel] = []

    def look(self, modules: Sequence[nn.Module]) -> None:
        """Read the last backward pass: 40 µs a model."""
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                if not any(module is known for known in self._timed):
                    module._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
                    self._timed.append(module)
                told = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
                exchange, hidden = (told.get(f"backward_{n}", 0) for n in ("comm_time", "compute_comm_overlap_time"))
                if exchange:
                    self._seconds.append(max(0, exchange - hidden) * 1e-9)

    def stop(self) -> None:
        """Let DDP time as rarely as it does by itself."""
        for module in self._timed:
            module._set_ddp_runtime_logging_sample_rate(_DDP_TIMES_EVERY)  # type: ignore[no-untyped-call]
        self._timed.clear()

    def mean(self) -> float | None:
        """Return the mean, s; None without DDP."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None


class Crowd:
    """Cores that others kept busy, over all stretches that were looked at.

    Args:
        launched: other ranks, under the same launcher, are no others.
    """

    def __init__(self, *, launched: bool) -> None:
        self._meter = CrowdMeter(launched=launched)
        self._throttle = Throttle()
        self._stretches: list[tuple[float, float]] = []
        self._throttled: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """A stretch begins."""
        self._meter.cores()
        self._throttle.share()
        self._began = time.perf_counter()

    def end(self) -> None:
        """It ends."""
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
        """Return the largest share of periods in which the quota held this run up, or None without a quota."""
        return max(self._throttled, default=None)
