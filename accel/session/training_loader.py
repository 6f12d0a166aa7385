"""The loader that the loop trains on: which one it is now, and what was seen of its fetching."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.fetching.fetch import fetch_of
from accel.dataio.passes.movable import movable
from accel.dataio.passes.proxy import Fetching, LoaderProxy
from accel.profiler.loop.observers import observers_of
from accel.run.context import Run

# Steps without a batch of the loader that strategies act on after which the loop is taken to have gone on to another.
_GONE_AFTER = 32


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
        """Count a step, and return another loader that the loop has gone on to, or None.

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
        watched = getattr(loader, "dataset", None) if movable(loader) else fetch_of(loader)
        return FetchWatch(watched, aside=self._aside)


def free_fetching(proxy: LoaderProxy) -> Fetching:
    """Return the fetching of `proxy` if nobody changes it yet, else one of its own that has no effect."""
    taken = any(observer.fetching is proxy._accel_fetching for observer in observers_of(proxy))
    return Fetching() if taken else proxy._accel_fetching
