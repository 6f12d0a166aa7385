"""What an experiment switches, when it does so, and what it puts back.

Where the loop does something else than steps, as evaluating or saving, nothing is switched, and what the model has
learned in an experiment that changes this is taken back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.profiler.loop.patches import Patches
from accel.profiler.loop.recorder import Recorder

_STATE_CALLS = ((torch, "save"), (nn.Module, "state_dict"), (nn.Module, "load_state_dict"))
"""Where a script saves what it has learned, or puts something else in its place."""
STUCK = 50
"""A loop that calls its model so many times as often as in the step before, and makes no update, is stuck with what it
has learned: as one that leaves out each batch whose loss is NaN, once its weights are."""


@dataclass
class Counterfactual:
    """One thing that can be switched between two steps."""

    name: str
    what: str
    """What the steps without the suspected cause did differently."""
    off: Callable[[], AbstractContextManager[None]]
    """The suspected cause is off while this is entered."""
    worked: Callable[[], bool]
    """Return whether it has removed anything so far; the experiment is void if it has not."""
    changes_learning: bool = False
    """The steps without the suspected cause don't train as usual: the state from before them is restored."""


class Snapshot:
    """A copy of parameters, buffers and optimizer state, to be restored in place.

    Args:
        models: what is trained.
        optimizers: their state is restored too.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put everything back; a backward pass may be outstanding, so autograd does not count it as a change."""
        with torch.no_grad():
            for tensor, saved in self._pairs:
                tensor.data.copy_(saved)


class Switch:
    """Switches a counterfactual in the steps, and only there: nothing is switched while the loop pauses.

    Args:
        tried: what is switched.
        recorder: of the loop.

    Attributes:
        is_stuck: the loop got stuck: everything has been put back, and nothing is switched any more.
    """

    def __init__(self, tried: Counterfactual, recorder: Recorder) -> None:
        self.is_stuck = False
        self._tried, self._recorder, self._entered = tried, recorder, ExitStack()
        self._saved = Snapshot(recorder.roots.modules, recorder.optimizers) if tried.changes_learning else None
        self._patches = Patches()
        self._calls = self._usual_calls = 0
        self._on = self._away = self._has_learned = False
        self._paused = False
        """Whether the loop has left its steps since the last of them ended."""

    def watch(self) -> None:
        """Listen for pauses; where the model learns something else, saving is one too."""
        delivery = self._recorder.delivery
        delivery.pauses.watch(lambda: self.leave(is_between=delivery.pauses.is_between), self.back)
        if self._saved is not None:
            self._recorder.calls.on_call = lambda: delivery.guarded(self.called)
            for owner, name in _STATE_CALLS:
                self._patches.replace(owner, name, functools.partial(_after, delivery.pauses.begin))

    def end(self) -> None:
        """Put everything back for good."""
        self._patches.remove()
        self._recorder.delivery.pauses.unwatch()
        if self._saved is not None:
            self._recorder.calls.on_call = None
        self.leave(is_between=True)

    def set(self, on: bool) -> bool:
        """Switch between two steps; return whether anything was to be switched."""
        changes, self._on = on != self._on, on
        if changes and not self._away:
            self._enter()
        return changes

    def _enter(self) -> None:
        self._entered.close()
        if self._on:
            self._entered.enter_context(self._tried.off())

    def leave(self, *, is_between: bool) -> None:
        """Put everything back while the loop does something else; the state only if no step is under way."""
        self._paused = self._away = True
        self._entered.close()
        if is_between and self._saved is not None and self._has_learned:
            self._saved.restore()
            self._has_learned = False

    def back(self) -> None:
        """Switch as before."""
        if not self.is_stuck:
            self._away, self._has_learned = False, True
            self._enter()

    def called(self) -> None:
        """The model is called for training: put everything back for good if no update comes of that."""
        self._calls += 1
        if 0 < STUCK * self._usual_calls < self._calls and not self.is_stuck:
            self.is_stuck = True
            self.leave(is_between=True)

    def passed(self) -> bool:
        """Return whether the step that has ended was one without a pause."""
        self._calls, self._usual_calls = 0, max(1, self._calls)
        paused, self._paused, self._has_learned = self._paused or self._away, False, not self.is_stuck
        return not paused


def _after(first: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    return marked
