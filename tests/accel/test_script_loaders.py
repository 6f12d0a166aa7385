"""Loaders of all kinds that a script trains on are followed, and let go of with it."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel import entry
from accel.script.loaders import ScriptLoaders
from accel.script.training import ScriptTraining
from tests.accel.loops import Samples, make, make_loader
from tests.accel.script_followed import epochs, step, steps_of, training

__all__ = ["training"]


def test_loops_that_keep_the_batches_of_a_loader_count_as_their_own(training: ScriptTraining) -> None:
    model, loader, optimizer = make()
    batches = list(loader)
    for x, target in batches * 2:
        step(model, optimizer, x, target)
    assert steps_of(model) >= 20


def test_a_loader_that_is_made_anew_for_each_epoch_goes_on(training: ScriptTraining) -> None:
    model, _, optimizer = make()
    for _ in range(20):
        epochs(model, make_loader(), optimizer, 1)
    assert steps_of(model) >= 20 * 13 - 24
    assert len(training.loaders.proxies) <= 8


def test_loaders_that_the_script_has_let_go_of_are_freed(training: ScriptTraining) -> None:
    """A loop over parts of the data, each with a loader of its own: eight of them stayed in memory."""
    model, loader, optimizer = make()
    epochs(model, loader, optimizer, 1)
    parts = weakref.WeakSet[Any]()
    for _ in range(6):
        part = Samples()
        parts.add(part)
        epochs(model, make_loader(part), optimizer, 1)
        del part
        assert len(parts) <= 2  # the one just trained on, and what its iterator holds
    assert steps_of(model) >= 6 * 13
    checked = [make_loader() for _ in range(3)]
    for _ in range(2):
        for each in checked:
            epochs(model, each, optimizer, 1)
    assert {id(proxy._accel_loader) for proxy in training.loaders.proxies} >= set(map(id, checked))


def test_a_loader_that_is_validated_on_with_gradients_is_not_taken_for_the_one_trained_on(
    training: ScriptTraining,
) -> None:
    model, loader, optimizer = make()
    checked = make_loader(Samples(24))
    for _ in range(4):
        epochs(model, loader, optimizer, 1)
        for x, _ in checked:
            model(x)
    session = entry.MODELS[model].session
    assert session.run.loader is loader
    assert session.steps >= 4 * 13 - 6


class Twice(DataLoader[Any]):
    """Yields each batch twice, so its batches are not those of `DataLoader.__iter__`."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch
            yield batch


def test_a_loader_with_an_iterator_of_its_own_is_left_alone_and_its_model_is_not(training: ScriptTraining) -> None:
    model, _, optimizer = make()
    epochs(model, Twice(Samples(), batch_size=8), optimizer, 2)
    assert training.loaders.proxies == []
    assert steps_of(model) >= 48


class Shifted(DataLoader[Any]):
    """A subclass that iterates as torch does, like those of PyTorch Geometric."""


def test_a_loader_of_a_subclass_is_followed(training: ScriptTraining) -> None:
    model, _, optimizer = make()
    loader = Shifted(Samples(), batch_size=8)
    epochs(model, loader, optimizer, 2)
    assert entry.MODELS[model].session.run.loader is loader


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        samples = Samples()
        return (samples[index] for index in range(len(samples)))


def test_a_loader_without_a_length_is_followed(training: ScriptTraining) -> None:
    model, _, optimizer = make()
    epochs(model, DataLoader(Stream(), batch_size=8), optimizer, 2)
    assert steps_of(model) >= 22
    with pytest.raises(TypeError, match="has no len"):
        len(iter(DataLoader(Stream())))


def test_what_the_script_gets_from_iter_answers_as_torch_s_iterator(training: ScriptTraining) -> None:
    loader = make_loader()
    iterator = iter(loader)
    assert len(iterator) == 13
    assert iterator._num_workers == 0
    assert iter(iterator) is iterator
    assert not hasattr(iterator, "__array__")
    assert pickle.loads(pickle.dumps(loader)).batch_size == copy.copy(loader).batch_size == 8


# -- several that follow loaders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", list(itertools.permutations(range(3))))
def test_of_several_followers_the_latest_is_told_in_whatever_order_they_end(ending: tuple[int, ...]) -> None:
    """A callback under `accel run`, say: each took what the other asked for for a loop's request."""
    plain = DataLoader.__iter__
    followers = [ScriptLoaders(threading.get_ident()) for _ in range(3)]
    for follower in followers:
        follower.start()
    present = list(followers)
    for number in (None, *ending):
        if number is not None:
            followers[number].stop()
            present.remove(followers[number])
        before = [follower.delivered for follower in followers]
        assert len(list(make_loader())) == 13
        told = [follower for follower, count in zip(followers, before, strict=True) if follower.delivered > count]
        assert told == present[-1:]
        assert [follower.is_latest for follower in followers] == [follower in told for follower in followers]
    assert DataLoader.__iter__ is plain


def test_followers_in_two_threads_each_get_their_own_loader() -> None:
    counts: dict[str, int] = {}
    together = threading.Barrier(2, timeout=20)

    def follow(name: str, batches: int) -> None:
        follower = ScriptLoaders(threading.get_ident())
        follower.start()
        together.wait()
        list(make_loader(Samples(8 * batches)))
        together.wait()
        follower.stop()
        counts[name] = follower.delivered

    plain = DataLoader.__iter__
    threads = [threading.Thread(target=follow, args=job) for job in (("one", 3), ("other", 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {"one": 3, "other": 5}
    assert DataLoader.__iter__ is plain


def test_a_library_may_wrap_the_iterator_of_loaders_meanwhile(
    training: ScriptTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame stood between a proxy and torch's own iterator, which was taken for the script's."""
    replaced = DataLoader.__iter__
    asked: list[int] = []
    model, loader, optimizer = make()
    with monkeypatch.context() as library:
        library.setattr(DataLoader, "__iter__", lambda loader: asked.append(1) or replaced(loader))
        epochs(model, loader, optimizer, 2)
    assert asked and entry.MODELS[model].session.run.loader is loader


def test_what_a_library_has_wrapped_does_nothing_once_nobody_follows_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DataLoader.__iter__
    first, second = (ScriptLoaders(threading.get_ident()) for _ in range(2))
    first.start()
    replaced = DataLoader.__iter__
    with monkeypatch.context() as library:
        library.setattr(DataLoader, "__iter__", lambda loader: replaced(loader))
        first.stop()
        assert len(list(make_loader())) == 13 and first.delivered == 0
        second.start()
        assert type(replaced(make_loader())) is type(plain(make_loader()))
        assert len(list(make_loader())) == second.delivered == 13
        second.stop()
    DataLoader.__iter__ = plain  # type: ignore[method-assign]
