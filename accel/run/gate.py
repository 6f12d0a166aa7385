"""The gate: the one place where a call of the model can be wrapped, watched and recorded.

It sits in the slot that `nn.Module.compile()` uses for its compiled call. So the model stays the same object: class,
hooks, `state_dict` and `forward` are untouched, and copies and pickles of it are plain, because the slot is left out of
them. When nothing needs the gate, the slot is empty again and a call costs what it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from accel.device_memory import give_memory_back
from accel.profiler.loop import callslot

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]


class Watcher(Protocol):
    """Makes each call in place of the gate."""

    def around(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call and do the checks around it."""


class _Wrapper(NamedTuple):
    wrap: Wrap
    before_plain: Callable[[], None] | None
    compiles: bool
    make_room: Callable[[], None] | None


class Gate:
    """Wrap the calls of `model`.

    Args:
        model: the module whose `__call__` is wrapped; left as it is until something is added.
        order: names of wrappers from the innermost to the outermost.
    """

    def __init__(self, model: nn.Module, order: list[str]) -> None:
        self.model = model
        self._order = order
        self._wrappers: dict[str, _Wrapper] = {}
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
        prepares = [each.before_plain for each in self._wrappers.values() if each.before_plain is not None]
        if not prepares:
            return self._innermost

        def call_plainly(*args: Any, **kwargs: Any) -> Any:
            for prepare in prepares:
                prepare()
            return self._innermost(*args, **kwargs)

        return call_plainly

    @property
    def _innermost(self) -> Call:
        return self._user_compiled if self._user_compiled is not None else self.model._call_impl

    @property
    def wrapped(self) -> bool:
        """True while a wrapper is on."""
        return bool(self._wrappers)

    @property
    def compilers(self) -> set[str]:
        """The wrappers that make compiled calls, into which modes of torch don't see."""
        return {name for name, wrapper in self._wrappers.items() if wrapper.compiles}

    def add(
        self,
        name: str,
        wrap: Wrap,
        before_plain: Callable[[], None] | None = None,
        *,
        compiles: bool = False,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        """Add a wrapper, at its place in the order.

        Args:
            name: of the wrapper, one of the order.
            wrap: given a call, returns the wrapped one.
            before_plain: called before a call along the plain path, for a wrapper that acts inside the model too.
            compiles: what it wraps runs compiled.
            make_room: gives up memory that it keeps from call to call, for a call that has none left.
        """
        self._wrappers[name] = _Wrapper(wrap, before_plain, compiles, make_room)
        self._install(is_changed=True)

    def within(self, name: str) -> Hashable:
        """Return what tells the call that a wrapper is given from others: what is inside it, in order.

        A wrapper that acts inside the model too is known by what it has called before a plain call. That belongs to
        what acts there, such as one compiled model, for which the wrapper itself may be made anew at each switch.
        """
        inner = [other for other in self._order[: self._order.index(name)] if other in self._wrappers]
        wrappers = [(other, self._wrappers[other]) for other in inner]
        return self._user_compiled, *((other, each.before_plain or each.wrap) for other, each in wrappers)

    def remove(self, name: str) -> None:
        """Remove a wrapper; unknown names are ignored."""
        self._wrappers.pop(name, None)
        self._install(is_changed=True)

    def watch(self, watcher: Watcher | None) -> None:
        """Pass each call to `watcher`; None ends that."""
        self.watcher = watcher
        self._install(is_changed=False)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through the wrappers that are on, unwatched."""
        return self._chain(*args, **kwargs)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call that was being watched as it would be made now."""
        return self.call(*args, **kwargs) if self.watcher is None else self._watched(*args, **kwargs)

    def _install(self, *, is_changed: bool) -> None:
        """Put the call as it is now into the model's slot, or leave that empty.

        If the loop has called `model.compile()` since, the compiled call is the plain path from now on.
        """
        call = vars(self.model).get(callslot.NAME)
        # The profiler's wrapper is not a compiled call.
        if call is not None and call is not self._installed and not isinstance(call, callslot.SlotCall):
            self._user_compiled, is_changed = call, True
            self._original_slot = callslot.contents(self.model)
        if is_changed:
            self._chain = self._innermost
            for name in sorted(self._wrappers, key=self._order.index):
                self._chain = self._wrappers[name].wrap(self._chain)
        if self.watcher is None and not self._wrappers:
            callslot.restore(self.model, self._original_slot)
            self._installed = self._user_compiled
            return
        self._installed = self._watched_call if self.watcher is not None else callslot.SlotCall(self._chain)
        callslot.fill(self.model, self._installed)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is looked at here is guarded, and compiled again when it changes
            return self._innermost(*args, **kwargs)
        watcher = self.watcher
        if watcher is None or self.passes:  # none: another thread has ended that just now
            return self._chain(*args, **kwargs)
        return watcher.around(self._chain, args, kwargs)

    def close(self) -> None:
        """Restore the model as it was before the gate."""
        self.watcher, self.passes = None, False
        self._wrappers.clear()
        self._install(is_changed=True)


def make_room(gate: Gate) -> list[str]:
    """Let wrappers give up the memory that they keep, and the allocator what it holds unused, after a call without.

    Returns:
        Names of the wrappers that keep any.
    """
    keeping = {name: wrapper.make_room for name, wrapper in gate._wrappers.items() if wrapper.make_room is not None}
    for give_up in keeping.values():
        give_up()
    give_memory_back()
    return list(keeping)
