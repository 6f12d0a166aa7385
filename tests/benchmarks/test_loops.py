"""The suite of training loops: every loop learns, is deterministic, and calls `wrap` once, as documented."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.loops import LOOPS, Outcome, checksum, run
from tests.conftest import Once

ROOT = Path(__file__).parents[2]
STEPS = 60
WITHOUT_OPTIMIZER = {"mlp", "rnn", "no_optimizer"}
"""Loops that call `wrap(model, loader)`; all others give their optimizer too."""
NO_DESCENT = {"gan"}
"""Loops whose loss need not fall."""
SAMPLE = {"cnn_dropout", "gan", "no_optimizer", "workers_augment"}
"""Those with the traps that differ most; `make slow` runs all."""


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test on these loops: on a sample of them but in slow runs."""
    assert set(LOOPS) >= SAMPLE
    slow = [pytest.mark.slow]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SAMPLE else slow) for name in names])


@pytest.fixture
def first_run(once: Once) -> Callable[[str], Outcome]:
    """Return what trains a loop, at its first call."""
    return lambda name: once(f"loop {name}", lambda: run(name, steps=STEPS))


def same(a: Any, b: Any) -> bool:
    """Whether two nested structures are equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and checksum(a) == checksum(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_same(a: Outcome, b: Outcome) -> None:
    for name in Outcome.__dataclass_fields__:
        assert same(getattr(a, name), getattr(b, name)), f"{name} differs"


@each(sorted(LOOPS.keys() - NO_DESCENT))
def test_learns(first_run: Callable[[str], Outcome], name: str) -> None:
    losses = first_run(name).losses
    quarter = STEPS // 4
    assert sum(losses[-quarter:]) < 0.9 * sum(losses[:quarter])


@each(LOOPS)
def test_same_bits_every_time(first_run: Callable[[str], Outcome], name: str) -> None:
    assert_same(first_run(name), run(name, steps=STEPS))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOOPS)
def test_wrap_is_called_once_with_what_it_documents(name: str) -> None:
    calls: list[tuple[Any, ...]] = []

    def wrap(model: Any, loader: Any, optimizer: Any = None) -> tuple[Any, ...]:
        given = (model, loader) if optimizer is None else (model, loader, optimizer)
        calls.append(given)
        return given

    run(name, steps=1, wrap=wrap)
    assert len(calls) == 1
    model, loader, *rest = calls[0]
    assert isinstance(model, nn.Module)
    assert isinstance(loader, DataLoader)
    assert (name in WITHOUT_OPTIMIZER) == (not rest)
    assert all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in rest)


@each(LOOPS)
def test_trains_all_that_is_not_frozen(name: str) -> None:
    start, end = run(name, steps=1).state, run(name, steps=4).state
    still = {key for key in start if same(start[key], end[key])}
    if name == "frozen":
        assert {"model.0.weight", "model.1.weight", "model.4.weight"} <= still
        assert not {"model.10.weight", "model.1.running_mean"} & still
    else:
        assert not still


def figures() -> str:
    """Return what five steps of every third loop come to."""
    runs = [run(name, steps=5) for name in sorted(LOOPS)[::3]]
    return str([(one.losses, one.seen, checksum(one.state), checksum(one.rng)) for one in runs])


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_bits() -> None:
    code = "from tests.benchmarks.test_loops import figures\nprint(figures())"
    fresh = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == figures()


def test_loader_order_shows(first_run: Callable[[str], Outcome]) -> None:
    seen = first_run("cnn").seen
    assert len(set(seen)) == STEPS  # shuffled: no batch comes twice
    changed = run("cnn", steps=2, wrap=lambda m, loader, o: (m, DataLoader(loader.dataset, batch_size=32), o))
    assert changed.seen != seen[:2]
