"""Find the modules that an unmodified loop calls, and mark their calls.

After the first update the optimizer's parameters are known; the modules that own some of them and are no other module's
child are the roots. A root that the loop itself never calls for training (a Lightning module, a container) is
replaced by its children, until something is called. Where nothing ever is, the model is a compiled function or method.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accel.profiler.interruptions import Tolerated, ours
from accel.profiler.loop import callslot
from accel.profiler.loop.callslot import Call

_MAX_DEPTH = 6


@dataclass
class _Watched:
    """A module whose calls are marked."""

    module: nn.Module
    contents: dict[str, Any]
    """What its slot held."""
    depth: int
    """Below the modules that own an optimizer's parameters."""
    since: int
    """The step in which its marks came."""
    calls: list[int] = field(default_factory=lambda: [0])
    """With gradients."""
    marked: Call | None = None
    handles: Sequence[Any] = ()
    """Of the hooks in place of a call in the slot."""


class CalledModules:
    """Marks the calls of the loop's models.

    Args:
        mark: wraps a model's call in a marked one, which counts the calls with gradients in the given list.
        hooks: makes a forward pre-hook and a forward hook that do the same.
    """

    def __init__(
        self,
        mark: Callable[[Call, list[int]], Call],
        hooks: Callable[[list[int]], tuple[Call, Call]],
    ) -> None:
        self._mark, self._hooks = mark, hooks
        self._owned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """The parameters whose modules have been looked for, by id; another one may lie where one that is gone lay."""
        self._watched: dict[int, _Watched] = {}
        self._released: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        """Those of earlier models that were let go of."""
        self._was_called = False
        """One that is watched no more was called."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose calls are marked, the most called first."""
        return [each.module for each in sorted(self._watched.values(), key=lambda each: -each.calls[0])]

    @property
    def called_modules(self) -> list[nn.Module]:
        """Those that were called with gradients, the most called first."""
        return [module for module in self.modules if self._watched[id(module)].calls[0]]

    @property
    def called(self) -> bool:
        """True once one of them, or of earlier ones, was called with gradients."""
        return self._was_called or any(each.calls[0] for each in self._watched.values())

    def learn(self, optimizer: Optimizer, step: int, among: Sequence[nn.Module] | None = None) -> bool:
        """Find and mark, in this step, the modules that own parameters of `optimizer`, once per optimizer.

        To go through all objects takes 20 ms in a small process, and 170 ms once torch's compiler has been imported.

        Returns:
            False if there was nothing to look for: modules that are marked own all of its parameters.
        """
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if all(key in self._owned for key in own):
            return False
        self._owned.update(own)
        if own.keys() <= {id(p) for each in self._watched.values() for p in each.module.parameters()}:
            return False  # an optimizer for each parameter, say
        owned = set(self._owned)
        owners = [module for module in (_modules() if among is None else among) if _owns(module, owned)]
        inner = _parts_of(owners)
        for module in owners:
            if id(module) not in inner:
                self._watch(module, 0, step)
        return True

    def descend(self, step: int) -> None:
        """Replace modules that were not called in two whole steps by their children."""
        owned = set(self._owned)
        for each in list(self._watched.values()):
            if each.calls[0] or each.depth >= _MAX_DEPTH or step - each.since < 2:
                continue
            children = [child for child in each.module.children() if _owns(child, owned)]
            if children:
                self._release(each)
                for child in children:
                    self._watch(child, each.depth + 1, step)

    def release_others(self, trained: Set[int]) -> None:
        """Restore, once, the modules that own none of these parameters, and let go of them: an earlier model, say."""
        for each in list(self._watched.values()):
            module = each.module
            if _owns(module, trained) or id(module) in self._released:
                continue  # one that came back is trained by an optimizer that is made anew each time
            self._released[id(module)] = module
            self._release(each)
            with Tolerated("the parameters of a module can't be listed any more"):
                for parameter in module.parameters():  # should it be trained again, it is looked for again
                    self._owned.pop(id(parameter), None)

    def release(self) -> None:
        """Restore all modules."""
        for each in list(self._watched.values()):
            self._release(each)

    def _watch(self, module: nn.Module, depth: int, step: int) -> None:
        if id(module) in self._watched:
            return
        watched = self._watched[id(module)] = _Watched(module, callslot.contents(module), depth, step)
        present = watched.contents.get(callslot.NAME)
        if isinstance(present, callslot.SlotCall):
            # Another wrapper (accel.optimize in the script) owns the slot and changes it at will.
            before, after = self._hooks(watched.calls)
            watched.handles = (
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after, always_call=True),
            )
            return
        watched.marked = callslot.SlotCall(self._mark(present or module._call_impl, watched.calls))
        callslot.fill(module, watched.marked)

    def _release(self, watched: _Watched) -> None:
        module = self._watched.pop(id(watched.module)).module
        self._was_called = self._was_called or watched.calls[0] > 0
        is_marked = watched.marked is not None and vars(module).get(callslot.NAME) is watched.marked
        if is_marked:  # nobody has filled the slot since
            callslot.restore(module, watched.contents)
        for handle in watched.handles:
            handle.remove()


def _owns(module: nn.Module, parameters: Set[int]) -> bool:
    try:
        return any(id(p) in parameters for p in module.parameters())
    except ours():  # a module that is half built, or one whose parameters can't be listed
        return False


def _parts_of(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of all parts of these modules, at any depth: those in between need not be among them."""
    parts, due = set[int](), list(modules)
    while due:
        for child in getattr(due.pop(), "_modules", {}).values():  # a class may have a `children` of its own
            if child is not None and id(child) not in parts:
                parts.add(id(child))
                due.append(child)
    return parts


def _modules() -> list[nn.Module]:
    """Return the modules that the collector lists: not those that `gc.freeze` has put aside."""
    # type(), not isinstance: proxies answer isinstance for the object they wrap.
    return [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]


def name(modules: Iterable[nn.Module]) -> str:
    """Return the classes of the modules, joined by commas."""
    return ", ".join(dict.fromkeys(_class(module) for module in modules))


def _class(module: nn.Module) -> str:
    # A wrapper's name says nothing about the model inside.
    inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
    return _class(inner) if isinstance(inner, nn.Module) else type(module).__name__
