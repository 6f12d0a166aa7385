"""What a dataset draws depends on its seed alone, and the loop's random states are left as they were."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from accel.dataio.engine.engine import InlineEngine, ThreadEngine, ThreadsDraw
from accel.dataio.fetching.randomness import others_could_draw, random_state, seed_everything, streams
from tests.dataio.engines import in_child, loader_of, run

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(1)),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
}


class Quiet(Dataset[Tensor]):
    """Takes its time in Python, in torch and in numpy, and draws nothing."""

    def __init__(self, length: int = 200) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        value = sum(range(index % 50)) + float(np.arange(200.0).sum())
        return torch.full((40,), value).sqrt().cumsum(0) + float(index)


class Drawer(Quiet):
    """Draws by `draw`."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(self.draw())])


def with_numpys_seed() -> float:
    np.random.seed(5)
    return float(np.random.uniform())


def with_torchs_seed() -> float:
    torch.manual_seed(5)
    return float(torch.rand(1))


KINDS: dict[str, Callable[[], Any]] = {
    **DRAWS,
    "numpy seed": with_numpys_seed,
    "torch seed": with_torchs_seed,
    "all": lambda: sum(draw() for draw in DRAWS.values()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_made_from_its_seed(kind: str) -> None:
    wanted = []
    for number in range(6):
        seed_everything(number)
        wanted += [float(KINDS[kind]()) for _ in range(3)]
    seed_everything(99)
    before = random_state()
    engine = InlineEngine(loader_of(Drawer(KINDS[kind])))
    made = run(engine, [[n] * 3 for n in range(6)], seeds=lambda n: n)

    assert engine.draws
    assert torch.cat(made)[:, 1].tolist() == pytest.approx(wanted)
    assert random_state() == before


@pytest.mark.parametrize("kind", KINDS)
def test_threads_are_refused(kind: str) -> None:
    before = random_state()
    engine = ThreadEngine(loader_of(Drawer(KINDS[kind])), 2)
    (made,) = run(engine, [[1]], seeds=lambda n: n)
    engine.close()

    assert isinstance(made, ThreadsDraw)
    assert random_state() == before


def test_generators_of_its_own_are_no_draws() -> None:
    own, numpys = torch.Generator().manual_seed(1), np.random.default_rng(2)
    pythons = random.Random(3)
    engine = InlineEngine(
        loader_of(Drawer(lambda: float(torch.rand(1, generator=own)) + numpys.random() + pythons.random()))
    )
    run(engine, [[n] * 4 for n in range(30)], seeds=lambda n: n)

    assert not engine.draws


def test_what_raises_after_it_drew_leaves_the_loops_states() -> None:
    def fails() -> float:
        raise ValueError(random.random())

    before = random_state()
    (made,) = run(InlineEngine(loader_of(Drawer(fails))), [[1]], seeds=lambda n: n)

    assert isinstance(made, ValueError)
    assert random_state() == before


def test_only_this_packages_threads_could_not_draw() -> None:
    def work() -> bytes:
        alone = others_could_draw()
        seen = []
        for name in ("accel-loader_0", "worker"):
            stop = threading.Event()
            thread = threading.Thread(target=stop.wait, name=name)
            thread.start()
            seen.append(others_could_draw())
            stop.set()
            thread.join()
        return repr((alone, seen)).encode()

    # In a forked process, where no thread of another test is.
    assert in_child(work) == b"(False, [False, True])"


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox])
def test_states_of_any_numpy_generator_are_read_seeded_and_put_back(kind: Any) -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(4))
    try:
        numpys = streams()[2]
        before = numpys.read()
        first = np.random.rand()
        assert numpys.read() != before
        numpys.write(before)
        assert np.random.rand() == first
        drawn = []
        for _ in range(2):
            numpys.seed(8)
            drawn.append(np.random.rand())
        assert drawn[0] == drawn[1] != first
    finally:
        np.random.set_bit_generator(own)
