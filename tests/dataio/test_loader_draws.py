"""Random numbers that a dataset draws depend on seed, epoch and batch alone, whenever it begins to draw them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.engine.engine import InlineEngine, ThreadEngine, ThreadsDraw
from accel.dataio.fetching.randomness import others_could_draw, random_state, seed_everything, streams
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner
from accel.dataio.passes.rounds import Setting
from tests.dataio.engines import in_child, loader_of, run
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


# What a dataset draws depends on its seed alone, and the loop's random states are left as they were


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


# Batches that hang on a graph, of a table that is trained in the collate function: the loop makes them itself


class Words(Dataset[Tensor]):
    """Few words, which come in each batch: one computed with old weights differs."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index % 3)


def trained(wrap: Callable[[DataLoader[Any]], Any], epochs: int = 2, *, evaluates: bool = False) -> list[float]:
    """Train the table, and return the losses; each epoch may begin with those of a pass without gradients."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(3, 2)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.05)
    loader = wrap(DataLoader(Words(), 4, collate_fn=lambda samples: table(torch.stack(samples))))
    losses = []
    for _ in range(epochs):
        if evaluates:
            with torch.no_grad():
                losses += [float(batch.square().sum()) for batch in loader]
        for batch in loader:
            loss = batch.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    if isinstance(loader, ContinuousLoader):
        loader.close()
    return losses


PLAIN = trained(lambda loader: loader)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=str)
def test_a_table_is_trained_as_by_the_plain_loader(options: dict[str, Any]) -> None:
    """With a device, too, where batches are else made one ahead of the step."""
    assert trained(lambda loader: ContinuousLoader(loader, mode="inline", **options)) == PLAIN


def test_threads_go_on_in_the_loop() -> None:
    with pytest.warns(UserWarning, match="batches hang on a graph.*goes on in the loop's own thread"):
        assert trained(lambda loader: ContinuousLoader(loader, mode="threads", num_workers=2)) == PLAIN


def test_what_threads_made_ahead_without_gradients_is_not_trained_on() -> None:
    """It was, and was an error in the first step after an evaluation of the training samples."""
    plain = trained(lambda loader: loader, evaluates=True)
    with pytest.warns(UserWarning, match="batches hang on a graph"):
        assert trained(lambda loader: ContinuousLoader(loader, mode="threads", num_workers=2), evaluates=True) == plain


def test_a_process_does_not_send_a_graph_as_a_leaf() -> None:
    with pytest.raises(TypeError, match="hangs on a graph can't be sent to another process"):
        trained(lambda loader: ContinuousLoader(loader, mode="fork", num_workers=1))


def test_auto_leaves_them_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_NEGLIGIBLE": -1.0, "_BLOCK_S": 0.0, "_FIRST_S": 0.0}.items():
        monkeypatch.setattr(tuner, name, value)
    loaders = []

    def wrap(loader: DataLoader[Any]) -> Any:
        loaders.append(ContinuousLoader(loader, num_workers=1))
        return loaders[0]

    epochs = 12
    assert trained(wrap, epochs) == trained(lambda loader: loader, epochs)
    assert loaders[0].explain().count("on a graph") == 2  # why no threads, and why no process
