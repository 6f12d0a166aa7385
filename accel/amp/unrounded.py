"""Values of an optimizer's state that are loaded as they are: torch would round them to their parameter's dtype."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class Unrounded:
    """Holds a value, tensors in lists and dicts too, that torch can't look into."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def opened(self, like: Tensor) -> Any:
        """Return a copy of the value, on the device of master weights `like` and in their dtype."""

        def moved(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            dtype = like.dtype if part.is_floating_point() else part.dtype
            return part.to(like.device, dtype, copy=True)

        return pytree.tree_map(moved, self._value)


def sealed(state_dict: dict[str, Any], params: Sequence[Tensor], chosen: Collection[Tensor]) -> dict[str, Any]:
    """Return an optimizer's state with the values of some parameters held, but for their step counters.

    Args:
        state_dict: that is loaded.
        params: of the optimizer, in the order of its groups.
        chosen: those whose values are held.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    held = {key for key, p in zip(keys, params, strict=False) if p in chosen}
    state = {key: _sealed_values(own) if key in held else own for key, own in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _sealed_values(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name == "step" else Unrounded(value) for name, value in own.items()}


def opened(own: dict[str, Any], like: Tensor) -> None:
    """Put the values back that were held, in the state of one parameter."""
    for name, value in own.items():
        own[name] = value.opened(like) if isinstance(value, Unrounded) else value
