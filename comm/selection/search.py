"""Plans tried on real steps. Each method is a generator: at each `yield` a step is taken.

The plan predicted best is measured for `check` steps; so is the next, as long as its prediction is about as short as
the best measurement: a wrong prediction leads to the next best. If the two shortest are close, a trial decides between
them. A small gain must show in a trial against DDP's own all-reduce: see
`accel.profiler.trial`.
"""

from __future__ import annotations

import math
from collections.abc import Generator

from accel.comm.cost_model.choice import WORTH, preferred, worthwhile
from accel.comm.cost_model.prediction import Choice
from accel.comm.engine.plan import Plan
from accel.comm.selection.planner import Planner
from accel.profiler.trial import Trial, TrialConfig, Verdict

_TRIALS = 4
_REBUILT = 4
"""Steps until DDP has made buckets of another size, and memory for them has been touched."""
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
        planner: whose plan is changed; it records.
        choice: what is predicted.
        check: steps that a plan is measured for.
    """

    def __init__(self, planner: Planner, choice: Choice, check: int) -> None:
        self.planner, self.choice, self.check = planner, choice, check

    def shortest(self) -> Generator[None, None, Plan]:
        """Try what is predicted to be about as short as the shortest that was measured; return the shortest of all."""
        choice = self.choice
        tried: dict[Plan, float] = {}
        for option in worthwhile(choice.options)[:_TRIALS]:
            if option.step_s > min([choice.plain_s, *tried.values()]) * (1 + _NEAR):
                break
            tried[option.plan] = yield from self.measured(option.plan, self.check)
            # Each scheme holds a socket to whom it speaks to.
            self.planner.engine.release(min(tried, key=tried.__getitem__))
        first, *others = sorted(tried, key=tried.__getitem__) or [()]
        if others and tried[others[0]] < tried[first] * (1 + _NEAR):
            yield from self.trial(first, others[0])
            return preferred((first, others[0]), choice.measured)
        return first

    def pays(self, plan: Plan) -> Generator[None, None, bool]:
        """Return whether a plan that was tried is faster than DDP's own, by enough; a small gain is put on trial."""
        gain = self.choice.plain_s / self.choice.measured[plan]
        if gain * (1 - WORTH) <= 1:
            return False
        return gain >= _SURE or (yield from self.proves(plan))

    def proves(self, plan: Plan) -> Generator[None, None, bool]:
        """Return whether a plan is faster than DDP's own in a trial, and by enough."""
        choice, plain = self.choice, (None,) * len(plan)
        verdict = yield from self.trial(plain, plan)
        choice.plain_s = choice.measured[plain]
        return verdict == "keep" and choice.measured[plan] < (1 - WORTH) * choice.plain_s

    def trial(self, plan_a: Plan, plan_b: Plan) -> Generator[None, None, Verdict]:
        """Run two plans in blocks A B B A until it is known whether B is faster; leave both in `measured`."""
        measured = self.choice.measured
        enough = min(math.ceil(_BLOCK_S / max(measured[plan_a], 1e-6)), _MOST_STEPS)
        steps = max(self.check // _TRIAL.looks[0], enough, 2)
        trial = Trial(_TRIAL)
        while trial.verdict is None:
            step_s = yield from self.measured(plan_a if trial.arm == "A" else plan_b, steps)
            trial.record([step_s])
        outcome = trial.outcome()
        measured[plan_a], measured[plan_b] = outcome.before_ms / 1e3, outcome.after_ms / 1e3
        return outcome.verdict

    def in_other_buckets(self, plan: Plan) -> Generator[None, None, Plan]:
        """Try the size of buckets that is predicted to suit a plan better; return the plan for the size that stays."""
        choice, registration = self.choice, self.planner.registration
        scheme = plan[0] if plan else None
        size = choice.sizes.get(scheme) if len(set(plan)) <= 1 else None
        if size is None or not registration.rebucket(registration.cap_mb):
            return plan
        earlier_s = choice.measured[plan] if plan else choice.plain_s
        sized, before = choice.sized, registration.cap_mb
        for cap_mb in (size.cap_mb, before):
            registration.rebucket(cap_mb)
            sized[cap_mb] = yield from self.measured((scheme,), self.check, settle=_REBUILT)
        sized[before] = min(earlier_s, sized[before])
        if sized[size.cap_mb] >= (1 - WORTH) * sized[before]:
            return plan
        registration.rebucket(size.cap_mb)
        choice.measured[scheme,] = sized[size.cap_mb]
        return (scheme,)

    def measured(self, plan: Plan, steps: int, settle: int = 1) -> Generator[None, None, float]:
        """Run a plan for some steps and return the step's length: that of the slowest rank."""
        planner, recorder = self.planner, self.planner.recorder
        planner.engine.use(plan)
        recorder.on = True
        for turn in range(settle + steps):
            if turn == settle:
                recorder.times.clear()
            yield
        observed = recorder.times.observed()
        step_s = planner.objects.decide(observed.step_s if any(plan) else observed.step_s - observed.extra_s, max)
        self.choice.measured[plan] = step_s
        return step_s
