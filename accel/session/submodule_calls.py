"""Which submodules the loop calls where it never calls the model itself: `self.net(x)` in a training step."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from accel.profiler.clocks import callslot


class SubmoduleCalls:
    """Record which submodules of `model` are called, for some steps.

    Args:
        model: a module; a compiled submodule is recorded as a whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._called: dict[str, None] = {}
        self._original_slots: list[tuple[nn.Module, dict[str, Any]]] = []
        self._open("", model)

    def _open(self, prefix: str, module: nn.Module) -> None:
        for name, part in module.named_children():
            path = f"{prefix}{name}"
            slot = callslot.contents(part)
            self._original_slots.append((part, slot))
            inner = slot.get(callslot.NAME)
            call = part._call_impl if inner is None else inner
            callslot.fill(part, callslot.SlotCall(partial(self._note, path, call)))
            if inner is None and not hasattr(part, "_orig_mod"):
                self._open(f"{path}.", part)

    def _note(self, path: str, call: callslot.Call, *args: Any, **kwargs: Any) -> Any:
        self._called.setdefault(path)
        return call(*args, **kwargs)

    def close(self) -> list[str]:
        """Restore the submodules, and return the paths of those that the loop itself called."""
        for part, slot in reversed(self._original_slots):
            callslot.restore(part, slot)
        self._original_slots = []
        outer = [path for path in self._called if not any(path.startswith(f"{other}.") for other in self._called)]
        return outer


def advice(model: nn.Module, parts: list[str]) -> str:
    """Return what to pass in place of a model that is never called itself."""
    name = type(model).__name__
    if not parts:
        return (
            f"the training steps call neither {name} nor a part of it, or call it within a function that is compiled; "
            "pass the module that they call"
        )
    if len(parts) == 1:
        return f"the training steps call {name}'s {parts[0]}, never {name} itself; pass model.{parts[0]}"
    names = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) <= 4 else f"{', '.join(parts[:3])} and others"
    return (
        f"the training steps call {name}'s {names}, never {name} itself; pass one of them (model.{parts[0]}), or call "
        "them in its forward, and call the model"
    )
