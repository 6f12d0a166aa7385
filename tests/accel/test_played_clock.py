"""Where the clock is played, a machine that is busy decides nothing: no other clock is read."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

import accel
from accel import startup
from tests.accel.loops import advance_until, make, play_clock, settled
from tests.accel.loops import training as steps_of


def searched() -> tuple[Any, ...]:
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60)
    steps = advance_until(steps_of(model, loader, optimizer), settled(model))
    report = accel.explain(model)
    accel.undo(model)
    return steps, report.plan, [(row.name, row.status, row.steps) for row in report.rows]


def test_a_search_on_a_machine_where_everything_takes_hours_is_the_same(
    only_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = searched()
    play_clock(monkeypatch.setattr)
    monkeypatch.setattr(startup, "_has_aged", False)  # how long the process has worked is asked again
    hours = itertools.count(1e6, 3600.0)
    for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
        monkeypatch.setattr(time, name, lambda: next(hours))
    assert searched() == calm
