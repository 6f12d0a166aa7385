"""Loaders of all kinds that a script trains on are followed, and let go of with it."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel import entry
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
    session = entry._optimized[model].session
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
    assert entry._optimized[model].session.run.loader is loader


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
