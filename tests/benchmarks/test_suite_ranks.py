"""The models of the suite under DistributedDataParallel: accelerated ranks end with the weights of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import accel
from benchmarks.scaling import sharded
from benchmarks.suite import MODELS, train_step
from benchmarks.variants import planned
from tests.comm.ranks import run_ranks
from tests.conftest import Once

STEPS = 30
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"dropout_masks": None, "allocator": None},
    "reordered": {"dropout_masks": None, "channels_last": None, "fused_optimizer": "fused"},
}
REORDERED = 0.02
"""Of the mean loss. Weights are not compared: Adam moves those whose gradient is rounding alone, such as a bias before
batch norm, by as much as all others."""
Trained = dict[str, tuple[Tensor, float, list[str]]]
"""By the plan: all weights in one tensor, the mean loss, and on rank 0 the strategies that were on."""


def trained(rank: int, world: int, model: str) -> Trained:
    """Train a model under each plan, always from the same state."""
    ended: Trained = {}
    for name, plan in PLANS.items():
        torch.manual_seed(0)
        workload = MODELS[model]("tiny")
        workload = sharded(workload, min(8, workload.loader.batch_size), torch.device("cpu"))
        workload = planned(workload, plan) if plan else workload
        batches: Any = iter(())
        loss = 0.0
        for _ in range(STEPS):
            if (batch := next(batches, None)) is None:
                batches = iter(workload.loader)
                batch = next(batches)
            loss += train_step(workload, *batch).item() / STEPS
        rows = accel.explain(workload.model).rows if plan else []
        if plan:
            accel.undo(workload.model)
        weights = torch.cat([parameter.detach().flatten() for parameter in workload.model.parameters()])
        ended[name] = weights, loss, [row.name for row in rows if row.status == "kept"]
    return ended


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, once: Once) -> Callable[[str], list[Trained]]:
    """Return what each rank has ended with."""
    world = request.param
    return lambda model: once(f"suite, {model}, {world}", lambda: run_ranks(trained, world, model, per_host=world))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_of_the_plain_loop_on_all_ranks(ranks: Callable[[str], list[Trained]], model: str) -> None:
    found = ranks(model)
    for rank in found:
        for name in PLANS:
            assert torch.equal(rank[name][0], found[0][name][0]), f"ranks differ: {name}"
        assert torch.equal(rank["exact"][0], rank["plain"][0]), "exact moved bits"
        assert rank["reordered"][1] == pytest.approx(rank["plain"][1], rel=REORDERED)
    assert found[0]["reordered"][2], "nothing was on"
