"""Variants of the suite: recipes by hand, plans that do the same, rivals, and data from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import strategies
from benchmarks.suite import MODELS, train_step
from benchmarks.suite.files import from_files
from benchmarks.variants import BY_HAND, RIVALS, VARIANTS, rivals, variant
from benchmarks.variants.recipes import ON_A_GPU, PUBLISHED, RECIPES, SETTINGS, STRATEGIES, by_hand


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


def test_the_recipe_for_a_gpu_runs_model_and_loss_in_bfloat16() -> None:
    precision, seen = torch.get_float32_matmul_precision(), []
    workload = MODELS["cnn"]("tiny")
    loss = workload.loss
    workload = workload._replace(loss=lambda output, target: (seen.append(output.dtype), loss(output, target))[1])
    try:
        workload = by_hand(workload, [name for name in ON_A_GPU if name != "compile"])
    finally:
        torch.set_float32_matmul_precision(precision)
    x, target = next(iter(workload.loader))
    assert torch.isfinite(train_step(workload, x, target))
    assert seen == [torch.bfloat16]
    assert workload.non_blocking and workload.loader.num_workers >= 1
    assert next(p for p in workload.model.parameters() if p.dim() == 4 and p.shape[1] > 1).stride()[1] == 1
    assert variant(f"{BY_HAND}{', '.join(ON_A_GPU)}").caches


def test_a_strategy_is_planned_by_its_name() -> None:
    chosen = variant("planned: fused_optimizer=fused")
    assert chosen.allow == "reordered"
    workload = chosen.prepare(MODELS["ncf"]("tiny"), "ncf")
    assert accel.explain(workload.model).state == "searching"  # it is taken over after some steps
    accel.undo(workload.model)


def test_a_rival_that_is_not_installed_says_how() -> None:
    assert rivals.why_not("accelerate") == ""
    reason = rivals.why_not("pytorch_autotune") or "pytorch_autotune is not installed: pip install pytorch-autotune"
    assert reason == "pytorch_autotune is not installed: pip install pytorch-autotune"
    assert set(RIVALS) <= set(VARIANTS)


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
