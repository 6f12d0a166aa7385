"""The benchmarks of optimizers: races are of the same weights, here on a CPU, and others are not timed."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks import optimizers
from benchmarks.gpu import optimizers as on_gpu
from benchmarks.kernels.optimizer_rivals import OURS, params_of, shapes

RACES = dict(on_gpu.races("cpu", 50_000))


@pytest.mark.parametrize("numel", [1, 768 * 3072, 10_000_000])
def test_shapes_have_so_many_elements(numel: int) -> None:
    assert sum(torch.Size(shape).numel() for shape in shapes(numel)) == numel


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


@pytest.mark.parametrize("name", OURS)
def test_a_race_takes_turns(name: str) -> None:
    ticks = itertools.count()
    for rival in optimizers.rivals(name):
        row = optimizers.race(name, rival, [(7,), (3, 5)], 2, lambda: float(next(ticks)))
        assert row["ratio"] == 1.0
        assert row["parameters"] == "22 in 2"
        assert set(row) == set(optimizers.RECORD.columns)
        assert optimizers.LINE.format_map(row)


def test_weights_that_differ_are_not_raced() -> None:
    made = params_of([(5,)], "cpu", torch.float32)
    others = [torch.nn.Parameter(made[0].detach() + 1)]
    with pytest.raises(RuntimeError, match="different weights"):
        optimizers.agree("sgd", (lambda: None, made), (lambda: None, others))
