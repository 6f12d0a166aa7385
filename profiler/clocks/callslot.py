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
    """What lies in the slot: a partial, because calling one costs 30 ns, a class of our own ten times that.

    Copies of it are None, so that a copy of the module is plain. `nn.Module` leaves the slot out of copies, but a class
    with a `__getstate__` or `__deepcopy__` of its own may not: its copy would then go on calling the module it was
    copied from.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def held(module: nn.Module) -> dict[str, Any]:
    """Return the slot as the module's own dictionary holds it: empty, or one entry."""
    return {name: call for name, call in vars(module).items() if name == NAME}


def _replicate_without_call(original: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return `nn.Module._replicate_for_data_parallel` whose replicas have no call of ours.

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
    """Put a call into the slot."""
    found = nn.Module._replicate_for_data_parallel
    if not hasattr(found, "_accel_original"):
        nn.Module._replicate_for_data_parallel = _replicate_without_call(found)  # type: ignore[method-assign]
    # The dictionary itself, because torch.compile's wrapper module passes attributes on to the module inside.
    vars(module)[NAME] = call


def restore(module: nn.Module, found: dict[str, Any]) -> None:
    """Put back what `held` returned."""
    vars(module).pop(NAME, None)
    vars(module).update(found)
