"""The gate: the one place where a call of the model can be wrapped, watched and recorded.

It sits in the slot that `nn.Module.compile()` uses for its compiled call. So the model stays the same object: class,
hooks, `state_dict` and `forward` are untouched, and copies and pickles of it are plain, because the slot is left out of
them. When nothing needs the gate, the slot is empty again and a call costs what it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import nn

from accel.profiler.loop import callslot

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dictionaries in which the hooks of all modules stand."""
    return [vars(module)[name] for module in model.modules() for name in _HOOKS if name in vars(module)]


class Watcher(Protocol):
    """Makes each call in place of the gate."""

    def around(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call and do the checks around it."""


class Gate:
    """Wrap the calls of `model`.

    Args:
        model: the module whose `__call__` is wrapped; left as it is until something is added.
        order: names of wrappers from the innermost to the outermost.
    """

    def __init__(self, model: nn.Module, order: list[str]) -> None:
        self.model = model
        self._order = order
        self._wraps: dict[str, Wrap] = {}
        self._before_plain: dict[str, Callable[[], None]] = {}
        self._compiling: set[str] = set()
        """Wrappers that make a compiled call."""
        in_slot: Call | None = model._compiled_call_impl
        # A call that only counts, of the profiler's or of `accel run`'s, is not a compiled one.
        self._user_compiled = None if isinstance(in_slot, callslot.SlotCall) else in_slot
        self._installed: Call | None = self._user_compiled
        self._original_slot = callslot.contents(model)
        self._chain: Call = self._innermost
        self._watched_call = callslot.SlotCall(self._watched)  # one: programs that the user has compiled know it again
        self.watcher: Watcher | None = None
        self.passes = False
        """Calls go past the watcher, which needs none of them for a while: the slot stays as it is meanwhile."""

    @property
    def compiled_by_user(self) -> bool:
        """True if the loop has compiled the model in place."""
        return self._user_compiled is not None

    @property
    def plain(self) -> Call:
        """The call as it would be without the gate."""
        return self._call_plainly if self._before_plain else self._innermost

    @property
    def _innermost(self) -> Call:
        return self._user_compiled if self._user_compiled is not None else self.model._call_impl

    def _call_plainly(self, *args: Any, **kwargs: Any) -> Any:
        for prepare in self._before_plain.values():
            prepare()
        return self._innermost(*args, **kwargs)

    @property
    def wrapped(self) -> bool:
        """True while a wrapper is on."""
        return bool(self._wraps)

    @property
    def compiles(self) -> bool:
        """True while a wrapper makes a compiled call, into which modes of torch don't see."""
        return bool(self._compiling)

    def add(
        self, name: str, wrap: Wrap, before_plain: Callable[[], None] | None = None, *, compiles: bool = False
    ) -> None:
        """Add a wrapper, at its place in the order.

        Args:
            name: of the wrapper, one of the order.
            wrap: given a call, returns the wrapped one.
            before_plain: called before a call along the plain path, for a wrapper that acts inside the model too.
            compiles: what it wraps runs compiled.
        """
        self._wraps[name] = wrap
        (self._compiling.add if compiles else self._compiling.discard)(name)
        self._before_plain.pop(name, None)
        if before_plain is not None:
            self._before_plain[name] = before_plain
        self._rebuild()

    def within(self, name: str) -> Hashable:
        """Return what tells the call that a wrapper is given from others: what is inside it, in order.

        A wrapper that acts inside the model too is known by what it has called before a plain call. That belongs to
        what acts there, such as one compiled model, for which the wrapper itself may be made anew at each switch.
        """
        inner = [other for other in self._order[: self._order.index(name)] if other in self._wraps]
        return self._user_compiled, *((other, self._before_plain.get(other, self._wraps[other])) for other in inner)

    def remove(self, name: str) -> None:
        """Remove a wrapper; unknown names are ignored."""
        self._wraps.pop(name, None)
        self._before_plain.pop(name, None)
        self._compiling.discard(name)
        self._rebuild()

    def watch(self, watcher: Watcher | None) -> None:
        """Pass each call to `watcher`; None ends that."""
        self.watcher = watcher
        self._adopt()
        self._install()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through the wrappers that are on, unwatched."""
        return self._chain(*args, **kwargs)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call that was being watched as it would be made now."""
        return self.call(*args, **kwargs) if self.watcher is None else self._watched(*args, **kwargs)

    def _rebuild(self) -> None:
        self._adopt()
        self._chain = self._wrapped()
        self._install()

    def _wrapped(self) -> Call:
        call = self._innermost
        for name in sorted(self._wraps, key=self._order.index):
            call = self._wraps[name](call)
        return call

    def _adopt(self) -> None:
        """If the loop has called `model.compile()` since, make the compiled call the plain path from now on."""
        call = vars(self.model).get(callslot.NAME)
        if call is None or call is self._installed or isinstance(call, callslot.SlotCall):
            return  # the profiler's wrapper is not a compiled call
        self._user_compiled = self._installed = call
        self._original_slot = callslot.contents(self.model)
        self._chain = self._wrapped()

    def _install(self) -> None:
        if self.watcher is not None:
            self._fill(self._watched_call)
        elif self._wraps:
            self._fill(callslot.SlotCall(self._chain))
        else:
            self._empty()

    def _fill(self, call: Call) -> None:
        self._installed = call
        callslot.fill(self.model, call)

    def _empty(self) -> None:
        callslot.restore(self.model, self._original_slot)
        self._installed = self._user_compiled

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        watcher = self.watcher
        if watcher is None or self.passes:  # none: another thread has ended that just now
            return self._chain(*args, **kwargs)
        return watcher.around(self._chain, args, kwargs)

    def close(self) -> None:
        """Restore the model as it was before the gate."""
        self.watcher, self.passes = None, False
        self._wraps.clear()
        self._before_plain.clear()
        self._compiling.clear()
        self._rebuild()
