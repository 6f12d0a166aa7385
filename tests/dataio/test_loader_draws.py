"""Random numbers that a dataset draws depend on seed, epoch and batch alone, whenever it begins to draw them."""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.engine.engine import InlineEngine, ThreadEngine, ThreadsDraw
from accel.dataio.fetching.randomness import random_state
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.rounds import Setting
from tests.dataio.engines import loader_of, run
from tests.dataio.numbers import run as run_epochs
from tests.dataio.numbers import same

SAYS = "fetching a sample draws random numbers"


class Augmented(Dataset[Tensor]):
    """Draws where `strength` is not 0; a sample may take its time."""

    def __init__(self, strength: int = 0, seconds: float = 0.0) -> None:
        self.strength, self.seconds = strength, seconds
        self.noise: Any = None

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        drawn = float(torch.rand(1)) if self.strength or self.noise else 0.0
        return torch.tensor([float(index), drawn])


def made_ahead(loader: ContinuousLoader) -> None:
    """Return once no thread reads the dataset ahead any more."""
    continuous = loader._core._continuous
    if continuous is not None and isinstance(continuous.engine, ThreadEngine):
        wait([future for _, future in continuous.engine._futures])


def later(data: Augmented, how: str, **options: Any) -> tuple[Any, Tensor]:
    """Return five epochs, of which the last two are augmented, and the loop's random state at their end."""

    def change(epoch: int) -> None:
        made_ahead(loader)
        if epoch == 3 and how == "number":
            data.strength = 1
        elif epoch == 3:
            data.noise = object()

    torch.manual_seed(4)
    with ContinuousLoader(DataLoader(data, 4, shuffle=True), **options) as loader:
        return run_epochs(loader, 5, set_epoch=change), torch.get_rng_state()


@pytest.mark.parametrize("how", ["number", "object"])
def test_augmentation_that_is_switched_on_later_is_seeded_inline_too(how: str) -> None:
    wanted, state = later(Augmented(), how, mode="fork", num_workers=2)
    made, own_state = later(Augmented(), how, mode="inline")

    assert len({float(row[1]) for batch in wanted[3] for row in batch}) == 80
    assert same(made, wanted)
    assert torch.equal(own_state, state)


@pytest.mark.parametrize("how", ["number", "object"])
def test_threads_are_left_with_a_warning_when_a_dataset_begins_to_draw(how: str) -> None:
    wanted, state = later(Augmented(), how, mode="inline")
    with pytest.warns(UserWarning, match=rf"{SAYS}.*mode='processes'"):
        made, own_state = later(Augmented(), how, mode="threads", num_workers=2)

    assert same(made, wanted)
    assert torch.equal(own_state, state)


def test_threads_are_left_once_with_a_warning() -> None:
    torch.manual_seed(4)
    with ContinuousLoader(DataLoader(Augmented(1), 4), mode="threads", num_workers=3) as loader:
        with pytest.warns(UserWarning, match=SAYS) as caught:
            run_epochs(loader, 3)
        assert len(caught) == 1
        assert loader.setting == "inline"
        assert SAYS in loader.explain()


def test_auto_leaves_threads_when_a_dataset_begins_to_draw() -> None:
    wanted, state = later(Augmented(), "number", mode="inline")
    data = Augmented()
    torch.manual_seed(4)
    with ContinuousLoader(DataLoader(data, 4, shuffle=True)) as loader:
        made = run_epochs(loader, 1)
        tuner = loader._core.tuner
        assert tuner is not None
        assert "threads          not used" not in loader.explain()  # what the sampler draws is not the dataset's
        # As if threads had been found the fastest.
        tuner._phase, tuner.current, tuner._expected = "decided", Setting("threads", 2), (0.0, 1.0)
        made += run_epochs(loader, 2)
        assert loader.setting == "threads(2)"
        made_ahead(loader)
        data.strength = 1
        made += run_epochs(loader, 2)
        assert not loader.setting.startswith("threads")
        assert f"not used: {SAYS}" in loader.explain()

    assert same(made, wanted)
    assert torch.equal(torch.get_rng_state(), state)


# Engines


def test_a_dataset_that_changed_is_looked_at_again() -> None:
    data = Augmented()
    for engine in (InlineEngine(loader_of(data)), ThreadEngine(loader_of(data), 2)):
        data.strength = 0
        run(engine, [[n] for n in range(20)], seeds=lambda n: n)
        data.strength = 1
        engine.update({("strength",): 1})
        before = random_state()
        made = run(engine, [[7], [8]], seeds=lambda n: n)
        assert random_state() == before
        assert isinstance(made[0], ThreadsDraw) == isinstance(engine, ThreadEngine)
        engine.close()
