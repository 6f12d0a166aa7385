"""The benchmarks of optimizers: races are of the same weights, here on a CPU, and others are not timed."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from benchmarks import muon, optimizers
from benchmarks.gpu import optimizers as on_gpu
from benchmarks.kernels.optimizer_rivals import params_of

RACES = dict(on_gpu.races("cpu", 50_000))


@pytest.mark.parametrize("name", RACES)
def test_rivals_on_a_device_give_the_same_weights(name: str) -> None:
    race = RACES[name]()
    assert race.apart() < 1e-4
    assert race.cost.bytes > 0
    assert set(race.rivals) <= {"torch fused", "torch in three", "loop"}


def test_a_rival_that_differs_is_not_timed() -> None:
    race = RACES["adamw"]()
    with torch.no_grad():
        race.params[0].add_(1)
    assert "apart" in on_gpu.measured(lambda: race, 1e12)["failed"]


def test_muon_is_raced_with_torchs() -> None:
    ticks = count()
    rows = list(muon.races(1, {"small": [(4, 6), (6, 4)]}, lambda: float(next(ticks))))
    assert [(row["optimizer"], row["ratio"]) for row in rows] == [("accel.optim.Muon", 1.0), ("batched_muon", 1.0)]


def test_weights_that_differ_are_not_raced() -> None:
    made = params_of([(5,)], "cpu", torch.float32)
    others = [torch.nn.Parameter(made[0].detach() + 1)]
    with pytest.raises(RuntimeError, match="different weights"):
        optimizers.agree("sgd", (lambda: None, made), (lambda: None, others))
