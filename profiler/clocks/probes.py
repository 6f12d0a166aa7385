"""Marks on torch's own entry points, which report where an unmodified loop is.

    DataLoader.__iter__, its iterators' __init__      a pass over a loader begins
    their __next__                                    a batch is asked for and handed over
    torch.autograd.backward, torch.autograd.grad      the backward pass
    optimizer step hooks (torch's global ones)        the update
    functions of torch.distributed                    collectives the loop calls itself
    Tensor.to, Tensor.cuda (with a GPU only)          copies to the device
    gc.callbacks                                      the garbage collector

`remove` restores everything. Calls from other threads than the training thread pass through unmarked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accel.profiler.clocks.collector import Collector
from accel.profiler.clocks.device_events import has_gpu

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


Function = Callable[..., Any]
Loaders = Sequence[tuple[type, type]]


class Marker(Protocol):
    """What makes the marked functions that take the place of torch's own."""

    thread: int

    def iterating(self, original: Function) -> Function:
        """Return `DataLoader.__iter__`, marked."""

    def making(self, original: Function) -> Function:
        """Return `__init__` of torch's own iterators, marked."""

    def fetching(self, original: Function) -> Function:
        """Return `__next__` of a loader's iterator, marked."""

    def differentiating(self, original: Function) -> Function:
        """Return a function that runs a backward pass, marked."""

    def communicating(self, original: Function) -> Function:
        """Return a collective, marked."""

    def copying(self, original: Function) -> Function:
        """Return a method that may copy a tensor to the device, marked."""

    def updating(self) -> tuple[Function, Function]:
        """Return the hooks before and after an optimizer's step."""


class Patches:
    """Attributes replaced for a while.

    A script may replace the same attribute meanwhile (`mock.patch.object(torch.Tensor, "to")`). What it has put there
    is its own and stays; it may put the replacement from here back later, which then must do nothing but pass on.

    Attributes:
        on: whether they are replaced; replacements ask for it where the script goes on after `remove`.
    """

    def __init__(self) -> None:
        self.on = False
        self._saved: list[tuple[Any, str, Any, Any, bool]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what `make` returns for its value."""
        own = name in vars(owner)
        original = vars(owner)[name] if own else getattr(owner, name)
        made = make(original)
        self._saved.append((owner, name, original, made, own))
        setattr(owner, name, made)
        self.on = True

    def remove(self) -> None:
        """Restore all attributes that still are as they were replaced, the last replaced first."""
        self.on = False
        while self._saved:
            owner, name, original, made, own = self._saved.pop()
            if vars(owner).get(name) is not made:
                continue
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


class BackwardProbe:
    """Calls back when a backward pass begins and ends.

    Args:
        begins: called before.
        ended: called after, also if it raised.
        counts: returns whether a backward pass that begins is one to call back for.
    """

    def __init__(
        self, begins: Callable[[], None], ended: Callable[[], None], counts: Callable[[], bool] = lambda: True
    ) -> None:
        self._begins, self._ended, self._counts = begins, ended, counts
        self._inside = False
        self._patches = Patches()

    def install(self) -> None:
        """Start calling back."""
        for name in ("backward", "grad"):
            self._patches.replace(torch.autograd, name, self._marked)

    def remove(self) -> None:
        """Stop calling back."""
        self._patches.remove()

    def _marked(self, original: Function) -> Function:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            # A backward pass within one (checkpointing) belongs to it.
            if self._inside or not self._patches.on or not self._counts():
                return original(*args, **kwargs)
            self._inside = True
            self._begins()
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False
                self._ended()

        return marked


class Probes:
    """All marks of an unmodified loop.

    Args:
        marker: makes the marked functions.
        loaders: loaders that iterate in their own way, each with the class of its iterators.

    Attributes:
        collector: how long the garbage collector ran.
    """

    def __init__(self, marker: Marker, loaders: Loaders = ()) -> None:
        self._marker, self._loaders = marker, ((DataLoader, _BaseDataLoaderIter), *loaders)
        self._patches = Patches()
        self._hooks: list[Any] = []
        self.collector = Collector()

    def install(self) -> None:
        """Put the marks in place."""
        marker, replace = self._marker, self._patches.replace
        for loader, iterator in self._loaders:
            replace(loader, "__iter__", marker.iterating)
            replace(iterator, "__next__", marker.fetching)
        replace(_BaseDataLoaderIter, "__init__", marker.making)
        for name in ("backward", "grad"):
            replace(torch.autograd, name, marker.differentiating)
        before, after = marker.updating()
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                if hasattr(torch.distributed, name):
                    replace(torch.distributed, name, marker.communicating)
        if has_gpu():
            for name in ("to", "cuda"):
                replace(torch.Tensor, name, marker.copying)
        self.collector.install()

    def remove(self) -> None:
        """Restore everything."""
        self._patches.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.collector.remove()
