"""Measurements beside the clocks during ordinary steps: workers, DDP's exchange of gradients, other processes."""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.profiler.cgroup import Throttle
from accel.profiler.evidence import WorkerShare, are_shared
from accel.profiler.host import CrowdMeter, ThreadMeter, ThreadTime, usable_cores
from accel.profiler.loop.patches import Patches

_DDP_TIMES_EVERY = 100
"""Steps between two that DDP times; torch's default."""
_GPU_EVERY = 5
"""Between two that are timed on a GPU, where the host waits for the device in each of them, and the queue runs dry."""


class Span:
    """The growth of a counter and the wall time within the watched steps, both read between two steps.

    What follows the last step of a span that was read, as a script's work after the training, is in neither.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, float, float]] = []
        self._from: tuple[int, float, float] | None = None

    def begin(self, step: int, value: float, at: float) -> None:
        """Begin a span with a step, when the counter has a value."""
        self._from = step, value, at

    def end(self, step: int, value: float, at: float) -> None:
        """End the span before a step."""
        if self._from is not None:
            first, before, began = self._from
            self._spans.append((first, step, value - before, at - began))
        self._from = None

    def share(self, without: Collection[int] = ()) -> float:
        """Return the growth as a share of the wall time, without the spans of some steps."""
        spans = [span for span in self._spans if not any(span[0] <= step < span[1] for step in without)]
        seconds = sum(wall for *_, wall in spans)
        return sum(growth for _, _, growth, _ in spans) / seconds if seconds > 0.0 else 0.0


class Workers:
    """Times of the loader's worker processes in ordinary steps.

    They are added up by the workers' places in the loader: one that is started anew for each epoch goes on where the
    one before it ended.
    """

    def __init__(self) -> None:
        self._meters: dict[int, tuple[ThreadMeter, ThreadTime]] = {}
        """Process → its last reading; of the present workers."""
        self._pids: list[int] = []
        """Of the present workers, or the last there were."""
        self._spent: list[ThreadTime] = []
        """By place: `at` is the wall time."""
        self._counts = False

    def begin(self, pids: Sequence[int]) -> None:
        """Ordinary steps begin."""
        self.sample(pids)
        self._counts = True

    def end(self, pids: Sequence[int]) -> None:
        """They end."""
        self.sample(pids)
        self._counts = False

    def sample(self, pids: Sequence[int]) -> None:
        """Read the times of the present workers: 4 µs each."""
        self._forget(self._meters.keys() - set(pids))
        if pids:
            self._pids = list(pids)
            missing = len(pids) - len(self._spent)
            self._spent = [*self._spent[: len(pids)], *[ThreadTime(0.0, 0.0, 0.0)] * missing]
        for place, pid in enumerate(pids):
            meter, before = self._meters.get(pid) or (ThreadMeter(pid), None)
            now = meter.read()
            if now is None:  # it has ended
                self._meters.pop(pid, None)
                meter.close()
                continue
            self._meters[pid] = meter, now
            if before is not None and self._counts:
                self._spent[place] = self._spent[place].plus(before, now)

    def shares(self) -> list[WorkerShare]:
        """Return how each of the present workers, or of the last there were, spent its time."""
        nothing = ThreadTime(0.0, 0.0, 0.0)
        shares = [(pid, nothing.share_until(spent)) for pid, spent in zip(self._pids, self._spent, strict=True)]
        return [WorkerShare(pid=pid, share=share) for pid, share in shares if share is not None]

    def close(self) -> None:
        """Close all files; the shares stay."""
        self._forget(set(self._meters))

    def _forget(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._meters.pop(pid)[0].close()


class DdpWait:
    """How long DDP's all-reduce goes on after the last gradient has been computed, by DDP's own timers."""

    def __init__(self) -> None:
        self._seconds: list[tuple[int, float]] = []
        """Step, s."""
        self._exchanges: dict[int, list[int]] = {}
        """Model, by its id → exchanges of gradients so far, at each look."""
        self._searches: list[tuple[int, float]] = []
        """Step, s in the search for unused parameters, of a model that has none."""
        self._search_s = 0.0
        self._patches = Patches()
        self._passes = self._unsynced = 0
        """Looks at models, and those that found the last call before the update under `no_sync`."""
        self.bucket_bytes: list[int] = []
        """Of the buckets of the largest model."""
        self._timed: weakref.WeakKeyDictionary[DistributedDataParallel, object] = weakref.WeakKeyDictionary()
        """Model → what was read of it last, on a GPU: the same until the next step that is timed."""

    def sample(self, modules: Sequence[nn.Module], step: int = -1) -> None:
        """Read the times of the last backward pass, that of a step, of models that DDP wraps: 40 µs a model."""
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                on_gpu = getattr(module, "device_type", "cpu") == "cuda"
                is_new = module not in self._timed
                if is_new:
                    module._set_ddp_runtime_logging_sample_rate(_GPU_EVERY if on_gpu else 1)  # type: ignore[no-untyped-call]
                times = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
                self._exchanges.setdefault(id(module), []).append(times.get("iteration", 0))
                self._look(module, times, step)
                exchange, hidden = (times.get(f"backward_{n}", 0) for n in ("comm_time", "compute_comm_overlap_time"))
                is_old = on_gpu and (is_new or self._timed[module] == (exchange, hidden))
                self._timed[module] = (exchange, hidden)
                if exchange and not is_old:
                    self._seconds.append((step, max(0, exchange - hidden) * 1e-9))

    def _look(self, module: DistributedDataParallel, times: dict[str, Any], step: int) -> None:
        """Note what the loop asks of DDP beside the exchange."""
        self._passes += 1
        self._unsynced += not module.require_forward_param_sync
        sizes = str(times.get("rebuilt_bucket_sizes") or times.get("bucket_sizes") or "0")
        bucket_bytes = [int(size) for size in sizes.split(",")]
        if sum(bucket_bytes) >= sum(self.bucket_bytes):  # once they are rebuilt there may be others
            self.bucket_bytes = bucket_bytes
        seconds, self._search_s = self._search_s, 0.0
        if module.find_unused_parameters and not self._patches.on:
            self._patches.replace(DistributedDataParallel, "_post_forward", self._timing)
        elif module.find_unused_parameters and not times.get("unused_parameter_size", 0):
            self._searches.append((step, seconds))

    def _timing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def search(module: DistributedDataParallel, output: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(module, output)
            finally:
                self._search_s += time.perf_counter() - began

        return search

    def exchanges(self) -> float:
        """Return how often gradients were exchanged between two looks, of the model that did so most."""
        counts = [[later - seen for seen, later in itertools.pairwise(each)] for each in self._exchanges.values()]
        # The median: between two looks a trace or an experiment may have passed, after which a reducer counts from 0.
        return max((float(statistics.median(each)) for each in counts if each), default=0.0)

    def leaves_out_last(self) -> bool:
        """Tell whether gradients are exchanged in passes before the last one of a step, and not in that."""
        return self.exchanges() > 0.9 and self._unsynced > 0.9 * self._passes

    def search(self, without: Collection[int] = ()) -> float:
        """Return what looking for unused parameters takes in a step, s; 0 where it finds some."""
        seconds = [taken for step, taken in self._searches if step not in without]
        return statistics.fmean(seconds) if seconds else 0.0

    def stop(self) -> None:
        """Restore DDP's default rate of timing."""
        for module in self._timed:
            module._set_ddp_runtime_logging_sample_rate(_DDP_TIMES_EVERY)  # type: ignore[no-untyped-call]
        self._timed.clear()
        self._patches.remove()

    def mean(self, without: Collection[int] = ()) -> float | None:
        """Return the mean, s; None without DDP."""
        waits = [seconds for step, seconds in self._seconds if step not in without]
        return sum(waits) / len(waits) if waits else None


