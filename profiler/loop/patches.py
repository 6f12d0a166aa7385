"""The patches of torch's own entry points, which report where an unmodified loop is.

    DataLoader.__iter__, its iterators' __init__      a pass over a loader begins
    their __next__                                    a batch is asked for and handed over
    torch.autograd.backward, torch.autograd.grad      the backward pass
    optimizer step hooks (torch's global ones)        the update
    functions of torch.distributed                    collectives the loop calls itself
    Tensor.to, Tensor.cuda (with a GPU only)          copies to the device
    gc.callbacks                                      the garbage collector

`Probes` puts all of them in place for a recorder, `HandedOutLoaders` the first for who gives the script other batches.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, get_ident
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accel.profiler.loop import backward
from accel.profiler.loop.update_hooks import UPDATES

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
)

Function = Callable[..., Any]
Copying = Callable[[], "Callable[[], None] | None"]
Loaders = Sequence[tuple[type, type]]


class Patches:
    """Attributes replaced for a while.

    A script may replace the same attribute meanwhile (`mock.patch.object(torch.Tensor, "to")`). What it has put there
    is its own and stays; it may put the replacement from here back later, which then must do nothing but pass on: while
    `on` is False.
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


def call_method(original: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a method of torch.Tensor that has been replaced, for a tensor of any class.

    A subclass is told which method of torch's is called, and compares that with those it knows: torchvision's boxes
    become plain tensors, and a lazy parameter raises, if they are told of the replacement, which torch would find.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(original, (tensor,), tensor, *args, **kwargs)
    return original(tensor, *args, **kwargs)


def replace_copies(patches: Patches, copying: Copying, thread: int) -> None:
    """Call `copying` before each copy of a thread to a GPU, and what it returns, unless that is None, after it."""
    for name in ("to", "cuda"):
        patches.replace(Tensor, name, functools.partial(_marked_copy, copying, thread))


def _marked_copy(copying: Copying, thread: int, original: Function) -> Function:
    is_cuda = getattr(original, "__name__", "") == "cuda"

    @functools.wraps(original)
    def choosing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_copy = get_ident() == thread and not tensor.is_cuda and (is_cuda or _is_gpu(*args[:1], **kwargs))
        copied = copying() if is_copy else None
        try:
            return call_method(original, tensor, *args, **kwargs)
        finally:
            if copied is not None:
                copied()

    return choosing


def _is_gpu(target: Any = None, /, *, device: Any = None, other: Any = None, **more: Any) -> bool:
    """Return whether `Tensor.to` with these arguments copies to a GPU; a number is the index of one."""
    target = next((given for given in (target, device, other) if given is not None), None)
    if isinstance(target, Tensor):
        return target.is_cuda
    if isinstance(target, torch.device):
        return target.type == "cuda"
    return isinstance(target, int) or (isinstance(target, str) and target.startswith("cuda"))


READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__index__")
"""The methods of a tensor that read values, for which a device is waited for."""


def replace_reads(patches: Patches, reading: Callable[[str, Function], Function]) -> None:
    """Replace the methods of a tensor that read values by what `reading` makes of their name and of themselves."""
    for name in READS:
        patches.replace(Tensor, name, functools.partial(reading, name))


class LoaderSource(Protocol):
    """Gives a script what it iterates in place of a loader's own iterator."""

    thread: int

    def iterate(self, loader: Any, caller: FrameType) -> Any:
        """Return what the script is to iterate; None if the loader is left alone."""


class HandedOutLoaders:
    """All that hand out batches in place of `DataLoader.__iter__`, which may come and end in any order.

    It is replaced once for all. Were each of them to replace it, one would take the loader that another one iterates
    for the script's, and so on without end. Of those of one thread only the latest is asked.
    """

    def __init__(self) -> None:
        self._present: tuple[LoaderSource, ...] = ()  # a new one at each change: other threads read it meanwhile
        self._patches = Patches()
        self._changing = Lock()

    def add(self, source: LoaderSource) -> None:
        """Ask this one from now on."""
        with self._changing:
            if not self._present:
                self._patches = Patches()
                self._patches.replace(DataLoader, "__iter__", self._handing_out)
            self._present = (*self._present, source)

    def remove(self, source: LoaderSource) -> None:
        """Ask this one no more; `DataLoader.__iter__` is restored once nobody is left."""
        with self._changing:
            self._present = tuple(each for each in self._present if each is not source)
            if not self._present:
                self._patches.remove()

    def latest(self, thread: int) -> Any:
        """Return the one of a thread that was added last, None if it has none."""
        return next((each for each in reversed(self._present) if each.thread == thread), None)

    def _handing_out(self, original: Function) -> Function:
        patches = self._patches  # of this time: what the script has wrapped stays, and only passes on later

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            source = self.latest(get_ident()) if patches.on else None
            handed_out = None if source is None else source.iterate(loader, sys._getframe(1))
            return original(loader) if handed_out is None else handed_out

        return iterate


HANDED_OUT_LOADERS = HandedOutLoaders()
"""Those of this process."""


class Collector:
    """Add up the garbage collector's time, by a callback that has no Python frame.

    A signal that arrives while the collector runs is handled at the next instruction of Python code. In a callback
    written in Python that instruction is the callback's own, and what the handler raises there (Ctrl-C, an alarm) is
    printed as "Exception ignored" and lost. So the callback consists of C functions: it asks an object for its
    attribute `start` or `stop`, whose value is computed by advancing an iterator: it adds up the moments, those of a
    start negative.
    """

    def __init__(self) -> None:
        self._sum = deque([0.0], maxlen=1)
        # Of floats: to multiply integers, Python looks for signals.
        moments = map(operator.mul, iter(time.perf_counter, None), itertools.cycle((-1.0, 1.0)))
        # `next` gets the object as its second argument, which it only returns when an iterator is exhausted.
        mark = property(functools.partial(next, map(self._sum.append, itertools.accumulate(moments))))
        self._callback: Any = functools.partial(getattr, type("Phases", (), {"start": mark, "stop": mark})())
        self._seconds = 0.0

    def install(self) -> None:
        """Start counting."""
        gc.callbacks.append(self._callback)

    def remove(self) -> None:
        """Stop counting."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    @property
    def seconds(self) -> float:
        """Seconds it has run so far; a collection in progress in another thread counts once it is over."""
        self._seconds = max(self._seconds, self._sum[-1])  # while one is in progress the sum is negative
        return self._seconds


class Probes:
    """All marks of an unmodified loop. Calls from other threads than the training thread pass through unmarked.

    Args:
        marker: makes the marked functions, as `Recorder` does.
        loaders: loaders that iterate in their own way, each with the class of its iterators.
    """

    def __init__(self, marker: Any, loaders: Loaders = ()) -> None:
        self._marker, self._loaders = marker, ((DataLoader, _BaseDataLoaderIter), *loaders)
        self._patches = Patches()
        self._forget_updates: Callable[[], None] = lambda: None
        self.collector = Collector()

    def install(self) -> None:
        """Put the marks in place."""
        marker, replace = self._marker, self._patches.replace
        for loader, iterator in self._loaders:
            replace(loader, "__iter__", marker.loaders.iterating)
            replace(iterator, "__next__", marker.loaders.fetching)
        replace(_BaseDataLoaderIter, "__init__", marker.loaders.making)
        backward.replace_passes(self._patches, marker.differentiating)
        self._forget_updates = UPDATES.add(*marker.updating())
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                if hasattr(torch.distributed, name):
                    replace(torch.distributed, name, marker.communicating)
        if has_gpu():
            replace_copies(self._patches, marker.copying, marker.thread)
        self.collector.install()

    def remove(self) -> None:
        """Restore everything."""
        self._patches.remove()
        self._forget_updates()
        self.collector.remove()


def has_gpu() -> bool:
    """Return whether there is a GPU, without starting CUDA.

    From its start on, a process can't fork ranks that use CUDA, and CUDA_VISIBLE_DEVICES can no longer be set:
    `torch.cuda.is_available` would start it, while this asks the driver's management library.
    """
    return torch.cuda.device_count() > 0
