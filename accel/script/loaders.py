"""The script's DataLoaders: those that it iterates with gradients hand out their batches through a proxy.

Only `DataLoader.__iter__` is replaced (`HandedOutLoaders`): loaders, their classes and their pickles stay as they are.
Of those that follow loaders in one thread only the latest does: a callback in a script under `accel run`, say. A proxy
that nobody but this module follows fetches as the loader itself does.

Left alone are loaders iterated without gradients (for an evaluation), in another thread, or by a class with an
`__iter__` of its own, whose batches are not those that `DataLoader.__iter__` yields.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler.loop.observers import LoopObserver, follow
from accel.profiler.loop.patches import HANDED_OUT_LOADERS

# Loaders whose proxies are kept; a script that makes a loader for each epoch or fold leaves many.
_KEPT = 8


class ScriptLoaders(LoopObserver):
    """Follow the loaders of the script.

    Args:
        thread: the one that runs the script.

    Attributes:
        thread: the same.
        delivered: batches that it was given.
        has_workers: one of the loaders fetches in processes of its own.
        latest: where the last of them came from.
        on_new: called with each proxy that is made.
        on_request: called before a batch is asked for in that thread.
        on_later: called when another one begins to follow the loaders of that thread, before it does.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.delivered = 0
        self.has_workers = False
        self.latest: LoaderProxy | None = None
        self.on_new: Callable[[LoaderProxy], None] = lambda proxy: None
        self.on_request: Callable[[], None] = lambda: None
        self.on_later: Callable[[], None] = lambda: None
        self._proxies: OrderedDict[int, LoaderProxy] = OrderedDict()

    @property
    def proxies(self) -> list[LoaderProxy]:
        """The proxies, the one that was iterated last at the end."""
        return list(self._proxies.values())

    def start(self) -> None:
        """Follow loaders from now on, in place of others that follow those of this thread."""
        if (earlier := HANDED_OUT_LOADERS.latest(self.thread)) is not None:
            earlier.on_later()
        HANDED_OUT_LOADERS.add(self)

    def stop(self) -> None:
        """Leave loaders alone from now on; `DataLoader.__iter__` is restored once nobody follows any."""
        HANDED_OUT_LOADERS.remove(self)

    @property
    def is_latest(self) -> bool:
        """Whether no other follower of this thread stands before this one."""
        return HANDED_OUT_LOADERS.latest(self.thread) is self

    def iterate(self, loader: Any, caller: FrameType) -> Any:
        """Return what the script is to iterate; None if the loader is left alone."""
        if not self._follows(loader, caller):
            return None
        return HandedOut(iter(self._proxy_of(loader)), self.thread, lambda: self.on_request())

    def _follows(self, loader: Any, caller: FrameType) -> bool:
        if _is_within_ours(caller):
            return False
        if type(loader).__iter__ is not DataLoader.__iter__:
            return False
        return id(loader) in self._proxies or torch.is_grad_enabled()

    def _proxy_of(self, loader: Any) -> LoaderProxy:
        proxy = self._proxies.get(id(loader))
        if proxy is None:
            proxy = self._proxies[id(loader)] = LoaderProxy(loader)
            follow(proxy, self)
            self.on_new(proxy)
            self._let_go()
        self._proxies.move_to_end(id(loader))
        return proxy

    def _let_go(self) -> None:
        """Forget loaders that the script holds no more, whose data would stay in memory, and those beyond the limit."""
        for key, proxy in list(self._proxies.items())[:-1]:
            # One reference is the proxy's, one the argument's.
            is_free = sys.getrefcount(proxy._accel_loader) <= 2
            if is_free or len(self._proxies) > _KEPT:
                del self._proxies[key]
            if is_free:
                proxy._accel_listener = None  # which holds the proxy: they would wait for the garbage collector

    # -- what an observer of a loader is told --------------------------------------------------------------------------

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Note whose processes are there; a loader that is asked for an iterator need not be trained on."""
        self.has_workers = self.has_workers or bool(getattr(proxy._accel_loader, "num_workers", 0))

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Note where the batch comes from."""
        self.delivered += 1
        self.latest = proxy


def _is_within_ours(caller: FrameType) -> bool:
    """Return whether a proxy, or a loader of ours, asks for torch's own iterator: itself, or by a wrapper in between.

    A library of the script may have replaced `DataLoader.__iter__` once more, so the caller alone does not tell.
    """
    frame: FrameType | None = caller
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("accel.dataio."):
            return True
        frame = frame.f_back
    return False


class HandedOut:
    """The iterator that the script gets. What another thread asks for says nothing of where the training is.

    Args:
        batches: a proxy's iterator.
        thread: the one that trains.
        asked: called before a batch is asked for in that thread.
    """

    def __init__(self, batches: Any, thread: int, asked: Callable[[], None]) -> None:
        self._batches, self._thread, self._asked = batches, thread, asked

    def __iter__(self) -> HandedOut:
        return self

    def __next__(self) -> Any:
        if get_ident() != self._thread:
            return self._batches.unheard()
        self._asked()
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches.rest, name)
