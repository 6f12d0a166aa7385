"""What each test of accel itself gets: nothing stays optimized after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import accel
from accel import entry, startup, strategies
from accel.search import outlook
from accel.search.remembered import RememberedPlan
from tests.accel import loops
from tests.accel.loops import Quick
from tests.accel.memory import NOW


@pytest.fixture(autouse=True)
def _nothing_stays_optimized() -> Iterator[None]:
    yield
    for model in list(entry.MODELS):
        accel.undo(model)
    Quick.on = False


@pytest.fixture(autouse=True)
def _young_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run begin with its first step: how long the tests have gone on must not widen its budget.

    Nor must it pay for what earlier tests have optimized and never trained.
    """
    monkeypatch.setattr(startup, "_has_aged", True)
    monkeypatch.setattr(startup, "_seconds", 0.0)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no search wait for what else runs beside the tests; the controller's own tests see to that."""
    monkeypatch.setattr(outlook, "is_crowded", lambda diagnosis: False)


@pytest.fixture
def only_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Quick` be the one registered strategy and the clock a played one: a search is short, its outcome known."""
    monkeypatch.setattr(strategies, "REGISTRY", [Quick])
    loops.play_clock(monkeypatch.setattr)


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be the day from which `tests.accel.memory` counts."""
    monkeypatch.setattr(RememberedPlan.__init__, "__defaults__", (lambda: NOW,))
