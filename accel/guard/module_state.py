"""What a forward pass may change in a model, kept and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.guard import own_state
from accel.guard.nested_state import NestedState


class ModuleState:
    """What a forward pass may change in a model: buffers, generators, plain attributes such as counters and caches.

    Args:
        model: whose state this is.
        written: the parameters that its own call writes to.
    """

    def __init__(self, model: nn.Module, written: Iterable[Tensor] = ()) -> None:
        self._written = [(parameter, parameter.detach().clone()) for parameter in written]
        self._generators = own_state.states_of(own_state.generators_of(model))
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_lazy(buffer)]
        self._attributes = [(vars(module), self._plain(vars(module))) for module in model.modules()]
        values = (value for _, state in self._attributes for value in state.values())
        self._within = NestedState(values, apart=(*model.parameters(), *model.buffers()))

    @staticmethod
    def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in attributes.items() if n == "_buffers" or not (n.startswith("_") or n == "training")}

    def restore(self) -> None:
        """Restore buffers and attributes; containers are refilled, so that they stay the same objects."""
        for attributes, state in self._attributes:
            for name in self._plain(attributes).keys() - state.keys():
                del attributes[name]
            attributes.update(state)
        self._within.restore()
        for buffer, value in self._buffers:
            buffer.detach().copy_(value)
        for parameter, value in self._written:
            parameter.data.copy_(value)  # as the model does; its version is that of the graphs there may be
        own_state.put_back(self._generators)
