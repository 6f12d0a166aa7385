"""The step clock: marks on the host clock that account for every nanosecond of a step.

    request ── data ──▶ batch ── host ──▶ call ── forward ──▶ return ── loss ──▶ backward ── backward ──▶ end
       ▲                                                                                                   │ host
       └──────────────────────────── outside ─────────────────── updated ◀── optimizer ── update ◀─────────┘

Each mark books the time since the mark before it to the phase that was open and opens the next, so the phases add up to
the step by construction. A mark only writes to a tape (0.1 µs); the sums are made when the tape is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from accel.profiler.phases import MEANING, Measurement

# Codes on the tape; the entry after each is a time, or what the name says.
STEP, RESUME, SKIP = ".step", ".resume", ".skip"
_FIRST, _BATCH = ".first", ".batch"
WAS = ".was"
"""The open phase is renamed, from its beginning, to the one in the next entry."""
SETTLED = ".settled"
"""The open phases of this step that were provisional are what the next entry says: the step's own, or an evaluation."""
MAYBE_DATA, MAYBE_HOST, MAYBE_FORWARD = "data?", "host?", "forward?"
PROVISIONAL = {MAYBE_DATA: "data", MAYBE_HOST: "host", MAYBE_FORWARD: "forward"}
"""Phase that only a later backward pass tells from an evaluation → what it is if one comes within the step."""
CUT = (STEP, None)
"""What `cut` writes."""
MAX_TAPE = 4096
"""Length at which a tape is read early: a loop whose steps never end would fill the memory."""
_CODES = {**MEANING, **PROVISIONAL}


def settled(code: str, *, within: bool) -> str:
    """Return the phase that a code on the tape stands for.

    Args:
        code: a phase, provisional or not.
        within: whether provisional ones belong to the step.
    """
    if code not in PROVISIONAL:
        return code
    return PROVISIONAL[code] if within else "evaluation"


