"""A machine that is only played: cores shared with a crowd, storage that lets wait, a loop on it; and its clock."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from accel.dataio.passes.rounds import Setting
from accel.dataio.passes.tuner import Busy, Tuner


@dataclass
class Clock:
    """Stands in for `time`; moves when it is told to."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass(kw_only=True)
class Machine:
    """What a batch and a step cost, in seconds of a core that nobody else wants, and who else wants it."""

    cores: int = 2
    crowd: float = 0.0
    """Threads of others that want a core."""
    comes_s: float = 0.0
    """They come and go, and stay about so long; 0 for a crowd that never goes."""
    run_s: float = 0.004
    asleep_s: float = 0.0
    step_s: float = 0.004
    send_s: float = 0.0002
    """Of the loop's thread: taking a batch from another process."""
    lock: float = 0.3
    """Share of the fetch in which a thread holds the interpreter's lock."""
    noise: float = 0.1
    """Standard deviation of a batch's logarithm."""
    bursts: float = 0.0
    """Share of batches that take five times as long."""
    drift: float = 0.0
    """By how much the machine's speed goes up and down, in some seconds."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    _known: dict[Any, tuple[float, Busy, float]] = field(default_factory=dict)
    _here: bool = True
    _until: float = 0.0

    def speed(self, wanting: float) -> float:
        """Return the share of a core that each of our threads gets when so many of them want one."""
        return min(1.0, self.cores / (wanting + (self.crowd if self._here else 0.0)))

    def times(self, setting: Setting) -> tuple[float, Busy, float]:
        """Return, for a batch: seconds that the loop waits, what it does in these, and those of the step."""
        if (setting, self._here) not in self._known:
            self._known[setting, self._here] = self._times(setting)
        return self._known[setting, self._here]

    def _times(self, setting: Setting) -> tuple[float, Busy, float]:
        if setting.mode == "inline":
            speed = self.speed(1)
            line = self.run_s / speed - self.run_s
            return self.run_s + line + self.asleep_s, Busy(self.run_s, line), self.step_s / speed
        send = self.send_s if setting.mode != "threads" else 0.0
        locked = self.lock * self.run_s if setting.mode == "threads" else 0.0
        took, wanting = self.step_s + send, 1.0
        for _ in range(60):  # to where work and speed agree
            speed = self.speed(wanting)
            one = self.run_s / speed + self.asleep_s
            step = (self.step_s + send) / speed + locked / 2
            took = max(step, one / setting.workers, locked + locked / 2)
            busy = (step + self.run_s / speed) / took
            wanting += 0.3 * (min(busy, 1.0 + setting.workers) - wanting)
        step = self.step_s / speed + locked / 2
        return max(0.0, took - step), Busy(), step

    def cost(self, setting: Setting) -> float:
        """Return the loop's seconds per batch, without noise, over all times."""
        rates = []
        for here in (True, False) if self.comes_s else (True,):
            self._here = here
            wait, _, step = self.times(setting)
            rates.append(1 / (wait + step))
        return len(rates) / sum(rates)

    def play(self, tuner: Tuner, clock: Clock, batches: int) -> None:
        """Let the loop run."""
        for number in range(batches):
            setting = tuner.current
            if self.comes_s and clock.now > self._until:
                self._here, self._until = not self._here, clock.now + self.chance.expovariate(1 / self.comes_s)
            wait, busy, step = self.times(setting)
            one, other = self._factor(clock.now), self._factor(clock.now)
            wait, busy, step = wait * one, Busy(busy.run_s * one, busy.line_s * one), step * other
            clock.now += wait + step
            capacity = 1 if setting.mode == "inline" else 2 * setting.workers
            tuner.served(wait, math.nan if number % 97 == 96 else step, busy, capacity)

    def _factor(self, now: float) -> float:
        burst = 5.0 if self.chance.random() < self.bursts else 1.0
        slow = 1 + self.drift * math.sin(now * 2.1)
        return burst * slow * math.exp(self.chance.gauss(0, self.noise))
