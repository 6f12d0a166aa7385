"""Variants of the suite: recipes by hand, plans that do the same, rivals, and data from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel import strategies
from benchmarks.suite import MODELS, train_step
from benchmarks.suite.files import from_files
from benchmarks.variants.recipes import PUBLISHED, RECIPES, SETTINGS, STRATEGIES, by_hand


def test_every_model_has_recipes_of_known_settings() -> None:
    assert set(RECIPES) == set(MODELS)
    assert {setting for recipes in RECIPES.values() for recipe in recipes for setting in recipe} <= set(SETTINGS)
    assert set(PUBLISHED) <= set(SETTINGS)


def test_a_models_first_recipe_can_be_a_plan() -> None:
    assert {setting for recipes in RECIPES.values() for setting in recipes[0]} <= set(STRATEGIES)
    assert {name for name, _ in STRATEGIES.values()} <= set(strategies.names())


def test_channels_last_reaches_weights_and_batches() -> None:
    workload = by_hand(MODELS["cnn"]("tiny"), ["channels_last", "foreach"])
    x, target = next(iter(workload.loader))
    assert x.stride()[1] == 1
    assert "fused" not in workload.optimizer.param_groups[0]  # Adadelta has no such path
    assert workload.optimizer.param_groups[0]["foreach"] is True
    assert torch.isfinite(train_step(workload, x, target))


@pytest.mark.parametrize(("model", "kind"), [("cnn", "JpegSamples"), ("lstm", "RowSamples")])
def test_data_come_from_files_that_are_made_once(model: str, kind: str, tmp_path: Path) -> None:
    plain = MODELS[model]("tiny")
    workload = from_files(plain, tmp_path)
    data: Any = workload.loader.dataset
    assert type(data).__name__ == kind
    x, target = data[3]
    x_plain, target_plain = plain.loader.dataset[3]
    assert (x.shape, x.dtype) == (x_plain.shape, x_plain.dtype)
    assert torch.equal(target, target_plain)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert made
    assert not [path for path in made if "part" in path.name]
    again = from_files(plain, tmp_path)
    assert torch.equal(again.loader.dataset[3][0], x)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert len(workload.loader) == len(plain.loader)
    assert torch.isfinite(train_step(workload, *next(iter(workload.loader))))
