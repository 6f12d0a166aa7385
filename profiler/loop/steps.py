"""The rule for where a step of a session ends; `accel profile` has its own (`batches`, `recorder`).

    fed:    request ──▶ batch ──▶ call ──▶ backward ──▶ update ──▶ request
    unfed:                        call ──▶ backward ──▶ update ──▶ call

A step has ended once an optimizer has stepped. The next one begins with what comes first in a step: the request for a
batch, or in a loop that asks for none (it makes its batches itself, or keeps those of a loader in a list) the call of
the model. Where no optimizer steps at all, each batch is a step.

Of several optimizers that step in turn only one ends steps where no request does, so that a turn is one step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from accel.profiler.loop import backward

LOST = 50
"""After this many updates by other optimizers, the one that ended steps is taken to be gone."""
NO_OPTIMIZER_AFTER = 16
"""After so many batches without a step of any of the model's optimizers, the loop is assumed to have none."""
FEW = 8
"""Updates by one batch after which calls are looked at: a GAN makes a few with each."""
UNFED_AFTER = 64
"""Further turns of updates without a request from which on the loop is taken to ask for no batch."""


class EndingOptimizer:
    """Tells which updates may end a step: those of the first optimizer that stepped, which is not kept alive."""

    def __init__(self) -> None:
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        """A weak reference to it."""
        self.others = 0
        """Updates of others since its last one."""
        self._has_begun = False

    def is_of(self, optimizer: Optimizer, *, has_ranks: bool) -> bool:
        """Return whether an update by `optimizer` may end a step; take it for the one once the first is gone.

        Where others train in step with this process (`has_ranks`), they must end the same steps, and may free an
        optimizer at different ones, as their garbage collectors have it.
        """
        ending = self.optimizer()
        is_gone = ending is None and not (self._has_begun and has_ranks)
        if optimizer is not ending and not is_gone:
            self.others += 1
            if self.others <= LOST:
                return False
        if optimizer is not ending:
            self.optimizer, self._has_begun = weakref.ref(optimizer), True
        self.others = 0
        return True


class StepRule:
    """Follow one model's requests, updates and calls, and tell where its steps end.

    Args:
        has_optimizer: returns whether the model has, or had, an optimizer.
        has_ranks: returns whether others train in step with this process.

    Attributes:
        begun: the first step has ended.
        updated: an optimizer has stepped since the last boundary.
        batches: batches since then.
        has_batch: a batch was delivered, and neither another one requested nor an update made since.
        is_fed: steps end at requests, which a loader answers; an update by a batch that was asked for makes it so.
        has_just_changed: the loop was taken to be fed until now, so the step that ends is several steps long.
        needs_requests: only a request may end a step. Set where the batch size is decided at requests, where another
            thread makes the requests, and when the session has closed.
        wants_calls: a call of the model may end a step, or tell that the loop is not fed.
        is_updating: an optimizer is stepping: a call within is of its closure.
    """

    def __init__(self, has_optimizer: Callable[[], bool], has_ranks: Callable[[], bool]) -> None:
        self._has_optimizer, self._has_ranks = has_optimizer, has_ranks
        self.begun = self.updated = self.has_batch = False
        self.batches = 0
        self.is_fed, self.has_just_changed = True, False
        self.needs_requests = self.wants_calls = self.is_updating = False
        self._has_loader = True
        self._ending = EndingOptimizer()
        self._unfed_updates = self._unfed_turns = 0
        """Since the last batch that was asked for: updates, and turns of the optimizers after the first few of them."""
        self._turn_has_ended = False

    def makes_batches(self) -> None:
        """The loop makes its own batches: no loader will ever feed it."""
        self.is_fed = self._has_loader = False
        self._unfed_updates, self._unfed_turns = FEW, UNFED_AFTER

    def has_ended(self) -> bool:
        """Return whether the step is over if a batch is requested now."""
        return self.updated or (not self._has_optimizer() and self.batches >= (1 if self.begun else NO_OPTIMIZER_AFTER))

    def update(self, optimizer: Optimizer) -> None:
        """An optimizer of the model has stepped."""
        self.updated, self.is_updating = True, False
        if self.has_batch:
            self.has_batch = False
            if self._unfed_updates:
                self.is_fed, self.wants_calls, self._turn_has_ended = True, False, False
                self._unfed_updates = self._unfed_turns = 0
            return
        self._unfed_updates += 1
        if self._unfed_updates >= FEW:
            self.wants_calls = not self.needs_requests
            is_ending = self._ending.is_of(optimizer, has_ranks=self._has_ranks())
            self._turn_has_ended = is_ending or self._turn_has_ended

    def call_ends_step(self) -> bool:
        """Return whether the call of the model that is about to be made is the first of the next step.

        It is none in an optimizer's closure; nor one that autograd makes again, or that is to be made again by it, for
        what is done between two steps would be taken for a part of it. On several ranks a boundary must be the same on
        all of them, so that a loop which had a loader goes on to wait for a request there: one rank may train on alone.
        """
        if not self._turn_has_ended or self.is_updating or self.needs_requests:
            return False
        if (self._has_loader and self._has_ranks()) or not is_between_steps():
            return False
        self._turn_has_ended = False
        self._unfed_turns += 1
        if self._unfed_turns < UNFED_AFTER:
            return False
        self.has_just_changed, self.is_fed = self.is_fed, False
        return True


def is_between_steps() -> bool:
    """Return whether a call of the model that is about to be made may lie between two steps."""
    if backward.is_running() or torch.is_inference_mode_enabled():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    return not is_capturing()


def is_described() -> bool:
    """Return whether a program is made of this call (torch.compile, export, jit.trace, a CUDA graph of the loop's own).

    Nothing here belongs in it.
    """
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_capturing()


def is_capturing() -> bool:
    """Return whether the current stream records a CUDA graph: an event would become a part of that."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def is_transformed() -> bool:
    """Return whether tensors in this call have no values to check, as under vmap and in modes such as fake tensors'."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None
