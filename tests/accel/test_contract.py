"""What a strategy is asked for, and that nothing generic knows of what one strategy needs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from accel.strategies import REGISTRY, Strategy
from accel.strategies.allocator import ByPageFaults
from accel.strategies.trial_design import EpochDesign, TrialDesign

ROOT = Path(__file__).resolve().parents[2] / "accel"
GENERIC = sorted(path for room in ("search", "session", "guard") for path in (ROOT / room).glob("*.py"))
MOST_MEMBERS = 12
OF_ONE_STRATEGY = {"lasting", "frees_cores", "captures", "repeated_share", "by_epoch"}


def test_a_strategy_has_few_members() -> None:
    members = {name for name in (*vars(Strategy), *Strategy.__annotations__) if not name.startswith("_")}
    assert len(members) <= MOST_MEMBERS, sorted(members)


@pytest.mark.parametrize("path", GENERIC, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_nothing_generic_names_a_strategy_or_asks_for_what_one_alone_needs(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & OF_ONE_STRATEGY
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {kind.__module__ for kind in REGISTRY}
    assert not imported & own


@pytest.mark.parametrize("path", sorted((ROOT / "search").glob("*.py")), ids=lambda path: path.stem)
def test_the_search_knows_no_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert path.stem == "plan" or not [name for name in modules if name.split(".")[0] == "torch"]


def test_designs_of_other_kinds_stand_by_their_own_trial() -> None:
    assert (TrialDesign.order, TrialDesign.stands) == (0, False)
    assert (EpochDesign.order, EpochDesign.stands) == (1, True)
    assert (ByPageFaults.order, ByPageFaults.stands) == (-1, True)
    assert ByPageFaults.__module__ == "accel.strategies.allocator"
