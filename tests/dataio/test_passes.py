"""What every pass does, whoever decides by what its batches are made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import proxy as proxies
from accel.dataio.passes import tuner
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.engines import Silent
from tests.dataio.numbers import Numbers, indices

MODES: list[Any] = ["inline", "auto", "threads", "fork", "proxy"]


@pytest.fixture(autouse=True)
def all_settings_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_NEGLIGIBLE", 0.0)


def wrapped(plain: DataLoader[Any], mode: Any) -> tuple[Any, Any]:
    """Return a loader whose batches are made so, and what to close."""
    if mode != "proxy":
        loader = ContinuousLoader(plain, mode=mode, num_workers=2)
        return loader, loader
    proxy: Any = LoaderProxy(plain, Silent())
    proxy._accel_fetching.workers = workers = PrefetchAcrossEpochs(plain, ProcessEngine(plain, 2))
    return proxy, workers


def seen_of(loader: Any) -> list[Any]:
    seen: list[Any] = []
    try:
        seen += map(indices, loader)
    except LookupError as error:
        seen.append(str(error))
    return seen


class Raises(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)
        raise LookupError("no more of these")


@pytest.mark.sample(3)
@pytest.mark.parametrize("length", [0, 3, 9, 11, 40])
@pytest.mark.parametrize("mode", MODES)
def test_a_samplers_error_comes_after_the_batches_it_has_yielded(mode: Any, length: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(50), 4, sampler=Raises(length))

    wanted = [seen_of(make()) for _ in range(2)]
    loader, owner = wrapped(make(), mode)
    assert [seen_of(loader) for _ in range(2)] == wanted
    assert wanted[0][-1] == "no more of these"
    owner.close()


def test_a_pass_at_its_end_that_is_still_referred_to_leaves_what_was_made_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []
    begin = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: begun.append(loader) or begin(loader))
    loader, workers = wrapped(DataLoader(Numbers(30), 4, shuffle=True), "proxy")
    passes = []
    for _ in range(4):
        passes.append(iter(loader))
        assert len(list(passes[-1])) == 8
    assert len(begun) == 1  # the first epoch, by the plain loader; the others went on with what was made ahead
    workers.close()


def test_a_state_counts_on_when_an_option_is_set_within_an_epoch() -> None:
    def make() -> ContinuousLoader:
        return ContinuousLoader(DataLoader(Numbers(40), 4, shuffle=True), mode="threads", num_workers=2)

    torch.manual_seed(3)
    first = make()
    batches = iter(first)
    for number in range(5):
        next(batches)
        if number == 2:
            first.timeout = 30
    state = first.state_dict()
    left = [indices(batch) for batch in batches]
    second = make()
    second.load_state_dict(state)

    assert state["served"] == 5
    assert [indices(batch) for batch in second] == left
    first.close()
    second.close()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # here is no device
def test_batches_of_workers_are_pinned_where_the_plain_loaders_are(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, workers = wrapped(DataLoader(Numbers(30), 4, pin_memory=True), "proxy")
    pinned: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(proxies, "pin_memory", lambda batch: pinned.append(batch) or batch)
    assert len(list(loader)) == len(pinned) == 8
    workers.close()


@pytest.mark.parametrize("mode", ["inline", "auto"])
def test_a_loader_is_gone_with_its_last_reference(mode: Any) -> None:
    """A dataset may have files open: they are not to wait for the garbage collector."""
    data = Numbers(30)
    reference = weakref.ref(data)
    gc.collect()
    gc.disable()
    try:
        loader = ContinuousLoader(DataLoader(data, 4), mode=mode, num_workers=1)
        first = next(iter(loader))
        loader.close()
        del loader, data
        assert reference() is None, first
    finally:
        gc.enable()


def test_an_interruption_in_a_transform_loses_no_batch() -> None:
    def make() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(Numbers(30), 4, shuffle=True)

    def interrupt(_: Any) -> Any:
        raise KeyboardInterrupt

    wanted = seen_of(make())
    loader, owner = wrapped(make(), "proxy")
    batches, seen = iter(loader), []
    for number in range(8):
        if number == 5:
            loader._accel_fetching.transforms["interrupt"] = interrupt
            with pytest.raises(KeyboardInterrupt):
                next(batches)
            loader._accel_fetching.transforms.clear()
        seen.append(indices(next(batches)))
    assert seen == wanted
    owner.close()
