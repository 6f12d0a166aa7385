"""Call functions before and after each step of any optimizer of the process, by one pair of torch's global hooks.

The hooks are there while somebody listens; a function that listens alone is the hook itself. What is called gets the
optimizer, the arguments of its step (itself the first of them) and those by name; what comes before a step may return
others in their place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel.profiler.loop.untraced import untraced

Function = Callable[..., Any]


class UpdateHook:
    """The functions that are called on one side of a step, in the order in which they came."""

    def __init__(self, register: Callable[[Function], Any]) -> None:
        self.functions: tuple[Function, ...] = ()  # a new one at each change, which may come within a step
        self._register = register
        self._handle: Any = None

    def add(self, function: Function) -> None:
        """Call a function from now on."""
        self._set((*self.functions, function))

    def forget(self, function: Function) -> None:
        """Call it no more."""
        self._set(tuple(each for each in self.functions if each is not function))

    def _set(self, functions: tuple[Function, ...]) -> None:
        self.functions = functions
        hook = untraced(functions[0] if len(functions) == 1 else self._call_each)
        if self._handle is None:
            if functions:
                self._handle = self._register(hook)
        elif functions or _is_within_a_step():
            self._handle.hooks_dict_ref()[self._handle.id] = hook  # its place stays: torch may be going through them
        else:
            self._handle.remove()
            self._handle = None

    def _call_each(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        for function in self.functions:
            if (others := function(optimizer, args, kwargs)) is not None:
                args, kwargs = changed = others
        return changed


class UpdateHooks:
    """Both sides of a step."""

    def __init__(self) -> None:
        self._before = UpdateHook(register_optimizer_step_pre_hook)
        self._after = UpdateHook(register_optimizer_step_post_hook)

    def add(self, before: Function | None = None, after: Function | None = None) -> Callable[[], None]:
        """Call functions from now on, and return what ends it."""
        added = [(hook, each) for hook, each in ((self._before, before), (self._after, after)) if each is not None]
        for hook, function in added:
            hook.add(function)

        def remove() -> None:
            for hook, function in added:
                hook.forget(function)

        return remove

    def add_weakly(self, after: Any) -> Callable[[], None]:
        """Call a method after each step as long as its object is there, which this does not keep alive."""
        method = weakref.WeakMethod(after, lambda _: self._after.forget(call))

        def call(*_: Any) -> None:
            if (present := method()) is not None:
                present()

        return self.add(after=call)


_STEP = cast(Any, Optimizer).profile_hook_step(lambda: None).__code__
"""torch's wrapper around the steps of all optimizers, which goes through the hooks."""


def _is_within_a_step() -> bool:
    """Tell whether an optimizer is stepping: torch goes through its hooks then, and none may be taken out.

    Asked when nobody listens any more, so that a step pays nothing for it.
    """
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _STEP:
                return True
            at = at.f_back
    return False


UPDATES = UpdateHooks()
"""Those of this process."""
