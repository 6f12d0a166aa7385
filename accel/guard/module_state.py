"""What a forward pass may change in a model, kept and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.dataio.batches import shape_of
from accel.guard import own_state
from accel.guard.nested_state import NestedState, entries_within

_OF_TENSORS = ("_buffers", "_parameters")
"""Dicts of a module in which its tensors stand."""
_MOST_IN_AN_ATTRIBUTE = 100
"""Tensors of a list or dict that are looked at: it may be a whole data set."""


class ModuleState:
    """What a forward pass may change in a model: buffers, generators, plain attributes such as counters and caches.

    Also which parameters stand in its modules: those of a codebook may be replaced in each call.

    Args:
        model: whose state this is.
        written: the parameters that its own call writes to.
    """

    def __init__(self, model: nn.Module, written: Iterable[Tensor] = ()) -> None:
        self._written = [(parameter, parameter.detach().clone()) for parameter in written]
        self._generators = own_state.states_of(own_state.generators_of(model))
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_lazy(buffer)]
        self._attributes = [(vars(module), _plain(vars(module))) for module in model.modules()]
        values = (value for _, state in self._attributes for value in state.values())
        self._within = NestedState(values, apart=(*model.parameters(), *model.buffers()))

    def restore(self) -> None:
        """Restore buffers and attributes; containers are refilled, so that they stay the same objects."""
        for attributes, state in self._attributes:
            for name in _plain(attributes).keys() - state.keys():
                del attributes[name]
            attributes.update(state)
        self._within.restore()
        # By `data`: the graphs of calls before, which may have saved them, go by their versions.
        for buffer, value in self._buffers:
            if shape_of(buffer) == shape_of(value):
                buffer.data.copy_(value)
            else:  # it has grown
                buffer.data = value.clone()
        for parameter, value in self._written:
            parameter.data.copy_(value)
        own_state.put_back(self._generators)

    def changed(self) -> tuple[list[tuple[dict[str, Any], str]], list[Tensor]]:
        """Return the attributes that hold others, or other entries, than before, and the tensors in them written to.

        Each attribute with the dictionary in which it stands.
        """
        containers, tensors = self._within.changed()
        attributes = [
            (owner, name)
            for owner, state in self._attributes
            for name, value in state.items()
            if owner.get(name) is not value
            or (containers and any(id(each) in containers for each, _ in entries_within(value)))
        ]
        return attributes, tensors


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in attributes.items() if n in _OF_TENSORS or not (n.startswith("_") or n == "training")}


def tensors_in_attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors that stand in plain attributes of modules, also in lists, tuples and dicts, by where they are.

    Args:
        model: after a call, in which it may have kept features.
    """
    return {
        f"{path}.{name}".lstrip("."): [each.detach() for each in values if isinstance(each, Tensor)]
        for path, module in model.named_modules()
        for name, attribute in _plain(vars(module)).items()
        if name not in _OF_TENSORS and (values := _values(attribute))
    }


def _values(attribute: Any) -> list[Any]:
    if isinstance(attribute, Tensor):
        return [attribute]
    if not isinstance(attribute, list | tuple | dict) or len(attribute) > _MOST_IN_AN_ATTRIBUTE:
        return []
    return list(attribute.values() if isinstance(attribute, dict) else attribute)
