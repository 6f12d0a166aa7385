"""sample_cache: the plain loop's bits, on and off between two steps, and left alone where samples may differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import accel
from accel import strategies
from accel.dataio import sample_cache
from accel.dataio.passes import kept_samples
from accel.dataio.passes.movable import movable
from accel.dataio.passes.proxy import LoaderProxy
from accel.dataio.sample_cache import SampleCache, SampleKeeper
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.base import NothingHelps
from accel.strategies.loader_workers import LoaderWorkers
from accel.strategies.sample_cache import KeepSamples
from tests.accel import loops
from tests.accel.loops import Net, advance, advance_until, assert_same, everything, play_clock, training

BATCH = 8


class Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take their time, and are functions of the index; it counts them where nobody looks."""

    accel_hides = frozenset({"fetched", "noise", "sleep"})

    def __init__(self, samples: int = 64, sleep: Callable[[float], None] = lambda seconds: None) -> None:
        self.fetched, self.noise, self.sleep = np.zeros(1, int), np.zeros(1), sleep
        self.samples, self.scale = samples, 1.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched[0] += 1
        self.sleep(0.0005)
        return torch.linspace(0, self.scale, 6) * index + float(self.noise[0]), torch.tensor(index)


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def make(data: Any = None, ranks: int = 1, **options: Any) -> tuple[KeepSamples, Run, Any]:
    """Return the strategy, a run, and the loop's loader."""
    loader = DataLoader(data if data is not None else Decoded(), **{"batch_size": BATCH, "shuffle": True} | options)
    proxy: Any = LoaderProxy(loader, Silent())
    model = Net()
    return KeepSamples(), Run(model, loader, [], Gate(model, []), proxy._accel_fetching, ranks, cores=2), proxy


def fetches(loop: Any) -> int:
    """Iterate an epoch; return how many samples were fetched."""
    before = loop.dataset.fetched[0]
    for x, target in loop:
        assert x.equal(torch.stack([torch.linspace(0, loop.dataset.scale, 6) * int(i) for i in target]))
    return int(loop.dataset.fetched[0] - before)


@pytest.fixture(autouse=True)
def any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """These samples are fetched in no time: keep them all the same."""
    monkeypatch.setattr(kept_samples, "_MOST_NOTING", math.inf)


def test_samples_that_are_fetched_as_fast_as_they_are_noted_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noting them doubled the time of the first epoch's fetches, and took longer than it could ever win."""
    monkeypatch.setattr(kept_samples, "_MOST_NOTING", 1.0)
    monkeypatch.setattr(SampleKeeper, "noting_share", lambda self, fetch: 1.01)
    strategy, run, loop = make()
    before = loop.dataset.fetched[0]
    assert strategy.waits(run) == strategy.refusal(run)
    assert strategy.refusal(run) == "noting a sample takes 101% of the time of its fetch: there is little to be won"
    assert fetches(loop) == len(loop.dataset)
    assert loop.dataset.fetched[0] - before == len(loop.dataset) + 1  # sample 0, to see what samples are like

    monkeypatch.setattr(SampleKeeper, "noting_share", lambda self, fetch: 0.99)
    strategy, run, loop = make()
    assert strategy.waits(run).startswith("it waits until most samples have come twice")
    assert strategy.refusal(run) == ""


@pytest.fixture
def checks() -> None:
    """Samples that are kept are fetched again now and then, as ever."""


@pytest.fixture(autouse=True)
def _without_checks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "checks" in request.fixturenames:
        return
    monkeypatch.setattr(sample_cache, "_CHECKED", 0.0)
    monkeypatch.setattr(SampleKeeper, "_owes_check", lambda self, samples: False)
    monkeypatch.setattr(SampleKeeper, "check", lambda self, most, fetch: True)


def prepared(data: Any = None, **options: Any) -> tuple[KeepSamples, Run, Any]:
    """Return the same when the loop has gone through as many epochs as it takes."""
    strategy, run, loop = make(data, **options)
    for _ in range(3):
        assert strategy.waits(run) and strategy.trial_design(run).is_preparing
        assert fetches(loop) == 64
    assert strategy.waits(run) == strategy.waits(run) == "" and not strategy.trial_design(run).is_preparing
    return strategy, run, loop


def test_it_waits_for_two_epochs_and_is_then_on_after_on_and_off_after_off() -> None:
    strategy, run, loop = prepared()
    for _ in range(2):
        strategy.enable(run, None)
        assert fetches(loop) == 0
        strategy.disable(run)
        assert fetches(loop) == 64
    assert strategy.failure(run) == ""
    strategy.enable(run, None)
    strategy.close(run)
    assert fetches(loop) == 64 and run.fetching.samples is None


