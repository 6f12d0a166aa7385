"""The step clock: marks on the host clock that account for every nanosecond of a step.

    request ── data ──▶ batch ── host ──▶ call ── forward ──▶ return ── loss ──▶ backward ── backward ──▶ end
       ▲                                                                                                   │ host
       └──────────────────────────── outside ─────────────────── updated ◀── optimizer ── update ◀─────────┘

Each mark books the time since the mark before it to the phase that was open and opens the next, so the phases add up to
the step by construction. A mark only writes to a tape (0.1 µs); the sums are made when the tape is read.

    tape:       data 1.0   host 1.3   forward 1.4  …  STEP   data 2.0   host 2.1  …
                └──────────── read ──────────────────────┘   └─ not read yet
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from accel.profiler.phases import MEANING, Measurement

# Codes on the tape; the entry after each is a time, or what the name says.
STEP = ".step"
RESUME = ".resume"
"""The open step begins only at the time in the next entry: what came before was not the loop's."""
SKIP = ".skip"
"""The time since the mark before is excluded from the step."""
_BATCH = ".batch"
WAS = ".was"
"""The open phase is renamed, from its beginning, to the one in the next entry."""
SETTLED = ".settled"
"""The open phases of this step that were provisional are what the next entry says: the step's own, or an evaluation."""
MAYBE_DATA, MAYBE_HOST, MAYBE_FORWARD = "data?", "host?", "forward?"
PROVISIONAL = {MAYBE_DATA: "data", MAYBE_HOST: "host", MAYBE_FORWARD: "forward"}
"""Phase that only a later backward pass tells from an evaluation → what it is if one comes within the step."""
CUT = (STEP, None)
"""Ends the step at the last mark, and begins the next one there."""
FIRST = (".first", None)
"""The open step is the first of an epoch."""
MAX_TAPE = 4096
"""Length at which a tape is read early: a loop whose steps never end would fill the memory."""
_CODES = {**MEANING, **PROVISIONAL}


def settled(code: str, *, within: bool) -> str:
    """Return the phase that a code on the tape stands for; provisional ones belong to the step, or to an evaluation."""
    if code not in PROVISIONAL:
        return code
    return PROVISIONAL[code] if within else "evaluation"


class TapeReader:
    """Makes steps of what a tape says.

    Attributes:
        aside_s: seconds excluded from the steps.
        cut_at: when the last step that was read ended, s.
        last: when the last mark that was read was made, s.
        phase: the code of the phase that it opened.
    """

    def __init__(self, at: float) -> None:
        self.aside_s = self.cut_at = 0.0
        self.phase, self.last, self._began = "outside", at, at
        self._steps = 0
        self.reset()

    def reset(self) -> None:
        """Discard what was booked of the open step."""
        self._booked = dict.fromkeys(_CODES, 0.0)
        self._samples = self._batches = 0
        self._shape: Hashable = None
        self._first = False

    def read(self, tape: list[Any]) -> list[Measurement]:
        """Return the steps that end on a tape, and clear it: 4 µs a step."""
        ended: list[Measurement] = []
        length = len(tape)
        booked, began, last, phase = self._booked, self._began, self.last, self.phase
        index = 0
        while index < length - 1:
            code, at = tape[index], tape[index + 1]
            if at.__class__ is str and code != WAS:  # Ctrl-C came between the phase and its time
                index += 1
                continue
            index += 2
            if code in booked:
                booked[phase] += at - last
                last, phase = at, code
            elif code == _BATCH:
                samples, shape = at
                self._shape = self._shape if self._batches else shape
                self._samples += samples
                self._batches += 1
            elif code == STEP:
                ended.append(self._ended(last - began))
                booked, began = self._booked, last
                self.cut_at = last
            elif code == FIRST[0]:
                self._first = True
            elif code == WAS:
                phase = at
            elif code == SETTLED:
                for provisional in PROVISIONAL:
                    booked[settled(provisional, within=at)] += booked[provisional]
                    booked[provisional] = 0.0
                phase = settled(phase, within=at)
            else:
                self.aside_s += at - last
                if code == RESUME:
                    self.reset()
                    booked, began = self._booked, at
                else:
                    began += at - last
                last = at
        self._began, self.last, self.phase = began, last, phase
        del tape[:length]
        return ended

    def _ended(self, seconds: float) -> Measurement:
        phases = self._booked.copy()  # what is booked stays whole for a reading that is begun again after Ctrl-C
        for code in PROVISIONAL:  # no backward pass came
            phases["evaluation"] += phases.pop(code)
        measured = Measurement(
            step=self._steps,
            seconds=seconds,
            phases=phases,
            samples=self._samples,
            batches=self._batches,
            shape=self._shape,
            first=self._first,
        )
        self._steps += 1
        self.reset()
        return measured


