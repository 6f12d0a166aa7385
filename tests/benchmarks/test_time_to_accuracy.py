"""The time to a target: what a run counts, when it ends, and how variants are compared."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks import time_to_accuracy
from benchmarks.render import Row
from benchmarks.to_target.jobs import Job, Source
from benchmarks.to_target.process import Outcome, Stopwatch, scale_by_hand, train


@pytest.fixture
def source() -> Source:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 4, generator=generator)
    samples: Dataset[Any] = TensorDataset(x, (x.sum(1) > 0).long())
    return Source("made", samples, [(x[:64], (x[:64].sum(1) > 0).long())], 2)


def job(scores: list[float], **changes: Any) -> Job:
    """Return a job whose evaluations give these scores, one after the other."""
    given = itertools.chain(scores, itertools.repeat(scores[-1]))
    options: dict[str, Any] = {
        "load": lambda folder: None,
        "model": lambda source: nn.Linear(4, 2),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "batch": 8,
        "score": lambda model, source: next(given),
        "target": 80.0,
        "falls": False,
        "unit": "% right",
        "every": 64,
        "most": 1000,
        "noise": 24.0,
    }
    return Job(**{**options, **changes})


def test_a_run_ends_once_the_mean_of_three_evaluations_is_at_the_target(source: Source) -> None:
    outcome = train(job([50.0, 70.0, 90.0, 80.0]), source, Outcome("made", "x1", 0, 80.0))

    assert outcome.reached
    assert [each.score for each in outcome.evaluations] == [50.0, 70.0, 90.0, 80.0]  # the means: 70, then 80
    assert (outcome.samples, outcome.steps, outcome.batch) == (256, 32, 8)
    assert outcome.score == 80.0


@pytest.mark.parametrize(("scores", "samples"), [([50.0], 1024), ([50.0, math.nan], 128)])
def test_a_run_ends_without_the_target_at_its_most_samples_or_when_it_has_diverged(
    source: Source, scores: list[float], samples: int
) -> None:
    outcome = train(job(scores), source, Outcome("made", "x1", 0, 80.0))
    assert (outcome.reached, outcome.samples) == (False, samples)


def test_evaluations_come_by_samples_and_once_for_a_batch_that_passes_several(source: Source) -> None:
    outcome = train(job([50.0], every=48, most=512), source, Outcome("made", "x16", 0, 80.0))
    assert [each.samples for each in outcome.evaluations] == [128, 256, 384, 512]


def test_evaluations_take_no_time() -> None:
    wall, cpu = [100.0], [7.0]

    def work() -> float:
        wall[0] += 50.0
        cpu[0] += 20.0
        return 3.0

    watch = Stopwatch(lambda: wall[0], lambda: cpu[0])
    wall[0] += 2.0
    assert watch.without(work) == 3.0
    cpu[0] += 0.5
    assert watch.read() == (2.0, 0.5)


def test_a_fixed_batch_has_the_rates_that_accel_would_give_it() -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    sgd, adam = torch.optim.SGD(weights, 0.1), torch.optim.AdamW(weights, 0.1, betas=(0.9, 0.99), eps=1e-8)
    scale_by_hand(sgd, job([0.0]), 32)
    scale_by_hand(adam, job([0.0]), 32)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.1 * 4 * (24 + 8) / (24 + 32))  # AdaScale's gain
    group = adam.param_groups[0]  # the scale stops at the noise scale of 24: three times the batch
    assert group["lr"] == pytest.approx(0.1 * 3**0.5)
    assert group["betas"] == pytest.approx((0.7, 0.97))


def test_a_run_under_accel_tells_how_the_batch_changed(source: Source) -> None:
    outcome = train(job([50.0], most=2000), source, Outcome("made", "accel", 0, 80.0))
    assert outcome.batches[0]["batch"] == 8
    assert outcome.notes == []
    assert outcome.samples >= 2000


class Numbers(Dataset[Any]):
    """Samples that note when they are asked for."""

    def __init__(self) -> None:
        self.asked_for: list[int] = []

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked_for.append(index)
        return torch.tensor([index / 4800] * 4), torch.tensor(index % 2)


def row(variant: str, seed: int, seconds: float, reached: bool = True) -> Row:
    counts = {"samples": int(1000 * seconds), "steps": 10, "batch": 16, "score": 88.0, "target": 88.0}
    words = {"job": "images", "unit": "% right", "data": "made", "threads": 1, "batches": [], "notes": []}
    return {"variant": variant, "seed": seed, "seconds": seconds, "cpu_s": 1.0, "reached": reached, **counts, **words}


ROWS = [
    *(row("x1", 0, 8.0), row("x4", 0, 3.0), row("x8", 0, 2.0, reached=False), row("accel", 0, 2.0)),
    *(row("x1", 1, 9.0), row("x4", 1, 3.0), row("x8", 1, 2.5), row("accel", 1, 4.5)),
]


def test_ratios_are_those_of_one_seed_and_the_best_fixed_batch_came_to_the_target_in_all() -> None:
    x1, x4, x8, accel = time_to_accuracy.compare(ROWS)
    assert [each.variant for each in (x1, x4, x8, accel)] == ["x1", "x4", "x8", "accel"]
    assert accel.best == "x4"
    assert accel.against_start == (3.0, 2.0, 4.0)
    assert accel.against_best == (pytest.approx(13 / 12), pytest.approx(2 / 3), 1.5)
    assert (x8.reached, x8.seeds) == (1, 2)
    assert time_to_accuracy.as_wanted(accel)


@pytest.mark.parametrize("slower", [row("accel", 0, 4.0), row("accel", 0, 2.0, reached=False)])
def test_accel_is_not_as_wanted_when_slower_than_the_best_or_without_the_target(slower: Row) -> None:
    rows = [*ROWS[:3], slower, *ROWS[4:]]
    assert not time_to_accuracy.as_wanted(time_to_accuracy.compare(rows)[-1])


def test_without_a_start_that_comes_to_the_target_there_is_no_ratio_to_it() -> None:
    rows = [{**each, "reached": each["reached"] and each["variant"] != "x1"} for each in ROWS]
    assert time_to_accuracy.compare(rows)[-1].against_start is None
