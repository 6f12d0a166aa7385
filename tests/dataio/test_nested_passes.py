"""Several passes over one loader at a time: each yields what it would over the plain loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from accel.dataio.engine.engine import ThreadEngine
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.engines import Silent, wrapped
from tests.dataio.numbers import Numbers, indices, seeded

Seen = list[Any]


def nested(loader: Any) -> Seen:
    return [(indices(a), indices(b)) for a in loader for b in loader]


def nested_and_left(loader: Any) -> Seen:
    seen: Seen = []
    for outer in loader:
        seen.append(indices(outer))
        for number, inner in enumerate(loader):
            seen.append(indices(inner))
            if number == 1:
                break
    return seen


def zipped(loader: Any) -> Seen:
    return [(indices(a), indices(b)) for a, b in zip(loader, loader, strict=True)]


def begun_before_a_draw(loader: Any) -> Seen:
    batches = iter(loader)
    drawn = float(torch.rand(1))
    return [drawn, *map(indices, batches)]


def one_left_for_another(loader: Any) -> Seen:
    first = iter(loader)
    seen = [indices(next(first))]
    seen += map(indices, loader)
    return [*seen, *map(indices, first)]


def begun_and_never_used(loader: Any) -> Seen:
    kept = [iter(loader), iter(loader)]
    return [*map(indices, loader), len(kept)]


LOOPS = [nested, nested_and_left, zipped, begun_before_a_draw, one_left_for_another, begun_and_never_used]


def make(length: int, own: str) -> DataLoader[Any]:
    data = Numbers(length)
    if own == "sampler":
        return DataLoader(data, 4, sampler=RandomSampler(data, generator=seeded(2)))
    return DataLoader(data, 4, shuffle=own != "sequential", generator=seeded(2) if own == "loader" else None)


def outcome(loader: Any, plain: DataLoader[Any], loop: Callable[[Any], Seen]) -> Any:
    """Return what three such loops see, with whole epochs between, and the random states at the end."""
    torch.manual_seed(5)
    seen = []
    for _ in range(3):
        seen += [[indices(batch) for batch in loader], loop(loader)]
    own = [
        g.get_state().tolist() for g in (plain.generator, getattr(plain.sampler, "generator", None)) if g is not None
    ]
    return seen, torch.get_rng_state().tolist(), own


def _often(mode: str, own: str, length: int) -> bool:
    """Whether a case is run by default: each loop with the global generator, and each generator with one length."""
    return own == "global" or (mode not in ("fork", "proxy") and length == 9)


# Processes are costly: with them one length, and not the order that needs no draws.
CASES = [
    pytest.param(mode, loop, own, length, marks=[] if _often(mode, own, length) else pytest.mark.slow)
    for mode in ("inline", "auto", "threads", "fork", "proxy")
    for loop in LOOPS
    for own in ("global", "loader", "sampler", "sequential")
    for length in (3, 9, 30)
    if mode not in ("fork", "proxy") or (length == 9 and own != "sequential")
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("mode", "loop", "own", "length"), CASES, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_each_pass_is_as_over_the_plain_loader(mode: Any, loop: Any, own: str, length: int) -> None:
    plain, made = make(length, own), make(length, own)
    wanted = outcome(plain, plain, loop)
    with wrapped(made, mode) as loader:
        assert outcome(loader, made, loop) == wanted


# Samplers of the user's own, drawn early: their generators, the program's, and what is left when workers change


def passes(loader: Any, switch: Callable[[int], None] = lambda number: None) -> list[list[int]]:
    """Return what comes of passes that are left early, and a number that the program draws after each batch."""
    torch.manual_seed(0)
    seen = []
    for length in (3, 5, 1, 4):
        for number, batch in enumerate(loader):
            switch(number)
            seen.append([*indices(batch), int(torch.randint(1000, ()))])
            if number + 1 == length:
                break
    return seen


def test_a_sampler_with_replacement_goes_on_where_workers_have_left_it() -> None:
    """It draws 32 at a time from its generator, which had been put back for the lists that were not served."""

    def make() -> DataLoader[Any]:
        data = Numbers()
        generator = torch.Generator().manual_seed(2)
        sampler = RandomSampler(data, replacement=True, num_samples=400, generator=generator)
        return DataLoader(data, 4, sampler=sampler)

    wanted = [indices(batch) for batch in make()]
    loader = make()
    proxy: Any = LoaderProxy(loader, Silent())
    workers = proxy._accel_fetching.workers = PrefetchAcrossEpochs(loader, ThreadEngine(loader, 4))
    seen = []
    for number, batch in enumerate(proxy):
        seen.append(indices(batch))
        if number % 7 == 5:
            proxy._accel_fetching.newest.detach()
    assert seen == wanted
    workers.close()


def test_workers_may_be_switched_on_and_off_a_thousand_times_within_a_pass() -> None:
    """Each time wrapped the index lists once more, until Python's stack was full."""
    loader = DataLoader(Numbers(1500), 1)
    proxy: Any = LoaderProxy(loader, Silent())
    workers = PrefetchAcrossEpochs(loader, ThreadEngine(loader, 1))
    seen = []
    for batch in proxy:
        seen += indices(batch)
        proxy._accel_fetching.workers = workers
        if len(seen) % 2:
            proxy._accel_fetching.newest.detach()
    assert seen == list(range(1500))
    workers.close()
