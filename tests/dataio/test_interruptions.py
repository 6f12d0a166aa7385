"""Ctrl-C, wherever it comes, and then the loop again: not one batch is missing, doubled, or another's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.fetching import randomness
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler.errors import InvalidState
from tests.dataio.engines import Silent
from tests.dataio.numbers import Numbers, indices
from tests.interruptions import Interrupter

LENGTH, SIZE = 14, 3
# Between two lines of these one of several random states has been written: they may come out as in no plain loop.
# Of 600 to 1,600 lines that run in an epoch, one in so many: primes, to meet loops over batches at all phases.
STRIDES = {"inline": 11, "auto": 421, "threads": 503, "fork": 1009, "proxy": 1031}


def _writes_states(place: str) -> bool:
    file, _, line = place.partition(":")
    writers = (randomness._write_torch, randomness._write_numpy, randomness._seed_numpy)
    lines = [(first, first + len(text)) for text, first in map(inspect.getsourcelines, writers)]
    return file == "epochs.py" or (file == "randomness.py" and any(low <= int(line) < high for low, high in lines))


def _generators(own: bool) -> torch.Generator | None:
    return torch.Generator().manual_seed(3) if own else None


def _plain(own: bool) -> DataLoader[Any]:
    return DataLoader(Numbers(LENGTH), SIZE, shuffle=True, generator=_generators(own))


def _wrapped(mode: str, own: bool) -> Any:
    plain = _plain(own)
    if mode == "proxy":
        proxy = LoaderProxy(plain, Silent())
        proxy._accel_fetching.workers = PrefetchAcrossEpochs(plain, ProcessEngine(plain, 1))
        return proxy
    return ContinuousLoader(plain, mode=mode, num_workers=2)  # type: ignore[arg-type]


def _close(loader: Any) -> None:
    if isinstance(loader, ContinuousLoader):
        loader.close()
    elif loader._accel_fetching.workers is not None:
        loader._accel_fetching.workers.close()


def _states() -> tuple[Any, ...]:
    return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def _whole(loader: Any) -> list[list[int]]:
    return [indices(batch) for batch in loader]


def _seed() -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


@functools.cache
def plain_outcomes(own: bool) -> list[Any]:
    """Return what two more epochs yield when the plain loader's second one is left at any of its batches."""
    outcomes = []
    for left in [None, *range(LENGTH // SIZE + 3)]:
        _seed()
        loader = _plain(own)
        _whole(loader)
        batches = None if left is None else iter(loader)
        for _ in range(left or 0):
            next(batches, None)  # type: ignore[arg-type]
        later = [_whole(loader) for _ in range(2)]
        outcomes.append((later, _states()))
    return outcomes


def interrupted(mode: str, own: bool, at: int | None) -> tuple[Interrupter, list[Any], Any, Any]:
    """Interrupt the second epoch at line `at`; return that epoch's batches, and what two more yield.

    The first ones end with 'again' where the iterator was gone on with after the interruption.
    """
    _seed()
    loader = _wrapped(mode, own)
    try:
        _whole(loader)
        interrupter, seen, batches = Interrupter("dataio", at), [], None
        try:
            with interrupter():
                batches = iter(loader)
                for batch in batches:
                    seen.append(indices(batch))
        except KeyboardInterrupt:
            pass
        return interrupter, seen, batches, loader
    except BaseException:
        _close(loader)
        raise


def assert_the_loop_again_is_right(mode: str, own: bool, stride: int) -> None:
    outcomes = plain_outcomes(own)
    for at in itertools.count(7 * own, stride):
        interrupter, _, batches, loader = interrupted(mode, own, at)
        batches = None  # noqa: F841  (as in a notebook, whose loop variable is gone)
        try:
            outcome = [_whole(loader) for _ in range(2)], _states()
        finally:
            _close(loader)
        if not _writes_states(interrupter.place):
            assert outcome in outcomes, f"interrupted at {interrupter.place}: {outcome[0]}"
        if not interrupter.place:
            return  # the whole epoch ran without coming to that line


# Each line of these takes a start of processes: with a generator of the loader's own, every line is tried by `slow`.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("mode", "own"),
    [
        pytest.param(mode, own, marks=[pytest.mark.slow] if own and mode in ("fork", "proxy") else [])
        for mode in STRIDES
        for own in (False, True)
    ],
    ids=lambda value: {False: "global", True: "own"}.get(value, value),
)
def test_the_loop_again_is_as_after_the_plain_loader(mode: str, own: bool) -> None:
    assert_the_loop_again_is_right(mode, own, STRIDES[mode])


def assert_the_same_iterator_goes_on(mode: str, stride: int) -> None:
    _seed()
    plain = _plain(False)
    _, wanted = _whole(plain), _whole(plain)
    for at in itertools.count(0, stride):
        interrupter, seen, batches, loader = interrupted(mode, False, at)
        try:
            if batches is not None:
                with contextlib.suppress(InvalidState):
                    seen += [indices(batch) for batch in batches]
                    if not _writes_states(interrupter.place):
                        assert seen == wanted, f"interrupted at {interrupter.place}: {seen}"
        finally:
            _close(loader)
        if not _writes_states(interrupter.place):
            assert seen == wanted[: len(seen)], f"interrupted at {interrupter.place}: {seen}"
        if not interrupter.place:
            return


@pytest.mark.parametrize("mode", list(STRIDES))
def test_the_same_iterator_goes_on_where_it_was(mode: str) -> None:
    assert_the_same_iterator_goes_on(mode, STRIDES[mode])


class Impatient(Numbers):
    """Is interrupted at one sample, once."""

    armed = False

    def __getitem__(self, index: int) -> Tensor:
        if index == 5 and Impatient.armed:
            Impatient.armed = False
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("mode", ["inline", "auto"])
def test_an_interruption_in_the_dataset_shifts_nothing(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only in the loop's own thread it comes through as it is: on a busy machine another setting could be on trial.
    monkeypatch.setattr(tuner, "candidates", lambda *_: [])
    plain = DataLoader(Impatient(), 4)
    with ContinuousLoader(plain, mode=mode, num_workers=2) as loader:
        wanted = _whole(loader)
        for _ in range(3):
            Impatient.armed = True
            with pytest.raises(KeyboardInterrupt):
                _whole(loader)
            assert _whole(loader) == wanted