@pytest.mark.parametrize("setting", ["threads=1", 1])
def test_it_goes_with_workers_whichever_comes_first(setting: Any) -> None:
    workers = LoaderWorkers()
    strategy, run, loop = make()
    for early in (True, False):
        if early:
            strategy.waits(run)
        workers.enable(run, setting)
        if not early:
            strategy.waits(run)
        kept: Any = run.fetching.samples
        for _ in range(4):
            waits = strategy.waits(run)
            fetches(loop)
        assert waits == "" and strategy.trial_design(run).settling(None) > 2
        strategy.enable(run, None)
        fetches(loop)
        assert kept.cache.stats().served >= 48  # but for what is made ahead
        assert kept.cache.stats().kept == 64
        strategy.close(run)
        workers.disable(run)
        workers.close(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: setattr(data, "scale", data.scale + 1.0),
        lambda data: data.extra.append(1),
        lambda data: data.array.__setitem__(0, data.array[0] + 1.0),
        lambda data: data.tensor.add_(1),
    ],
    ids=["attribute", "list", "array", "tensor"],
)
def test_after_a_change_in_place_all_is_begun_anew_and_after_three_given_up(change: Any) -> None:
    data: Any = Decoded()
    data.extra, data.array, data.tensor = [0] * 300, torch.zeros(4).numpy(), torch.zeros(4)
    strategy, run, loop = prepared(data)
    strategy.enable(run, None)
    assert fetches(loop) == 0
    change(data)
    assert [fetches(loop), fetches(loop), fetches(loop)] == [64, 64, 0]
    for _ in range(2):
        change(data)
        fetches(loop)
    assert fetches(loop) == 64
    assert strategy.failure(run) == strategy.refusal(run) == "the dataset, or a file that it names, keeps changing"


def test_a_file_that_the_dataset_names_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_samples, "_FILES_LEAST", 1000)  # however busy the machine is
    data: Any = Decoded()
    data.paths = [(str(tmp_path / f"{number}.txt"), number) for number in range(300)]
    data.root = tmp_path
    for path, _ in data.paths:
        Path(path).write_text("a")
    strategy, run, loop = prepared(data)
    strategy.enable(run, None)
    assert fetches(loop) == 0
    Path(data.paths[299][0]).write_text("other")
    assert [fetches(loop), fetches(loop), fetches(loop)] == [64, 64, 0]
    (tmp_path / "a result").write_text("")
    assert fetches(loop) == 0
    strategy.close(run)


def test_an_attribute_that_is_set_within_an_epoch_holds_for_the_next_batch() -> None:
    strategy, run, loop = prepared()
    strategy.enable(run, None)
    batches = iter(loop)
    next(batches)
    loop.dataset.scale = 2.0
    x, target = next(batches)
    assert x[:, -1].equal(2.0 * target)
    strategy.close(run)


@pytest.mark.usefixtures("checks")
def test_the_first_difference_switches_it_off_and_says_which_sample() -> None:
    strategy, run, loop = prepared()
    strategy.enable(run, None)
    fetches(loop)
    loop.dataset.noise[0] = 9.0
    assert all((x[:, 0] == 9.0).all() for x, _ in loop)
    assert "came out differently when it was fetched again" in strategy.failure(run)
    assert run.fetching.samples is not None and run.fetching.samples.cache is None


@pytest.mark.usefixtures("checks")
def test_what_the_dataset_raises_comes_when_the_loop_asks_for_that_sample() -> None:
    strategy, run, loop = prepared()
    strategy.enable(run, None)
    loop.dataset.noise = None  # hidden, and makes fetching fail
    batches = iter(loop)
    assert "a sample can't be fetched again: TypeError" in strategy.failure(run)
    with pytest.raises(TypeError, match="subscriptable"):
        next(batches)


class Broken(Decoded):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("no such picture")


class Draws(Decoded):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(6), torch.tensor(index)


class Opaque(Decoded):
    def __init__(self) -> None:
        super().__init__()
        self.view = memoryview(bytearray(4))


class Strange(Decoded):
    def __getitem__(self, index: int) -> Any:
        return {1, 2}


