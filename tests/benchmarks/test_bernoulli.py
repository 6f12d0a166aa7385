"""The benchmark of Bernoulli draws: a race takes turns, and numbers that differ are not timed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from accel.kernels.bernoulli import why_not
from benchmarks import bernoulli

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"not applicable here: {why_not()}")


def test_a_race_takes_turns() -> None:
    ticks = itertools.count()
    row = bernoulli.race(torch.bool, 4096, 2, lambda: float(next(ticks)))
    assert row["ratio"] == 1.0
    assert set(row) == set(bernoulli.RECORD.columns)
    assert bernoulli.LINE.format_map(row).startswith("bool         4,096 elements")


def test_other_numbers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tensor: Tensor, p: float, *, generator: torch.Generator) -> Tensor:
        return tensor.bernoulli_(p, generator=generator).logical_not_()

    monkeypatch.setattr(bernoulli, "bernoulli_", wrong)
    with pytest.raises(RuntimeError, match="other numbers than torch's for 4096 elements"):
        bernoulli.race(torch.bool, 4096, 1)
