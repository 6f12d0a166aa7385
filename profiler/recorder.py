"""Turns what the probes tell into steps: which batch belongs to training, when a step ends, where its time went.

An ordinary step runs only through the marked functions made here, which write to the clock's tape: 5 µs a step in all,
measured on a step of 60 µs. What is rare (a new iterator, a new optimizer, an evaluation) takes the slow way.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch
from torch.optim import Optimizer

from accel.profiler import facts
from accel.profiler.evidence import LoaderFacts
from accel.profiler.phases import Measurement, StepClock
from accel.profiler.probes import Function, Probes
from accel.profiler.roots import Roots

_KEPT_STEPS = 20_000
_LEARNING_STEPS = 12
"""Steps in which a module that is never called is replaced by its children."""
_COUNT_ALL, _COUNT_EVERY = 64, 16
"""Batches are counted in the first steps, then in every sixteenth: the rest are alike."""


class Recorder:
    """Record an unmodified loop's steps.

    Args:
        clock: seconds, monotonic.

    Attributes:
        on_step: called between two steps with each step ended since the last call; its time belongs to no step.
        every: steps from call to call.
        on_update: called within each update, for as long as it is set.
        ahead: True fetches the batches of the open step while its clock stands.
        step_s: seconds in steps, the first left out.
    """

    def __init__(self, clock: StepClock | None = None) -> None:
        self.thread = get_ident()
        self.clock = clock or StepClock()
        self.clock.backward_is_seen = True
        self.on_step: Callable[[Measurement], None] = lambda measured: None
        self.every = 1
        self.on_update: Callable[[Optimizer], None] | None = None
        self.ahead = False
        self.steps = self.fetched = self.backwards = 0
        self.step_s = 0.0
        self.first_boundary = self.last_boundary = 0.0
        self.gc_s = self.collate_s = 0.0
        self.optimizers: list[Optimizer] = []
        self.loader: Any = None
        """The loader of the last training step."""
        self.iterator: Any = None
        self.probes = Probes(self)
        self._write, self._now = self.clock.write, self.clock.now
        self._training: set[int] = set()
        self._recent: list[int] = []
        self._stepped = False
        self._new = False
        self._counting = True
        self._waiting = 0
        self._optimizer: Optimizer | None = None
        self._update = self._inside = self._inside_backward = False
        self.roots = Roots(self.calling, self.call_hooks)

    def start(self) -> None:
        """Begin to record."""
        self.probes.install()

    def stop(self) -> None:
        """Leave torch and the models as they were."""
        self.probes.remove()
        self.roots.release()

    # -- batches (probes.Ear) ------------------------------------------------------------------------------------------

    def iterating(self, original: Function) -> Function:
        """Mark the making of an iterator; for the training loader this is the beginning of an epoch."""

        @functools.wraps(original)
        def marked(loader: Any) -> Any:
            return original(loader) if get_ident() != self.thread else self._iterate(loader, original)

        return marked

    def _iterate(self, loader: Any, original: Function) -> Any:
        training = self._is_training(loader)
        self.clock.enter("data" if training else "evaluation")
        if training and self._stepped:
            self._boundary()
        try:
            iterator = original(loader)
        finally:
            self.clock.enter("host" if training else "evaluation")
        iterator._accel_loader = loader
        if training and iterator is self.iterator:  # persistent workers come with the same iterator
            self.iterator = None
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is not None and getattr(fetcher, "collate_fn", None) is not None:
            fetcher.collate_fn = self._timed(fetcher.collate_fn)
        return iterator

    def fetching(self, original: Function) -> Function:
        """Mark the fetching of a batch."""
        write, now, thread = self.clock.write, self.clock.now, self.thread

        @functools.wraps(original)
        def marked(iterator: Any) -> Any:
            if get_ident() != thread:
                return original(iterator)
            if iterator is not self.iterator or self.ahead or self._counting:
                return self._fetch(iterator, original)
            write(("data", now()))
            if self._stepped:
                self._boundary()
            try:
                batch = original(iterator)
            finally:
                write(("host", now()))
            return batch

        return marked

    def _fetch(self, iterator: Any, original: Function) -> Any:
        """Fetch a batch the slow way."""
        clock = self.clock
        if iterator is not self.iterator and not self._takes(iterator):
            clock.enter("evaluation")
            batch = original(iterator)
            if torch.is_grad_enabled():  # it may be a second training loader
                self._recent.append(id(iterator._accel_loader))
            return batch
        clock.enter("data")
        if self._stepped:
            self._boundary()
        if self._new:
            self._new = False
            clock.mark_first()
        collate_s = self.collate_s
        try:
            batch = original(iterator)
        finally:
            if self.ahead:
                clock.skip()
                self.collate_s = collate_s
            clock.enter("host")
        clock.count(_samples(batch))
        self.fetched += 1
        return batch

    def _takes(self, iterator: Any) -> bool:
        """Tell whether an iterator is a training loader's; it is the loop's iterator then."""
        loader = getattr(iterator, "_accel_loader", None)
        if loader is None or not self._is_training(loader):
            return False
        self._recent.append(id(loader))
        self.loader, self.iterator, self._new = loader, iterator, True
        return True

    def _is_training(self, loader: Any) -> bool:
        # Before the first backward pass nothing is known; what is fetched without gradients is for an evaluation.
        return id(loader) in self._training if self._training else torch.is_grad_enabled()

    def _timed(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(samples: Any) -> Any:
            began = self.clock.now()
            try:
                return collate(samples)
            finally:
                self.collate_s += self.clock.now() - began

        return timed

    # -- the model -----------------------------------------------------------------------------------------------------

    def calling(self, target: Function, calls: list[int]) -> Function:
        """Mark an outermost call of a model, and count it in `calls[0]`."""
        write, now, training, thread = self.clock.write, self.clock.now, torch.is_grad_enabled, self.thread

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self._inside or get_ident() != thread:
                return target(*args, **kwargs)
            self._inside = True
            calls[0] += 1
            if self._stepped or not training():
                self._call()
            else:
                write(("forward", now()))
            try:
                return target(*args, **kwargs)
            finally:
                self._inside = False
                if training():
                    write(("loss", now()))

        return marked

    def call_hooks(self, calls: list[int]) -> tuple[Function, Function]:
        """Return forward hooks that mark a call as `calling` does, for a module whose slot is taken."""
        marking = [False]

        def before(module: Any, args: Any) -> None:
            if self._inside or get_ident() != self.thread:
                return
            self._inside = marking[0] = True
            calls[0] += 1
            if self._stepped or not torch.is_grad_enabled():
                self._call()
            else:
                self.clock.enter("forward")

        def after(module: Any, args: Any, output: Any) -> None:
            if marking[0] and get_ident() == self.thread:
                self._inside = marking[0] = False
                if torch.is_grad_enabled():
                    self.clock.enter("loss")

        return before, after

    def _call(self) -> None:
        if not torch.is_grad_enabled():
            self._recent.clear()  # what was fetched for this is no training batch
            self.clock.enter("evaluation")
            return
        if not self._training:
            # No loader tells where a step begins: it ends where the next one's first forward pass does.
            self.clock.enter("outside")
            self._boundary()
        self.clock.enter("forward")

    def differentiating(self, original: Function) -> Function:
        """Mark a backward pass; the loaders that were asked since the last one feed the training."""
        write, now, thread = self.clock.write, self.clock.now, self.thread

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            # A backward pass within one (checkpointing) belongs to it.
            if self._inside_backward or get_ident() != thread:
                return original(*args, **kwargs)
            if self._recent:
                self._training.update(self._recent)
                self._recent.clear()
            self._inside_backward = True
            self.backwards += 1
            write(("backward", now()))
            try:
                return original(*args, **kwargs)
            finally:
                self._inside_backward = False
                write(("optimizer" if self._update else "host", now()))

        return marked

    # -- the update ----------------------------------------------------------------------------------------------------

    def update_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Mark it."""
        if get_ident() == self.thread:
            self._update = True
            self._write(("optimizer", self._now()))

    def update_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Mark it, and learn about an optimizer that is new."""
        if get_ident() != self.thread:
            return
        self._update = False
        self._stepped = True
        self._write(("outside", self._now()))
        if self.on_update is not None or optimizer is not self._optimizer or self.steps < _LEARNING_STEPS:
            self._learn(optimizer)

    def _learn(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        if self.on_update is not None:
            self.on_update(optimizer)
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.roots.learn(optimizer, self.steps)
        elif self.steps < _LEARNING_STEPS:
            self.roots.descend(self.steps)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def communicating(self, original: Function) -> Function:
        """Mark a collective that the loop calls itself."""
        return self._within("communication", original)

    def copying(self, original: Function) -> Function:
        """Mark a copy to the device."""
        marked = self._within("copy", original)

        @functools.wraps(original)
        def choosing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(tensor, *args, **kwargs) if tensor.is_cuda else marked(tensor, *args, **kwargs)

        return choosing

    def _within(self, phase: str, original: Function) -> Function:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                return original(*args, **kwargs)
            before = self.clock.phase
            self.clock.enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.clock.enter(before)

        return marked

    def collected(self, seconds: float) -> None:
        """Count the garbage collector's time."""
        self.gc_s += seconds

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        self.clock.cut()
        self.steps += 1
        self._stepped = False
        self._waiting += 1
        if self._waiting >= self.every:
            self._deliver()

    def _deliver(self) -> None:
        """Hand over the steps that have ended since the last time."""
        self._waiting = 0
        self._counting = self.steps < _COUNT_ALL or self.steps // self.every % _COUNT_EVERY == 0
        ended = self.clock.read()
        self.last_boundary = self.clock.last
        for measured in ended:
            if measured.step == 0:
                self.first_boundary = self.last_boundary
            else:
                self.step_s += measured.seconds
            self.on_step(measured)
        self.clock.resume()

    def seen(self) -> str:
        """Say what of a training loop was seen."""
        return f"{self.fetched} batches from a DataLoader, {self.backwards} backward passes, {self.steps} steps"

    def unattributed(self) -> float:
        """Return the share of the wall time, first boundary to last, that is in no step and was not the profiler's."""
        wall = self.last_boundary - self.first_boundary
        return max(0.0, 1.0 - (self.step_s + self.clock.aside_s) / wall) if wall > 0 else 0.0

    def loader_facts(self) -> LoaderFacts:
        """Describe the loader that feeds the training."""
        if not self._training or self.loader is None:
            return LoaderFacts(kind="own iterator" if self.steps else "none seen")
        return facts.of_loader(self.loader)

    def worker_pids(self) -> list[int]:
        """Return the loader's worker processes."""
        return [worker.pid for worker in getattr(self.iterator, "_workers", []) if worker.pid]


def kept_steps() -> deque[Measurement]:
    """Return a list that holds the last 20,000 steps: 20 MB."""
    return deque(maxlen=_KEPT_STEPS)


def _samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch, 0 if there is none."""
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor:  # most are; the rest costs 1 µs
        return batch[0].shape[0] if batch[0].dim() else 0
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            found = _samples(part)
            if found:
                return found
    return 0
