"""The strategies for gradients under two ranks: kept, left as they are, taken back, and the same bits while off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel import strategies
from accel.strategies.base import Exactness
from accel.strategies.gradients import GradientByHosts, GradientCompression, GradientHalf, GradientStrategy
from tests.accel import gradient_cases as cases
from tests.comm.ranks import run_ranks

KINDS: list[type[GradientStrategy]] = [GradientCompression, GradientHalf, GradientByHosts]


def same_plan(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's finding, once all ranks are seen to have had the same plan, way and weights."""
    for one in found:
        assert one["same"]
        assert one["same after undo"]
        for key in ("steps", "active", "way", "hooks", "plan after undo"):
            assert one[key] == found[0][key], key
        assert not one["open after undo"]
        assert one["plan after undo"] is None
    return found[0]


def test_what_helps_is_kept_nothing_lossy_unless_allowed_and_taken_back() -> None:
    entries = {"deep": (0.0, "lossy"), "quick": (0.0, "reduced")}
    found = run_ranks(cases.optimized, 2, entries, True, "reduced", timeout_s=90)
    one = same_plan(found)
    status, why, setting = one["rows"]["gradient_half"]
    assert status == "kept", why
    assert setting.startswith("quick, predicted ")
    assert "ms in place of" in setting
    assert one["plan"] == one["active"] == {"gradient_half": 0}
    assert one["way"] == "quick"
    lossy = ("not allowed", "it needs allow='lossy'")
    assert one["rows"]["gradient_compression"][:2] == lossy
    assert one["rows"]["gradient_by_hosts"][:2] == (
        "not applicable",
        "what was tried already chooses among these schemes too",
    )
    assert found[1]["printed"] == ""


def test_where_nothing_helps_gradients_are_left_as_they_are_with_the_numbers() -> None:
    one = same_plan(run_ranks(cases.optimized, 2, {"dear": (-0.05, "reduced")}, False, "lossy", timeout_s=90))
    status, why, _ = one["rows"]["gradient_compression"]
    assert status == "undone"
    assert "gradients are left as they are: a step takes " in why
    assert "the best, dear, is predicted to take " in why
    assert one["plan"] == one["active"] == {}
    assert one["hooks"] == one["hooks after undo"] == 0
    assert one["rows"]["gradient_half"][1] == "what was tried already chooses among these schemes too"


@pytest.mark.slow
def test_a_prediction_that_real_steps_deny_is_undone() -> None:
    one = same_plan(run_ranks(cases.optimized, 2, {"fib": (0.06, "reduced")}, True, "reduced", timeout_s=90))
    assert one["rows"]["gradient_half"][0] == "undone"
    assert one["rows"]["gradient_half"][1] in {"slower", "looks slower on a noisy machine"}
    assert one["active"] == {}


def test_on_and_off_again_in_the_order_of_trials() -> None:
    found = run_ranks(cases.by_hand, 2, timeout_s=90)
    for one in found:
        assert one == found[0]
        assert one["refused"] == ["", ""]
        assert one["refused then"] == ["what was tried already chooses among these schemes too", ""]
        assert one["described"].startswith("quick, predicted ")
        lossy = one["ways"][9]
        assert lossy in {"small", "quick"}
        watched, half = ["plain"] * 7, ["quick"] * 2
        assert one["ways"][:-1] == [*watched, *half, lossy, lossy, *half, "none", "none", *half, "none", "none"]
        assert one["again"] == "plain"  # it watches first
        assert one["bits before"]
        assert one["same"]


def test_off_is_the_plain_loop_to_the_bit() -> None:
    for found in run_ranks(cases.off_is_plain, 2, timeout_s=90):
        assert found == {"watched": True, "chosen": True, "closed": True}


# Without ranks


def test_each_level_has_its_strategy_the_widest_first() -> None:
    registered = [kind for kind in strategies.REGISTRY if issubclass(kind, GradientStrategy)]
    assert registered == KINDS
    assert [kind.exactness for kind in KINDS] == [Exactness.LOSSY, Exactness.REDUCED, Exactness.REORDERED]
    assert [kind.level for kind in KINDS] == [kind.exactness.word for kind in KINDS]
    for number, kind in enumerate(KINDS):
        assert set(kind.above) == {wider.level for wider in KINDS[:number]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "why"),
    [(1, "there is one rank"), (2, "the model is no DistributedDataParallel module; pass the wrapped one")],
)
def test_they_say_why_they_do_not_apply(kind: type[GradientStrategy], world_size: int, why: str) -> None:
    run: Any = SimpleNamespace(model=nn.Linear(2, 2), world_size=world_size, cuda=False, device=torch.device("cpu"))
    strategy = kind()
    assert strategy.refusal(run) == why
    assert strategy.describe(0) == ""
    strategy.disable(run)
    strategy.close(run)
