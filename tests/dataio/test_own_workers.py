"""Workers that go on across epochs must serve what the loader's own would, down to each augmentation."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.passes.movable import not_continuable
from accel.dataio.passes.own_workers import OwnWorkers
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.test_continuous import Silent


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch wait less long for the workers of a pass that raised: 5 s each."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.02)


class Augmented(Dataset[Any]):
    """Samples tell their index, who made them, and random numbers of all kinds."""

    def __init__(self, length: int = 23) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        drawn = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        told = [info.id, info.num_workers, info.seed % 1000, torch.initial_seed() % 1000, torch.get_num_threads()]
        return torch.tensor([index, self.epoch, *told, *drawn], dtype=torch.float64)


Loop = Any


def run(loader: Any, number: int = 2, *, stop: int | None = None, draw: bool = False, change: Any = None) -> list[Any]:
    seen: list[Any] = []
    raised = False
    for epoch in range(number):
        if change is not None:
            change(epoch)
        try:
            for count, batch in enumerate(loader):
                if count == stop:
                    break
                seen.append(batch.clone() if isinstance(batch, torch.Tensor) else batch)
                if draw:
                    seen.append(torch.rand(1))
        except Exception as error:
            seen.append((type(error), str(error)))
            raised = True
        seen.append((torch.get_rng_state(), random.random(), np.random.rand()))
    if raised:
        gc.collect()  # the pass hangs on its traceback: left to a later test, it would keep that waiting
    return seen


def continued(loader: DataLoader[Any]) -> tuple[Any, Silent]:
    listener = Silent()
    proxy: Any = LoaderProxy(loader, listener)
    proxy._accel_fetching.own_workers = OwnWorkers(loader)
    return proxy, listener


def seed() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def both(make: Any, **options: Any) -> Silent:
    """Run a loop over the plain loader and over one that is continued, and compare all that it saw."""
    seed()
    wanted = run(make(), **options)
    seed()
    proxy, listener = continued(make())
    seen = run(proxy, **options)
    assert len(seen) == len(wanted)
    for place, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        assert equal(one, other), (place, one, other)
    if proxy._accel_fetching.own_workers is not None:
        proxy._accel_fetching.own_workers.close()
    return listener


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    given = {"num_workers": 2} | ({"batch_size": 4} if "batch_sampler" not in options else {}) | options
    return DataLoader(Augmented() if dataset is None else dataset, **given)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": False, "drop_last": True},
        pytest.param({"shuffle": True, "prefetch_factor": 1}, marks=pytest.mark.slow),
        pytest.param({"shuffle": True, "prefetch_factor": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batches_and_random_states_are_those_of_the_plain_loader(workers: int, options: dict[str, Any]) -> None:
    assert not both(lambda: loader(num_workers=workers, **options), number=4).failures


@pytest.mark.parametrize(
    "loop",
    [
        {"stop": 0},
        {"stop": 3},
        pytest.param({"stop": 5}, marks=pytest.mark.slow),
        pytest.param({"stop": 6}, marks=pytest.mark.slow),
        pytest.param({"draw": True}, marks=pytest.mark.slow),
        {"stop": 4, "draw": True},
    ],
    ids=str,
)
def test_early_breaks_and_a_loop_that_draws(loop: dict[str, Any]) -> None:
    assert not both(lambda: loader(shuffle=True), **loop).failures


@pytest.mark.parametrize("stop", [None, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_generator_of_its_own(stop: int | None) -> None:
    assert not both(lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)), stop=stop).failures


@pytest.mark.parametrize("length", [1, *(pytest.param(length, marks=pytest.mark.slow) for length in (3, 4, 9))])
def test_epochs_shorter_than_the_look_ahead(length: int) -> None:
    assert not both(lambda: loader(Augmented(length), shuffle=True)).failures


class Eager:
    """A batch sampler that draws when its iterator is made, which torch does twice."""

    def __iter__(self) -> Iterator[list[int]]:
        order: list[int] = torch.randperm(20).tolist()
        return iter([order[at : at + 3] for at in range(0, 20, 3)])

    def __len__(self) -> int:
        return 7


class Lazy(Sampler[int]):
    """A sampler that draws from the global states as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(21):
            yield int(torch.randint(21, ())) if random.random() < 0.5 else int(np.random.randint(21))


