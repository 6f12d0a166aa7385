"""Notify listeners when a backward pass of the loop begins and when it has ended.

`torch.autograd.backward`, which `Tensor.backward` calls too, is wrapped once for all listeners, and restored when none
are left. A listener has `backward_begins`, `backward_ended` or both; each is called with the tensors from which the
pass starts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from accel.profiler.loop.untraced import untraced


class _Mark:
    def __init__(self) -> None:
        self.listeners: tuple[Any, ...] = ()
        # New tuples at each change, which may come within a pass. Nobody is called for what it does not listen to.
        self._begins: tuple[Callable[[list[Tensor]], None], ...] = ()
        self._ends: tuple[Callable[[list[Tensor]], None], ...] = ()
        self._marked: Any = None
        self._original: Any = None
        self._inside = False

    def add(self, listener: Any, first: bool = False) -> None:
        if listener not in self.listeners:  # some listen again with each batch
            self._set((listener, *self.listeners) if first else (*self.listeners, listener))
        if torch.autograd.backward is not self._marked and not self._is_in_place():
            self._original = torch.autograd.backward
            self._marked = torch.autograd.backward = self._mark(self._original)

    def remove(self, listener: Any) -> None:
        self._set(tuple(existing for existing in self.listeners if existing is not listener))
        # Inside somebody else's wrapper ours has to stay; without listeners it only calls the original.
        if not self.listeners and torch.autograd.backward is self._marked:
            torch.autograd.backward = self._original

    def _set(self, listeners: tuple[Any, ...]) -> None:
        begins = tuple(each.backward_begins for each in listeners if hasattr(each, "backward_begins"))
        ends = tuple(each.backward_ended for each in listeners if hasattr(each, "backward_ended"))
        self.listeners, self._begins, self._ends = listeners, begins, ends  # Ctrl-C: all or none

    def _is_in_place(self) -> bool:
        """Return whether our wrapper is in place, outermost or inside others; one of those may have removed it too."""
        outer: Any = torch.autograd.backward
        while outer is not None and outer is not self._marked:
            outer = getattr(outer, "__wrapped__", None)
        return outer is not None

    def _mark(self, original: Any) -> Any:
        @untraced
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            if self._inside or not self.listeners:  # a backward pass within one (checkpointing) belongs to it
                original(*args, **kwargs)
                return
            given = args[0] if args else kwargs.get("tensors", ())
            if isinstance(given, Tensor):
                roots = [given]
            else:
                roots = list(given)
                if not isinstance(given, Sequence):  # a generator gives them once
                    others = {name: each for name, each in kwargs.items() if name != "tensors"}
                    args, kwargs = (roots, *args[1:]), others
            try:
                self._inside = True
                for begins in self._begins:
                    begins(roots)
                original(*args, **kwargs)
            finally:
                self._inside = False
            for ended in self._ends:
                ended(roots)

        return backward


_MARK = _Mark()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Tell listeners nothing of backward passes that are none of the loop's."""
    before, _MARK._inside = _MARK._inside, True
    try:
        yield
    finally:
        _MARK._inside = before


def is_running() -> bool:
    """Return whether this call is made within a backward pass, as those that activation checkpointing repeats are."""
    return torch._C._current_graph_task_id() != -1


def on_gradient(tensor: Tensor, call: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register `call` for each gradient that arrives at a tensor; what it returns takes the gradient's place.

    Autograd also calls hooks of tensors at which none arrives, with None: of an output that the loss doesn't depend on,
    where the node that made it has others that it does (a compiled model that returns logits and loss).
    """

    def arrives(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else call(gradient)

    handle: RemovableHandle = tensor.register_hook(arrives)  # type: ignore[no-untyped-call]
    return handle


def replace_passes(patches: Any, make: Callable[[Any], Any]) -> None:
    """Replace the functions that make backward passes by what `make` returns for each, until `patches` are removed."""
    for name in ("backward", "grad"):
        patches.replace(torch.autograd, name, make)


listen = _MARK.add
"""Add a listener, behind the others or before them."""
forget = _MARK.remove
"""Remove it."""


def leads_past(roots: Iterable[Tensor], calls: set[int], parameters: set[int]) -> bool:
    """Return whether a backward pass from `roots` reaches parameters on a path that bypasses the model's calls.

    A penalty on the weights does: its share of the gradients doesn't come from the call.

    Args:
        roots: where the pass started.
        calls: sequence numbers of the calls' output nodes.
        parameters: `id` of each parameter.
    """
    nodes: list[Any] = [getattr(root, "grad_fn", None) for root in roots]
    waiting = [node for node in nodes if node is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() in calls:
            continue
        if id(getattr(node, "variable", None)) in parameters:
            return True
        new = {following for following, _ in node.next_functions if following is not None} - visited
        visited |= new
        waiting += new
    return False