def sees(text: str, data: Any, **options: Any) -> tuple[Any, ...]:
    return pytest.param(data, options, text, id=text)


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        sees("not a torch.utils.data.DataLoader", None, loader=True),
        sees("workers of its own", Decoded(), num_workers=1),
        sees("is a SampleCache already", SampleCache(Decoded())),
        sees("tensors in memory", TensorDataset(torch.ones(4))),
        sees(
            "draws random numbers: a sample may not be the same",
            Decoded(),
            finding="fetching a sample draws random numbers",
        ),
    ],
)
def test_where_it_does_not_apply_it_says_why(data: Any, options: dict[str, Any], text: str) -> None:
    finding, no_loader = options.pop("finding", ""), options.pop("loader", False)
    strategy, run, _ = make(data, **options)
    run.observed.fetch_finding = finding
    if no_loader:
        run.loader = [1, 2]
    assert text in strategy.refusal(run)
    assert (no_loader or not movable(run.loader)) and run.fetching.samples is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (Opaque(), "can't be looked into for a change in place"),
        (Strange(), "samples can't be kept: one holds a builtins.set"),
        (Decoded(0), "the dataset is empty"),
        (Broken(), "sample 0 can't be fetched: RuntimeError: no such picture"),
        (Draws(), "draws random numbers"),
    ],
)
def test_what_turns_out_while_it_is_prepared_is_said(data: Any, text: str) -> None:
    strategy, run, loop = make(data, shuffle=False)
    strategy.waits(run)
    if text not in strategy.refusal(run):
        list(loop)
        assert text in strategy.waits(run)
    assert text in strategy.refusal(run)
    with pytest.raises(NothingHelps, match=text):
        strategy.enable(run, None)


def test_a_sampler_that_never_repeats_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh:
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            return iter(range(64 * self.epoch, 64 * self.epoch + 64))

        def __len__(self) -> int:
            return 64

    strategy, run, loop = make(Decoded(1000), sampler=Fresh(), shuffle=False)
    for _ in range(10):
        assert "twice" in strategy.waits(run)
        for _ in range(5):
            fetches(loop)
    monkeypatch.setattr(kept_samples, "_MOST_ROUNDS", 3)
    for _ in range(4):
        fetches(loop)
    assert "only 0.0% of the samples that are asked for had come before" in strategy.waits(run)
    assert "only 0.0%" in strategy.refusal(run)


# -- in a run ----------------------------------------------------------------------------------------------------------

OTHERS = tuple(name for name in strategies.names() if name != "sample_cache")


def start(seed: int, wrap: bool, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data = Decoded(40) if loops.clock is None else Decoded(40, loops.clock.sleep)
    loader: Any = DataLoader(data, BATCH, shuffle=True)
    if wrap:
        options = {"allow": "exact", "budget": 600, "disable": OTHERS} | options
        model, loader, optimizer = accel.optimize(model, loader, optimizer, **options)
    return model, loader, optimizer


def _row(model: Any) -> Any:
    return next(row for row in accel.explain(model).rows if row.name == "sample_cache")


def advance_until_row(loop: Iterator[Any], model: Any, status: str, why: str = "") -> int:
    """Train until the strategy's row says so, asked every 20 steps, and return how many steps that took."""
    for steps in range(20, 1500, 20):
        advance(loop, 20)
        if _row(model).status == status and why in _row(model).why:
            return steps
    raise AssertionError(_row(model))


def test_a_run_keeps_it_and_computes_the_plain_loops_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    play_clock(monkeypatch.setattr)
    model, loader, optimizer = start(0, wrap=True)
    loop = training(model, loader, optimizer)
    steps = advance_until_row(loop, model, "not tried", "it waits until most samples have come twice")
    steps += advance_until_row(loop, model, "kept")
    closing = advance_until(loop, lambda: accel.explain(model).state == "done")
    steps += closing
    assert _row(model).gain > 1.2 and 20 < closing < 150
    before = loader.dataset.fetched[0]
    advance(loop, 50)
    assert loader.dataset.fetched[0] == before
    accel.undo(model)
    next(loop)
    assert loader.dataset.fetched[0] == before + BATCH
    accelerated = everything(model, optimizer)

    plain_model, plain_loader, plain_optimizer = start(0, wrap=False)
    advance(training(plain_model, plain_loader, plain_optimizer), steps + 51)
    assert_same(everything(plain_model, plain_optimizer), accelerated)


@pytest.mark.usefixtures("checks")
def test_a_difference_in_a_run_is_reported_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    play_clock(monkeypatch.setattr)
    model, loader, optimizer = start(0, wrap=True)
    loop = training(model, loader, optimizer)
    advance_until_row(loop, model, "kept")
    advance(loop, 100)
    loader.dataset.noise[0] = 9.0
    advance_until_row(loop, model, "undone", "came out differently when it was fetched again")
    accel.undo(model)