class StepClock:
    """Books host time to phases, mark by mark.

    Args:
        clock: returns seconds, monotonic; default `time.perf_counter`.

    Attributes:
        write: writes a pair to the tape: a phase and a time, or one of the codes above.
        tape: phases and times alternately. Two appends to it are the cheapest mark, half the time of `write`. A phase
            without its time, because Ctrl-C came between the two, is left out when the tape is read.
        backward_is_seen: True while backward passes are marked; without marks of them, the loss counts as backward.
        is_updating: an optimizer is stepping: what follows a backward pass is a part of its step.
        reads_early: a tape that has become too long is read, so that a loop whose steps never end fills no memory.

    Example:
        >>> clock = StepClock()
        >>> for phase in ("data", "host", "forward", "loss", "backward", "optimizer", "outside"):
        ...     clock.enter(phase)
        >>> measured = clock.close(step=0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self.backward_is_seen = self.is_updating = False
        self.reads_early = True
        self.tape: list[Any] = ["outside", clock()]
        self.write = self.tape.extend
        self.reader = TapeReader(self.tape[1])
        self._early: list[Measurement] = []
        """Steps of a tape that had become too long; the next reading hands them out."""

    def enter(self, phase: str) -> None:
        """Book the time since the last mark to the open phase, and open `phase`."""
        self.write((phase, self.now()))
        if len(self.tape) > MAX_TAPE and self.reads_early:
            self._early = self.read()

    def batch(self, samples: int, shape: Hashable) -> None:
        """Mark that a batch has been handed over."""
        self.enter("host")
        self.count(samples, shape)

    def count(self, samples: int, shape: Hashable = None) -> None:
        """Count a batch that was handed over."""
        self.write((_BATCH, (samples, shape)))

    def returned(self) -> None:
        """Mark that the model's call has returned."""
        self.enter("loss" if self.backward_is_seen else "backward")

    def backwarded(self) -> None:
        """Mark that the backward pass is done."""
        self.enter("optimizer" if self.is_updating else "host")

    def update(self) -> None:
        """Mark that an optimizer's step begins."""
        self.is_updating = True
        self.enter("optimizer")

    def updated(self) -> None:
        """Mark that an optimizer's step is done."""
        self.is_updating = False
        self.enter("outside")

    def skip(self) -> None:
        """Exclude the time since the last mark from the step."""
        self.write((SKIP, self.now()))

    def restart(self, *, first: bool = False) -> float:
        """Discard what was booked, begin a step now and return the time; `first` marks the start of an epoch."""
        self.read()
        now = self.now()
        self.write((RESUME, now))
        if first:
            self.write(FIRST)
        return now

    @property
    def code(self) -> str:
        """The open phase as it stands on the tape, where it may be provisional; may be read by another thread."""
        tape = self.tape
        for index in range(len(tape) - 1, -1, -1):
            try:
                if tape[index] in _CODES:
                    return str(tape[index])
            except (IndexError, TypeError):  # the tape was read meanwhile
                break
        return self.reader.phase

    @property
    def last(self) -> float:
        """When the last mark was made, s."""
        self.read()
        return self.reader.last

    def close(self, step: int) -> Measurement:
        """End the step at the mark just made, begin the next one there, and return what was booked."""
        self.write(CUT)
        measured = self.read()[-1]
        measured.step = step
        return measured

    def read(self) -> list[Measurement]:
        """Return the steps that were ended since the last reading, and clear the tape."""
        early, self._early = self._early, []
        return early + self.reader.read(self.tape)
