"""Options tried on real steps, by the one driver of trials: see `accel.profiler.trial_driver`.

The one predicted best is tried against DDP's own all-reduce; the next against the best so far, as long as its
prediction is about as short as that was measured: a wrong prediction leads to the next best. So nothing is kept that
was not shown to be faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace

from accel.comm.cost_model.choice import WORTH, Choice, Option, fidelity, preferred
from accel.profiler.trial import TrialConfig
from accel.profiler.trial_driver import Block, Steps, by_blocks, drive

_TRIALS = 4
_NEAR = 0.1
"""What a prediction may be wrong by."""
_TRIAL = TrialConfig(looks=(4, 6), alpha=0.08, keep_gain=0.0, drop_gain=WORTH)
"""Of 1,500 played runs in a crowd it keeps 6 % where the scheme gives nothing and 72 % where it gives 20 %; the rule
"faster in each of four pairs" kept 7 % and 53 %."""
_BLOCK_S, _MOST_STEPS = 0.4, 20
"""Short steps, which a moment's disturbance may double, take longer blocks: at least so long, or so many steps."""


def search(
    choice: Choice, check: int, run: Callable[[Option, Block], Generator[None, None, Steps]]
) -> Generator[None, None, Option]:
    """Return the best of what was tried, and leave in `choice` what was measured; at each `yield` a step is taken.

    Args:
        choice: what is predicted.
        check: steps that an option is tried for at least.
        run: runs a block of steps under an option.
    """
    best = choice.plain
    for option in choice.candidates[:_TRIALS]:
        best_s = choice.measured[best]
        if option.step_s > best_s * (1 + _NEAR):
            break
        enough = min(math.ceil(_BLOCK_S / max(best_s, 1e-6)), _MOST_STEPS)
        config = replace(_TRIAL, block_steps=max(check // _TRIAL.looks[0], enough, 2))
        arms = {"A": best, "B": option}
        outcome = (yield from drive(by_blocks(config), lambda block: run(arms[block.arm], block))).outcome  # noqa: B023
        assert outcome is not None
        measured = {best: outcome.before_ms / 1e3, option: outcome.after_ms / 1e3}
        choice.measured |= measured
        is_shown = outcome.verdict == "keep" or fidelity(option) < fidelity(best)
        if is_shown and preferred(measured) == option:
            best = option
    return best
