"""Where the clock is played, a machine that is busy decides nothing: no other clock is read."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from torch import nn

import accel
from accel import startup
from accel.profiler.clocks import called_modules
from accel.script.training import ScriptTraining
from tests.accel.loops import advance_until, make, play_clock, settled
from tests.accel.loops import training as steps_of
from tests.accel.script_followed import OPTIONS, epochs


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


def test_looks_for_models_that_take_long_are_taken_all_the_same(
    only_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = called_modules._modules

    def slow() -> list[nn.Module]:
        time.sleep(0.3)
        return plain()

    monkeypatch.setattr(called_modules, "_modules", slow)
    training = ScriptTraining({**OPTIONS, "budget": "3%"}, threading.get_ident(), whole="")
    training.start()
    try:
        for seed in range(3):
            epochs(*make(seed), 1)
        assert training.models == 3
    finally:
        training.stop()
        training.undo()
