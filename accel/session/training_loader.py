"""What the loop uses: the loader that it trains on, what was seen of its fetching, and whether it calls the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes.movable import movable
from accel.dataio.passes.proxy import Fetching, LoaderProxy
from accel.profiler.loop.observers import observers_of
from accel.run.context import Run

if TYPE_CHECKING:
    from accel.dataio.dataset.fetch_watch import FetchWatch
    from accel.session.switchboard import Switchboard

# Steps without a batch of the loader that strategies act on after which the loop is taken to have gone on to another.
_GONE_AFTER = 32
# After so many updates without a batch, the loop is assumed to iterate another loader.
_UPDATES_WITHOUT_BATCH = 3
# After so many requests of another thread than the one that trains, the loop is taken to fetch there.
_REQUESTS_ELSEWHERE = 8


class TrainingLoader:
    """Follow the loop from loader to loader.

    Args:
        run: its loader and fetching are those that strategies act on.
        aside: leaves what is done within it out of the step.
    """

    def __init__(self, run: Run, aside: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._run, self._aside = run, aside
        self._met = {id(run.loader)}
        self._steps_without = 0
        self._fetch_watch = self._watch_of(run.loader)
        self.delivered: LoaderProxy | None = None
        """Where the last batch came from."""
        self.source: LoaderProxy | None = None
        """Where the last batch before an update came from: one after it may be one to validate on."""
        self._is_iterated = False
        """The loop has turned to the loader that strategies act on since the last step, for a batch to train on."""
        self.is_settled = False
        """The loop trains on the loader that strategies act on, and has turned to no other since: none succeeds it."""
        self.moves = 0
        """How often the loop has gone on to another loader."""

    @property
    def finding(self) -> str:
        """Why fetching can't be moved elsewhere; '' if nothing was seen."""
        return self._run.observed.fetch_finding or self._fetch_watch.finding

    def watch(self, wanted: bool) -> None:
        """Watch the next batches being fetched, or no more; what worker processes do can't be seen here."""
        is_seen = not getattr(self._run.loader, "num_workers", 0)
        self._run.fetching.fetch_watch = self._fetch_watch if wanted and is_seen else None

    def turns_to(self, proxy: LoaderProxy) -> None:
        """Note that a batch has come from another loader than the one before."""
        self.delivered, self.is_settled = proxy, False
        if proxy._accel_loader is self._run.loader and torch.is_grad_enabled():
            self._is_iterated = True

    def successor(self) -> LoaderProxy | None:
        """Return another loader that the loop has gone on to, or None.

        A loader that is made anew for each epoch or fold is met here; one whose batches are only validated on, or serve
        every other step, is not.
        """
        source = self.source
        if source is None and not self._run.optimizers:  # without one there is no update that a batch came before
            source = self.delivered
        if source is None:
            return None
        loader = source._accel_loader
        if loader is self._run.loader or self._is_iterated:  # two loaders may serve each step, one after the other
            self._steps_without, self._is_iterated = 0, False
            self.is_settled = loader is self._run.loader and source is self.delivered
            return None
        self._steps_without += 1
        if self._steps_without < _GONE_AFTER or id(loader) in self._met:
            return None
        return source

    def follow(self, switchboard: Switchboard) -> None:
        """Count a step, and let strategies act on another loader once the loop iterates that."""
        if (successor := self.successor()) is not None:
            switchboard.drop_fetching("the loop went on to another loader", for_good=True)
            self.move(successor)

    def move(self, successor: LoaderProxy) -> None:
        """Let strategies act on this loader from now on."""
        self.watch(False)
        loader = successor._accel_loader
        self._met.add(id(loader))
        self.moves, self.is_settled = self.moves + 1, False
        self._run.loader, self._run.fetching = loader, free_fetching(successor)
        self._run.observed.fetch_finding = ""
        self._fetch_watch = self._watch_of(loader)

    def _watch_of(self, loader: Any) -> FetchWatch:
        """Watch all that makes the batches, the collate function too; where they can't be moved, the dataset if any."""
        from accel.dataio.dataset.fetch_watch import (
            FetchWatch,  # what walks through a dataset: for a loader that there is
        )

        watched = getattr(loader, "dataset", None) if movable(loader) else fetch_of(loader)
        return FetchWatch(watched, aside=self._aside)


def free_fetching(proxy: LoaderProxy) -> Fetching:
    """Return the fetching of `proxy` if nobody changes it yet, else one of its own that has no effect."""
    taken = any(observer.fetching is proxy._accel_fetching for observer in observers_of(proxy))
    return Fetching() if taken else proxy._accel_fetching


class Usage:
    """Record what the loop uses."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._model = type(run.model).__name__
        self.iterated = False
        self.called = False
        self._updates = self._requests_elsewhere = 0

    def updated_without_batch(self) -> None:
        """The model was updated, and the loader has not been iterated."""
        self._updates += 1
        if self._updates == _UPDATES_WITHOUT_BATCH:
            self._say(
                f"{self._model} was updated {self._updates} times without a batch from the loader that "
                "accel.optimize returned; iterate that one, or nothing is made faster"
            )

    def requested_elsewhere(self) -> None:
        """A batch is requested by another thread than the one that trained last: perhaps it trains from now on."""
        self._requests_elsewhere += 1
        if self._requests_elsewhere == _REQUESTS_ELSEWHERE:
            self._say(
                f"the batches of {self._model} are taken by another thread than the one that trains it, so that its "
                "steps can't be told apart and nothing more is tried; iterate the loader in the loop itself"
            )

    def tell_uncalled(self) -> None:
        """Say once, after the first steps, what to pass in place of a model that the loop has not called so far."""
        observed = self._run.observed
        if self.called:
            observed.uncalled = ""
        elif not observed.uncalled:
            observed.uncalled = _advice(self._run.model)
            self._say(f"{observed.uncalled}. Until then only its loader and optimizer are considered")


def _advice(model: nn.Module) -> str:
    parts = {name: len(list(part.parameters())) for name, part in model.named_children()}
    such = f", such as model.{max(parts, key=lambda name: parts[name])}" if parts else ""
    return (
        f"the training steps never call {type(model).__name__} itself, or only within a function that is compiled; "
        f"pass the module that they call{such}"
    )
