"""Options tried on real steps. Each method is a generator: at each `yield` a step is taken.

The one predicted best is measured for `check` steps; so is the next, as long as its prediction is about as short as
the best measurement: a wrong prediction leads to the next best. If the two shortest are close, a trial decides between
them. A small gain must show in a trial against DDP's own all-reduce: see
`accel.profiler.trial`.
"""

from __future__ import annotations

import math
from collections.abc import Generator

from accel.comm.cost_model.choice import WORTH, Option, preferred
from accel.comm.cost_model.prediction import Choice
from accel.comm.selection.planner import Planner
from accel.profiler.trial import Trial, TrialConfig, Verdict

_TRIALS = 4
_NEAR = 0.1
"""What a prediction, or a short measurement, may be wrong by."""
_SURE = 1.5
"""A gain below this must show in a trial: it may be a drift of the machine."""
_TRIAL = TrialConfig(looks=(4, 6), alpha=0.08, keep_gain=0.0, drop_gain=WORTH)
"""Of 1,500 played runs in a crowd it keeps 6 % where the scheme gives nothing and 72 % where it gives 20 %; the rule
"faster in each of four pairs" kept 7 % and 53 %."""
_BLOCK_S, _MOST_STEPS = 0.4, 20
"""Short steps, which a moment's disturbance may double, take longer blocks: at least so long, or so many steps."""


class PlanSearch:
    """Tries the options of a choice, and leaves in it what they measured.

    Args:
        planner: whose scheme is changed; it records.
        choice: what is predicted.
        check: steps that an option is measured for.
    """

    def __init__(self, planner: Planner, choice: Choice, check: int) -> None:
        self.planner, self.choice, self.check = planner, choice, check

    def best(self) -> Generator[None, None, Option]:
        """Return the best of what was tried: what is predicted to be about as short as the shortest measured, so far.

        That is DDP's own all-reduce where nothing else is faster by enough.
        """
        choice = self.choice
        tried: dict[Option, float] = {}
        for option in choice.candidates[:_TRIALS]:
            if option.step_s > min([choice.plain_s, *tried.values()]) * (1 + _NEAR):
                break
            tried[option] = yield from self.measured(option, self.check)
            # Each scheme keeps one socket per peer open.
            self.planner.release(min(tried, key=tried.__getitem__).scheme)
        first, *others = sorted(tried, key=tried.__getitem__) or [choice.plain]
        if others and tried[others[0]] < tried[first] * (1 + _NEAR):
            yield from self.trial(first, others[0])
            first = preferred({option: choice.measured[option] for option in (first, others[0])})
        return first if first == choice.plain or (yield from self.pays(first)) else choice.plain

    def pays(self, option: Option) -> Generator[None, None, bool]:
        """Return whether an option that was tried is faster than DDP's own, by enough; a small gain is put on trial."""
        choice = self.choice
        gain = choice.plain_s / choice.measured[option]
        if gain * (1 - WORTH) <= 1 or gain >= _SURE:
            return gain >= _SURE
        return (yield from self.proves(option))

    def proves(self, option: Option) -> Generator[None, None, bool]:
        """Return whether an option is faster than DDP's own in a trial, and by enough."""
        verdict = yield from self.trial(self.choice.plain, option)
        return verdict == "keep" and self.choice.measured[option] < (1 - WORTH) * self.choice.plain_s

    def trial(self, a: Option, b: Option) -> Generator[None, None, Verdict]:
        """Run two options in blocks A B B A until it is known whether B is faster; leave both in `measured`."""
        measured = self.choice.measured
        enough = min(math.ceil(_BLOCK_S / max(measured[a], 1e-6)), _MOST_STEPS)
        steps = max(self.check // _TRIAL.looks[0], enough, 2)
        trial = Trial(_TRIAL)
        while trial.verdict is None:
            step_s = yield from self.measured(a if trial.arm == "A" else b, steps)
            trial.record([step_s])
        outcome = trial.outcome()
        measured[a], measured[b] = outcome.before_ms / 1e3, outcome.after_ms / 1e3
        return outcome.verdict

    def measured(self, option: Option, steps: int) -> Generator[None, None, float]:
        """Run an option for some steps and return the step's length: that of the slowest rank."""
        planner, recorder = self.planner, self.planner.recorder
        planner.use(option.scheme)
        recorder.on = True
        yield
        recorder.clear()
        for _ in range(steps):
            yield
        observed = recorder.observed()
        own_s = observed.step_s if option.scheme is not None else observed.step_s - observed.extra_s
        step_s = self.choice.measured[option] = planner.objects.decide(own_s, max)
        return step_s
