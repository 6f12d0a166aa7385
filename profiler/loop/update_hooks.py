"""Call functions before and after each step of any optimizer of the process, by one pair of torch's global hooks.

The hooks are there while somebody listens. What is called gets the optimizer, the arguments of its step (itself the
first of them) and those by name; what comes before a step may return others in their place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Function = Callable[..., Any]


class UpdateHooks:
    """The functions that are called, in the order in which they came."""

    def __init__(self) -> None:
        # New tuples at each change, which may come within a step.
        self._before: tuple[Function, ...] = ()
        self._after: tuple[Function, ...] = ()
        self._handles: list[Any] = []

    def add(self, before: Function | None = None, after: Function | None = None) -> Callable[[], None]:
        """Call functions from now on, and return what ends it."""
        self._before += () if before is None else (before,)
        self._after += () if after is None else (after,)
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._step_begins),
                register_optimizer_step_post_hook(self._step_ended),
            ]

        def remove() -> None:
            self._forget(before, after)
            if not (self._before or self._after or _is_within_a_step()):
                for handle in self._handles:
                    handle.remove()
                self._handles = []

        return remove

    def add_weakly(self, after: Any) -> Callable[[], None]:
        """Call a method after each step as long as its object is there, which this does not keep alive."""
        method = weakref.WeakMethod(after, lambda _: self._forget(None, call))

        def call(*_: Any) -> None:
            if (present := method()) is not None:
                present()

        return self.add(after=call)

    def _forget(self, before: Function | None, after: Function | None) -> None:
        self._before = tuple(each for each in self._before if each is not before)
        self._after = tuple(each for each in self._after if each is not after)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        for function in self._before:
            if (others := function(optimizer, args, kwargs)) is not None:
                args, kwargs = changed = others
        return changed

    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for function in self._after:
            function(optimizer, args, kwargs)


_CALLERS = (UpdateHooks._step_begins.__code__, UpdateHooks._step_ended.__code__)


def _is_within_a_step() -> bool:
    """Tell whether functions are being called: torch goes through its hooks then, and none may be taken out.

    Asked when somebody stops to listen, so that a step pays nothing for it.
    """
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code in _CALLERS:
                return True
            at = at.f_back
    return False


UPDATES = UpdateHooks()
"""Those of this process."""
