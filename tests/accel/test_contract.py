"""What a strategy is asked for, and that nothing generic knows of what one strategy needs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
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


class BadLength(TensorDataset):
    def __len__(self) -> int:
        raise NotImplementedError


class Own:
    """An iterable of the user's own."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(20, 8, 4))


BATCHES = torch.ones(80, 4)
LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(BATCHES.split(8)),
    "own": Own,
    "no length": lambda: DataLoader(BadLength(BATCHES), batch_sampler=[[*range(8)]] * 10),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_any_loader_can_be_judged_by_every_strategy(loader: Callable[[], Any]) -> None:
    """accel ended at the first decision: one strategy asked for the length of a dataset that was not there."""
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
    model, batches, optimizer = accel.optimize(model, loader(), optimizer, cache=False)
    for _ in range(12):
        for batch in batches:
            optimizer.zero_grad()
            model(batch[0] if isinstance(batch, list) else batch).square().mean().backward()
            optimizer.step()
    assert accel.explain(model).state != "undone"
    run = entry.optimized(model)
    assert run is not None
    for kind in REGISTRY:
        kind().trial_design(run.session.run)
    accel.undo(model)


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
