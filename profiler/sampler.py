"""Samples which line of the user's source the training thread is in, and whether it runs, waits or sleeps there.

A thread looks at the training thread's stack every ten milliseconds: 40 µs each. Which phase is open is read from the
step clock, so that a phase's time can be told apart by line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from types import FrameType

from accel.profiler.evidence import LineTime, ThreadShare
from accel.profiler.host import ThreadMeter, ThreadTime
from accel.profiler.loop_source import is_users, source
from accel.profiler.phases import StepClock

# Parts of a library's file name or function → what the line was doing.
_TAGS = (
    ("torch/serialization.py", "checkpoint"),
    ("torch/distributed/checkpoint", "checkpoint"),
    ("safetensors", "checkpoint"),
    ("_utils/collate.py", "collate"),
    ("_utils/fetch.py", "fetch"),
    ("logging/__init__.py", "logging"),
    ("tensorboard", "logging"),
    ("wandb", "logging"),
)
_DEEPEST = 80


@dataclass
class _Place:
    seconds: float = 0.0
    blocked: float = 0.0
    tags: set[str] = field(default_factory=set)


class Sampler:
    """Sample a thread until stopped.

    Args:
        clock: its open phase is what a sample belongs to.
        ident: the thread as Python numbers it.
        native: the thread as the system numbers it.
        interval_s: time between samples.
    """

    def __init__(self, clock: StepClock, ident: int, native: int, interval_s: float = 0.01) -> None:
        self.batch_lines: set[tuple[str, int]] = set()
        self._clock = clock
        self._ident = ident
        self._meter = ThreadMeter(tid=native)
        self._interval = interval_s
        self._places: defaultdict[tuple[str, str, int], _Place] = defaultdict(_Place)
        self._phases: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._stop = threading.Event()
        self._pause = False
        self._thread = threading.Thread(target=self._run, name="accel-sampler", daemon=True)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what was sampled stays."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        self._meter.close()

    def pause(self, paused: bool) -> None:
        """Leave samples out for a while."""
        self._pause = paused

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self._places.clear()
            self._phases.clear()

    def _run(self) -> None:
        before, at = self._meter.read(), time.perf_counter()
        while not self._stop.wait(self._interval):
            now, time_now = self._meter.read(), time.perf_counter()
            if not self._pause:
                self._take(before, now, time_now - at)
            before, at = now, time_now

    def _take(self, before: ThreadTime | None, now: ThreadTime | None, seconds: float) -> None:
        phase = self._clock.phase
        frame = sys._current_frames().get(self._ident)
        share = before.share_until(now) if before is not None and now is not None else None
        blocked = share.blocked * seconds if share else 0.0
        place, tags = self._look(frame)
        del frame
        with self._lock:
            totals = self._phases[phase]
            totals[0] += share.run * seconds if share else 0.0
            totals[1] += share.wait * seconds if share else 0.0
            totals[2] += blocked
            found = self._places[(phase, *place)]
            found.seconds += seconds
            found.blocked += blocked
            found.tags |= tags

    def _look(self, frame: FrameType | None) -> tuple[tuple[str, int], set[str]]:
        """Return the innermost line of the user's, and what the stack above and below it tells."""
        place: tuple[str, int] | None = None
        tags: set[str] = set()
        depth = 0
        while frame is not None and depth < _DEEPEST:
            file = frame.f_code.co_filename
            if is_users(file):
                here = (file, frame.f_lineno or 0)
                place = place or here
                if "collate" in frame.f_code.co_name:
                    tags.add("collate")
                if here in self.batch_lines:
                    tags.add("next batch")
            else:
                tags.update(tag for part, tag in _TAGS if part in file)
            frame = frame.f_back
            depth += 1
        return place or ("", 0), tags

    def thread(self, phase: str | None = None) -> ThreadShare | None:
        """Return how the thread spent its time, in one phase or in all; None if less than 50 ms were seen."""
        with self._lock:
            rows = [row for name, row in self._phases.items() if phase in (None, name)]
            run, wait, blocked = (sum(row[part] for row in rows) for part in range(3))
        total = run + wait + blocked
        return ThreadShare(run=run / total, wait=wait / total, blocked=blocked / total) if total >= 0.05 else None

    def lines(self) -> list[LineTime]:
        """Return where the time went, line by line, the most expensive first."""
        with self._lock:
            places = {key: _Place(p.seconds, p.blocked, set(p.tags)) for key, p in self._places.items()}
        totals: defaultdict[str, float] = defaultdict(float)
        for (phase, _, _), place in places.items():
            totals[phase] += place.seconds
        rows = [
            LineTime(
                phase=phase,
                file=file,
                line=line,
                source=source(file, line) if file else "",
                seconds=place.seconds,
                share=place.seconds / totals[phase],
                blocked=place.blocked / place.seconds,
                tags=sorted(place.tags),
            )
            for (phase, file, line), place in places.items()
            if place.seconds > 0
        ]
        return sorted(rows, key=lambda row: -row.seconds)
