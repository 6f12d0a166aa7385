"""Rounds of settings on trial: when they end, on played blocks."""

from __future__ import annotations

import random
import statistics

from accel.dataio.passes.rounds import Rounds, Setting, Tried


def rounds_until_decided(seed: int, noise: float) -> int:
    """Return how many rounds two settings take that differ in nothing but noise."""
    chance = random.Random(seed)
    rounds = Rounds(Tried(Setting("threads", workers)) for workers in (1, 2))
    while rounds.current is not None:
        rounds.record(0.01 * chance.lognormvariate(0, noise), 0.001)
    return rounds.done


def test_settings_that_differ_in_nothing_are_decided_once_neither_can_be_regretted() -> None:
    took = [rounds_until_decided(seed, noise=0.05) for seed in range(40)]
    assert statistics.fmean(took) < 7  # 5.1, and 11.4 if one had to be shown to be slower