class Crowd:
    """Cores kept busy by other processes, over all observed stretches."""

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

    def are_shared(self) -> bool:
        """Return whether others keep so many cores busy that a slow call says little of the run itself."""
        return are_shared(self.cores(), usable_cores())

    def throttled(self) -> float | None:
        """Return the largest share of periods in which the quota throttled this run, or None without a quota."""
        return max(self._throttled, default=None)


class TorchSettings:
    """Anomaly mode and number of threads, as most steps had them.

    By the end of a run a context manager may have restored them long ago.
    """

    def __init__(self) -> None:
        self._samples = self._with_anomaly = 0
        self._threads = 0
        self._in_call = False

    def look(self) -> None:
        """Look within a step, where a mode may be on that is off between two steps."""
        self._in_call = torch.is_anomaly_enabled()

    def sample(self) -> None:
        """Read the settings, between two steps."""
        self._samples += 1
        self._with_anomaly += self._in_call or torch.is_anomaly_enabled()
        self._threads = torch.get_num_threads()

    @property
    def anomaly_mode(self) -> bool:
        """Whether it was on in half of the samples or more."""
        return self._samples > 0 and 2 * self._with_anomaly >= self._samples

    @property
    def threads(self) -> int:
        """Threads at the last sample."""
        return self._threads or torch.get_num_threads()
