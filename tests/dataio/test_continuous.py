"""Worker processes must serve the plain loader's batches, in its order, from its random states."""

from __future__ import annotations

import multiprocessing
import random
import re
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.passes.epochs import can_draw_ahead, draw_ahead
from accel.dataio.passes.movable import movable
from accel.dataio.passes.moved import same_as_plain
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.engines import Silent, Squares, proxied, wrapped


@pytest.mark.parametrize("batch_size", [4, None])
def test_workers_that_began_an_epoch_ahead_are_switched_off_within_it(batch_size: int | None) -> None:
    """Also where samples are not collated."""
    loader: DataLoader[Any] = DataLoader(Squares(50), batch_size=batch_size, shuffle=True)
    torch.manual_seed(1)
    wanted = [batch for _ in range(3) for batch in loader]
    proxy: Any = LoaderProxy(loader, Silent())
    pool = PrefetchAcrossEpochs(loader, ProcessEngine(loader, 1))
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        proxy._accel_fetching.workers = pool
        for number, batch in enumerate(proxy):
            seen.append(batch)
            proxy._accel_fetching.workers = None if number in (1, 2) else pool
    pool.close()
    assert len(seen) == len(wanted)
    assert all(one.equal(other) for one, other in zip(seen, wanted, strict=True))


def make_loader(dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Squares(50), batch_size=4, shuffle="sampler" not in options, **options)


def epochs(
    loader: Any, number: int, steps: int | None = None, draw: bool = False
) -> tuple[list[list[int]], torch.Tensor]:
    """Iterate `number` epochs, leaving each after `steps` batches, and return what came and the random state."""
    seen = []
    for _ in range(number):
        epoch: list[int] = []
        for count, batch in enumerate(loader):
            if steps is not None and count == steps:
                break
            epoch += batch[:, 1].tolist()
            if draw:
                torch.rand(1)
        seen.append(epoch)
    return seen, torch.get_rng_state()


def plain_and_moved(make: Any, workers: int = 2, **options: Any) -> tuple[Any, Any, PrefetchAcrossEpochs]:
    torch.manual_seed(3)
    plain = epochs(make(), 4, **options)
    torch.manual_seed(3)
    loader = make()
    proxy = LoaderProxy(loader, Silent())
    pool = PrefetchAcrossEpochs(loader, ProcessEngine(loader, workers))
    proxy._accel_fetching.workers = pool
    moved = epochs(proxy, 4, **options)
    pool.close()
    return plain, moved, pool


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


EPOCHS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "shuffled": (make_loader, {}, 0),
    "left early": (make_loader, {"steps": 5}, 0),
    "a loop that draws": (make_loader, {"draw": True}, 1),  # not guessed again
    "a loop that draws and leaves": (make_loader, {"steps": 12, "draw": True}, 1),
    **{f"{n} samples": (lambda n=n: make_loader(Squares(n)), {}, 0) for n in (1, 3, 4, 9)},
    "generator": (lambda: make_loader(sampler=RandomSampler(Squares(50), generator=generator())), {}, 0),
    "batch sampler": (
        lambda: DataLoader(
            Squares(50), batch_sampler=BatchSampler(RandomSampler(Squares(50), generator=generator()), 4, False)
        ),
        {},
        0,
    ),
}


@pytest.mark.parametrize("kind", EPOCHS)
def test_order_and_random_state_are_those_of_the_plain_loader(kind: str) -> None:
    make, options, failed_guesses = EPOCHS[kind]
    plain, moved, pool = plain_and_moved(make, **options)

    assert moved[0] == plain[0]
    assert torch.equal(moved[1], plain[1])
    assert pool.guesses.failed == failed_guesses


@pytest.mark.parametrize("seed", range(5))
def test_switching_at_random_batches_loses_and_doubles_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    plain = epochs(make_loader(), 6)
    torch.manual_seed(seed)
    loader = make_loader()
    proxy = LoaderProxy(loader, Silent())
    pools = [
        None,
        PrefetchAcrossEpochs(loader, ProcessEngine(loader, 1)),
        PrefetchAcrossEpochs(loader, ProcessEngine(loader, 2)),
    ]
    chance = random.Random(seed)
    moved = []
    for _ in range(6):
        epoch: list[int] = []
        for batch in proxy:
            epoch += batch[:, 1].tolist()
            if chance.random() < 0.3:
                proxy._accel_fetching.workers = chance.choice(pools)
        moved.append(epoch)

    assert moved == plain[0]
    assert torch.equal(torch.get_rng_state(), plain[1])


