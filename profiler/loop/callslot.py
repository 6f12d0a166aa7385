"""The slot in which a module's own call can be wrapped, without a hook, a subclass or another object.

It is the slot that `nn.Module.compile()` uses for its compiled call: class, hooks, `state_dict` and `forward` stay as
they are, and copies and pickles of the module are plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Call = Callable[..., Any]
NAME = "_compiled_call_impl"


class SlotCall(functools.partial):  # type: ignore[type-arg]
    """The call in the slot: a partial, because calling one costs 30 ns, and a class with `__call__` ten times that.

    Copies of it are None, so that a copy of the module is plain. `nn.Module` leaves the slot out of copies, but a class
    with a `__getstate__` or `__deepcopy__` of its own may not: its copy would then go on calling the module it was
    copied from.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def contents(module: nn.Module) -> dict[str, Any]:
    """Return the slot's entry in the module's own dictionary, {} if the slot is empty."""
    return {name: call for name, call in vars(module).items() if name == NAME}


def _replicate_without_call(original: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return `nn.Module._replicate_for_data_parallel` whose replicas have an empty slot.

    A replica has a copy of the module's dictionary: the call in it would run the module itself, with its weights on its
    device, in place of the replica.
    """

    @functools.wraps(original)
    def replicate(module: nn.Module) -> nn.Module:
        replica = original(module)
        if isinstance(vars(replica).get(NAME), SlotCall):
            del vars(replica)[NAME]
        return replica

    replicate._accel_original = original  # type: ignore[attr-defined]
    return replicate


def fill(module: nn.Module, call: Call) -> None:
    """Put a call in the slot."""
    original = nn.Module._replicate_for_data_parallel
    if not hasattr(original, "_accel_original"):
        nn.Module._replicate_for_data_parallel = _replicate_without_call(original)  # type: ignore[method-assign]
    # The dictionary itself, because torch.compile's wrapper module passes attributes on to the module inside.
    vars(module)[NAME] = call


def restore(module: nn.Module, contents: dict[str, Any]) -> None:
    """Put back what `contents` returned."""
    vars(module).pop(NAME, None)
    vars(module).update(contents)