@pytest.mark.parametrize("loop", [pytest.param({}, marks=pytest.mark.slow), {"stop": 3, "draw": True}], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: loader(batch_sampler=Eager()), id="eager"),
        pytest.param(lambda: loader(sampler=Lazy()), id="lazy"),
        pytest.param(
            lambda: loader(sampler=RandomSampler(Augmented(), generator=torch.Generator().manual_seed(1))),
            id="generator",
        ),
        pytest.param(
            lambda: loader(sampler=RandomSampler(Augmented(), replacement=True)),
            id="replacement",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: loader(batch_sampler=BatchSampler(RandomSampler(range(23)), 5, True)),
            id="batch sampler",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_samplers(make: Any, loop: dict[str, Any]) -> None:
    assert not both(make, **loop).failures


def test_a_distributed_sampler_follows_set_epoch() -> None:
    def outcome(wrap: bool) -> list[Any]:
        seed()
        sampler = DistributedSampler(Augmented(), num_replicas=2, rank=1, seed=5)
        made = loader(sampler=sampler)
        return run(
            continued(made)[0] if wrap else made, 4, change=lambda epoch: sampler.set_epoch(epoch + 3 * (epoch > 2))
        )

    assert equal(outcome(True), outcome(False))


def _reseed(worker: int) -> None:
    at = torch.initial_seed() % 2**32
    np.random.seed(at)
    random.seed(at + worker)


def _change(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.epoch = torch.initial_seed() % 100  # type: ignore[attr-defined]


def _fail(worker: int) -> None:
    raise RuntimeError("no picture for me")


def test_a_worker_init_fn_is_called_for_each_epoch() -> None:
    assert not both(lambda: loader(shuffle=True, worker_init_fn=_reseed)).failures


def test_a_worker_init_fn_that_changes_the_dataset_is_left_alone() -> None:
    assert "worker_init_fn changes the dataset" in both(lambda: loader(worker_init_fn=_change)).failures[0]


def test_a_worker_init_fn_that_fails() -> None:
    assert len(both(lambda: loader(worker_init_fn=_fail)).failures) == 1


class Counts(Augmented):
    """Each worker counts what it has made."""

    def __getitem__(self, index: int) -> Any:
        self.epoch += 1
        return super().__getitem__(index)


def test_a_dataset_that_fetching_changes_is_left_alone() -> None:
    assert "fetching a sample changes the dataset" in both(lambda: loader(Counts(), shuffle=True)).failures[0]


class Breaks(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyError("no such picture: 13")
        return super().__getitem__(index)


@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_sample_that_can_not_be_made(shuffle: bool) -> None:
    assert len(both(lambda: loader(Breaks(), shuffle=shuffle)).failures) == 1


class SamplerBreaks(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(18)
        raise LookupError("no more of these")


def test_a_sampler_that_raises() -> None:
    assert not both(lambda: loader(sampler=SamplerBreaks())).failures


@pytest.mark.parametrize(
    ("steps", "within"),
    [
        ([0, 1, 1, 1], False),
        ([0, 0, 5, 0], True),
        pytest.param([0, 1, 1, 1, 1], True, marks=pytest.mark.slow),
        pytest.param([0, 0, 5, 0, 1], False, marks=pytest.mark.slow),
    ],
)
def test_changes_in_place_between_and_within_epochs(steps: list[int], within: bool) -> None:
    def outcome(wrap: bool) -> tuple[list[Any], list[str]]:
        seed()
        data = Augmented()
        made: Any = loader(data, shuffle=True)
        proxy, listener = continued(made) if wrap else (made, Silent())
        seen: list[Any] = []
        for step in steps:
            data.epoch += step
            for count, batch in enumerate(proxy):
                seen.append(batch.clone())
                if within and count == 2:
                    data.epoch += 100
        return seen, listener.failures

    seen, failures = outcome(True)
    assert equal(seen, outcome(False)[0])
    assert not failures


def test_passes_in_one_another_and_beside_one_another() -> None:
    def nested(it: Any) -> list[Any]:
        return [(a.clone(), [b.clone() for b, _ in zip(it, range(3), strict=False)]) for a in it]

    def beside(it: Any) -> list[Any]:
        return [(a.clone(), b.clone()) for a, b in zip(it, it, strict=True)]

    def left_alive(it: Any) -> list[Any]:
        seen, passing = [], iter(it)
        for _ in range(3):
            seen += [next(passing).clone() for _ in range(2)]
            passing = iter(it)
        return seen

    for loop in (nested, beside, left_alive):
        seed()
        wanted = loop(loader(Augmented(9), shuffle=True)), torch.get_rng_state()
        seed()
        proxy, listener = continued(loader(Augmented(9), shuffle=True))
        assert equal((loop(proxy), torch.get_rng_state()), wanted), loop.__name__
        assert not listener.failures


class Killed(Augmented):
    """Ends the worker, unless torch has started it."""

    def __getitem__(self, index: int) -> Any:
        import multiprocessing
        import os
        import signal

        if index == 13 and multiprocessing.current_process().name.startswith("accel"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed() -> None:
    failures = both(lambda: loader(Killed(), shuffle=True)).failures
    assert len(failures) == 1 and "SIGKILL" in failures[0]


@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 1, 5))])
def test_ctrl_c_while_a_batch_is_awaited(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(wrap: bool) -> list[Any]:
        seed()
        made: Any = loader(shuffle=True)
        proxy = continued(made)[0] if wrap else made
        seen = [batch.clone() for batch in proxy]
        passing = iter(proxy)
        for count in range(6):
            if wrap and count == at:
                engine = proxy._accel_fetching.own_workers.continuous.engine
                with monkeypatch.context() as patch:
                    patch.setattr(engine, "_await", _interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        next(passing)
            seen.append(next(passing).clone())
        return [*seen, *(batch.clone() for batch in proxy)]

    assert equal(outcome(True), outcome(False))


def _interrupted(serial: int) -> None:
    raise KeyboardInterrupt


def test_options_set_between_epochs() -> None:
    def outcome(wrap: bool) -> list[Any]:
        seed()
        made: Any = loader(shuffle=True)
        proxy = continued(made)[0] if wrap else made
        seen = run(proxy, 2)
        proxy.worker_init_fn = _reseed
        seen += run(proxy, 2)
        proxy.worker_init_fn = None
        return [*seen, *run(proxy, 2)]

    assert equal(outcome(True), outcome(False))


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_switching_between_epochs_at_random(number: int) -> None:
    def outcome(wrap: bool) -> list[Any]:
        seed()
        chance = random.Random(number)
        made: Any = loader(shuffle=True)
        proxy = continued(made)[0] if wrap else made
        own = proxy._accel_fetching.own_workers if wrap else None
        seen: list[Any] = []
        for _ in range(6):
            for batch in proxy:
                seen.append(batch.clone())
                on = chance.random() < 0.5
                if wrap:
                    proxy._accel_fetching.own_workers = own if on else None
                    if not on:
                        own.rest()
            seen.append(torch.get_rng_state())
        return seen

    assert equal(outcome(True), outcome(False))


def test_what_is_left_alone() -> None:
    assert not_continuable(loader()) == ""
    assert "persistent_workers=True" in not_continuable(loader(persistent_workers=True))
    assert "in_order=False" in not_continuable(loader(in_order=False))
    with pytest.raises(ValueError, match="in_order=False"):
        OwnWorkers(loader(in_order=False))


def test_epochs_are_made_ahead_by_the_same_processes() -> None:
    made = loader(shuffle=True)
    proxy, _ = continued(made)
    own = proxy._accel_fetching.own_workers
    run(proxy, 1)
    processes = [process.pid for process in own.continuous.engine.processes]
    assert own.continuous._ahead is not None
    run(proxy, 3)
    assert [process.pid for process in own.continuous.engine.processes] == processes and len(processes) == 2
    assert own.continuous.failed_guesses == 0
    own.close()


class Slow(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            time.sleep(3)
        return super().__getitem__(index)


def test_a_timeout_is_obeyed() -> None:
    failures = both(lambda: loader(Slow(), timeout=1), number=1).failures
    assert len(failures) == 1 and "timeout=1" in failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_loaders_own_start_method_is_used(method: str) -> None:
    assert not both(lambda: loader(shuffle=True, multiprocessing_context=method), number=2).failures