class Breaks(Squares):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise KeyError("no such picture: 13")
        return super().__getitem__(index)


def test_the_datasets_own_error_comes_out_as_it_is() -> None:
    loader = DataLoader(Breaks(50), batch_size=4)
    listener = Silent()
    with proxied(loader, 1, listener) as proxy, pytest.raises(KeyError, match="no such picture: 13") as caught:
        epochs(proxy, 1)

    assert caught.traceback[-1].name == "__getitem__"  # the user's frame is on top, not a copy of its text
    assert listener.requests == 4


class Killed(Squares):
    """Ends its worker process, but not the loop's own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 21 and torch.utils.data.get_worker_info() is not None:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_batch_that_kills_two_workers_is_fetched_in_the_loops_own_process() -> None:
    loader = DataLoader(Killed(50), batch_size=4)
    listener = Silent()
    with proxied(loader, 1, listener) as proxy:
        seen, _ = epochs(proxy, 1)

    assert seen[0] == [i * i for i in range(50)]
    assert re.search(
        r"worker process 0 .*was killed by SIGKILL while fetching samples \[20, 21, 22, 23\]", listener.failures[0]
    )


def test_fetching_is_compared_with_the_plain_one() -> None:
    class Differs(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) + (torch.utils.data.get_worker_info() is not None)

    good, bad = make_loader(), make_loader(Differs(50))

    assert same_as_plain(good, PrefetchAcrossEpochs(good, ProcessEngine(good, 1)))
    assert not same_as_plain(bad, PrefetchAcrossEpochs(bad, ProcessEngine(bad, 1)))


def test_what_can_be_drawn_ahead_and_moved() -> None:
    data = Squares(50)
    assert can_draw_ahead(make_loader())
    assert can_draw_ahead(DataLoader(data, batch_size=4))
    assert not can_draw_ahead(make_loader(data, sampler=RandomSampler(data, replacement=True)))
    assert draw_ahead(make_loader(data, sampler=RandomSampler(data, replacement=True))) is None
    assert movable(make_loader()) == ""
    assert movable(make_loader(num_workers=1)) == ""
    assert "keeps its workers itself" in movable(make_loader(num_workers=1, persistent_workers=True))
    assert "not a torch.utils.data.DataLoader" in movable([1, 2])


def test_drawing_ahead_leaves_the_random_state_alone() -> None:
    loader = make_loader()
    before = torch.get_rng_state()
    ahead = draw_ahead(loader)

    assert torch.equal(torch.get_rng_state(), before)
    assert ahead is not None
    assert list(ahead.lists) == [list(batch) for batch in _drawn(loader)]


def _drawn(loader: DataLoader[Any]) -> list[list[int]]:
    iterator = iter(loader)
    return list(iterator._sampler_iter)  # type: ignore[attr-defined]


def test_processes_end_with_the_last_reference() -> None:
    others = multiprocessing.active_children()
    loader = make_loader(Squares(4000))
    pool = PrefetchAcrossEpochs(loader, ProcessEngine(loader, 2))
    pool.take(iter(loader.batch_sampler))  # type: ignore[arg-type]
    pool.fetch()
    processes = set(multiprocessing.active_children()) - set(others)
    assert len(processes) == 2
    del pool

    assert not processes & set(multiprocessing.active_children())


class Grows(Squares):
    """Its length depends on its epoch."""

    def __init__(self, step: int) -> None:
        super().__init__(50)
        self.step, self.epoch = step, 0

    def __len__(self) -> int:
        return 40 + self.step * self.epoch


@pytest.mark.sample(3)
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("step", [5, -5, 40])
@pytest.mark.parametrize("mode", ["threads", "fork", "proxy"])
def test_a_dataset_whose_length_moves_from_epoch_to_epoch(mode: Any, step: int, shuffle: bool) -> None:
    def seen(loader: Any, data: Grows) -> list[Any]:
        torch.manual_seed(1)
        found = []
        for data.epoch in range(6):
            found.append([index for batch in loader for index in batch[:, 0].tolist()])
        return found

    plain = Grows(step)
    wanted = seen(DataLoader(plain, 4, shuffle=shuffle), plain)
    data = Grows(step)
    loader = DataLoader(data, 4, shuffle=shuffle)
    with wrapped(loader, mode) as made:
        assert seen(made, data) == wanted