class StepClock:
    """Books host time to phases, mark by mark.

        tape:       data 1.0   host 1.3   forward 1.4  …  STEP   data 2.0   host 2.1  …
                    └──────────── read ──────────────────────┘   └─ not read yet
        read step:  a Measurement, handed out by `read`
        open step:  began at `_began`; `_booked` so far; at `_last` the phase `_phase` was opened

    Args:
        clock: returns seconds, monotonic; default `time.perf_counter`.

    Attributes:
        now: the clock.
        write: writes a pair to the tape: a phase and a time.
        tape: phases and times alternately. Two appends to it are the cheapest mark, half the time of `write`. A phase
            without its time, because Ctrl-C came between the two, is left out when the tape is read.
        aside_s: seconds excluded by `skip` and `resume`.
        cut_at: when the last step that was read ended, s.
        backward_is_seen: True while `backward` and `backwarded` are called; without them, the loss counts as backward.

    Example:
        >>> clock = StepClock()
        >>> clock.request(); clock.batch(32, "shape"); clock.call(); clock.returned()
        >>> clock.backward(); clock.backwarded(); clock.update(); clock.updated()
        >>> measured = clock.close(step=0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self.aside_s = self.cut_at = 0.0
        self.backward_is_seen = False
        self.tape: list[Any] = ["outside", clock()]
        self.write = self.tape.extend
        self._phase = "outside"
        self._began: float = self.tape[1]
        self._last: float = self.tape[1]
        self._steps = 0
        self._early: list[Measurement] = []
        """Steps of a tape that had become too long; the next reading hands them out."""
        self._has_segments = False
        """Parts of the tape were detached, and must be read before the rest of it."""
        self._updating = False
        self._reset()

    def _reset(self) -> None:
        self._booked = dict.fromkeys(_CODES, 0.0)
        self._samples = self._batches = 0
        self._shape: Hashable = None
        self._first = False

    # -- marks ---------------------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Book the time since the last mark to the open phase, and open `phase`."""
        self.write((phase, self.now()))
        if len(self.tape) > MAX_TAPE and not self._has_segments:  # detached segments come first
            self._early = self.read()

    def request(self) -> None:
        """Mark that the loop asks the loader for a batch."""
        self.enter("data")

    def batch(self, samples: int, shape: Hashable) -> None:
        """Mark that the batch has been handed over."""
        self.enter("host")
        self.count(samples, shape)

    def count(self, samples: int, shape: Hashable = None) -> None:
        """Count a batch that was handed over."""
        self.write((_BATCH, (samples, shape)))

    def call(self) -> None:
        """Mark that the model is called."""
        self.enter("forward")

    def returned(self) -> None:
        """Mark that the model's call has returned."""
        self.enter("loss" if self.backward_is_seen else "backward")

    def backward(self) -> None:
        """Mark that a backward pass begins."""
        self.enter("backward")

    def backwarded(self) -> None:
        """Mark that the backward pass is done."""
        self.enter("optimizer" if self._updating else "host")

    def update(self) -> None:
        """Mark that an optimizer's step begins."""
        self._updating = True
        self.enter("optimizer")

    def updated(self) -> None:
        """Mark that an optimizer's step is done."""
        self._updating = False
        self.enter("outside")

    def mark_first(self) -> None:
        """Mark the open step as the first of an epoch."""
        self.write((_FIRST, None))

    def rename(self, phase: str) -> None:
        """Book the time since the last mark to `phase`, whatever was opened then."""
        self.write((WAS, phase))

    def settle(self, *, within: bool) -> None:
        """Book what was provisional in the open step to the step's own phases, or to evaluation."""
        self.write((SETTLED, within))

    def skip(self) -> None:
        """Exclude the time since the last mark from the step."""
        self.write((SKIP, self.now()))

    def cut(self) -> None:
        """End the step at the last mark, and begin the next one there."""
        self.write(CUT)

    def resume(self) -> None:
        """Begin the open step only now: the time since its beginning was not the loop's."""
        self.write((RESUME, self.now()))

    def restart(self, *, first: bool = False) -> float:
        """Discard what was booked, begin a step now and return the time; `first` marks the start of an epoch."""
        self.read()
        now = self.now()
        self._reset()
        self._first = first
        self._began = self._last = now
        return now

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The open phase, evaluation as long as it is provisional; may be read by another thread."""
        return settled(self.code, within=False)

    @property
    def code(self) -> str:
        """The open phase as it stands on the tape, where it may be provisional."""
        tape = self.tape
        for index in range(len(tape) - 1, -1, -1):
            try:
                if tape[index] in _CODES:
                    return str(tape[index])
            except (IndexError, TypeError):  # the tape was read meanwhile
                break
        return self._phase

    @property
    def last(self) -> float:
        """When the last mark was made, s."""
        self.read()
        return self._last

    def close(self, step: int) -> Measurement:
        """End the step at the mark just made, begin the next one there, and return what was booked."""
        self.cut()
        measured = self.read()[-1]
        measured.step = step
        return measured

    def detach(self) -> list[Any]:
        """Return the contents of the tape, to be read later, and restart the open step on an empty tape."""
        phase, segment = self.code, self.tape[:]
        del self.tape[:]
        self._has_segments = True
        now = self.now()
        self.write((RESUME, now))
        self.write((phase, now))
        return segment

    def read(self, segment: list[Any] | None = None) -> list[Measurement]:
        """Return the steps that were ended since the last reading, and clear the tape: 4 µs a step.

        Args:
            segment: read this detached segment instead; segments are read in order, before the tape itself.
        """
        tape, ended = self.tape if segment is None else segment, self._early
        self._early = []
        length = len(tape)
        booked, began, last, phase = self._booked, self._began, self._last, self._phase
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
                self._count(*at)
            elif code == STEP:
                ended.append(self._ended(last - began))
                booked, began = self._booked, last
                self.cut_at = last
            elif code == _FIRST:
                self._first = True
            elif code == WAS:
                phase = at
            elif code == SETTLED:
                self._settle(within=at)
                phase = settled(phase, within=at)
            else:
                self.aside_s += at - last
                if code == RESUME:
                    began = at
                    for name in booked:
                        booked[name] = 0.0
                else:
                    began += at - last
                last = at
        self._began, self._last, self._phase = began, last, phase
        del tape[:length]
        return ended

    def _count(self, samples: int, shape: Hashable) -> None:
        if self._batches == 0:
            self._shape = shape
        self._samples += samples
        self._batches += 1

    def _settle(self, *, within: bool) -> None:
        for code in PROVISIONAL:
            self._booked[settled(code, within=within)] += self._booked[code]
            self._booked[code] = 0.0

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
        self._reset()
        return measured
