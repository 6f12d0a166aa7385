"""Checkpoints of a model with 16-bit weights: float32 under the usual names, as if it were trained in float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel.amp.masters import MasterWeights

_HALF = frozenset({torch.float16, torch.bfloat16})


class Float32Checkpoint:
    """Hooks of a decorated model's modules: they save master weights, and load them without rounding.

    So a checkpoint of any level can be loaded into a model of any other, bit for bit. 16-bit weights without masters
    are saved in float32, too.

    Args:
        optimizers: masters of those that train the model.
    """

    def __init__(self, optimizers: Iterable[MasterWeights] = ()) -> None:
        self._optimizers = list(optimizers)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # no optimizer trains a copy of the model

    def register(self, model: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on a model's modules, and return what takes them off."""
        modules: Iterable[Any] = model.modules()
        handles: list[RemovableHandle] = []
        for module in modules:
            handles.append(module.register_state_dict_post_hook(self))  # an object: torch leaves a mark on it
            handles.append(module.register_load_state_dict_pre_hook(self.load))
        return handles

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Put float32 values into the state of one module."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = f"{prefix}{name}"
            if tensor is not None and tensor.dtype in _HALF and key in state_dict:
                master = next((m for m in (each.of(tensor) for each in self._optimizers) if m is not None), None)
                state_dict[key] = tensor.detach().float() if master is None else master

    def load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Set the master weights of one module's parameters before torch sets these."""
        for name, p in module._parameters.items():
            value = state_dict.get(f"{prefix}{name}")
            if p is not None and isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point():
                for each in self._optimizers:
                    each.take(p, value.to(p.device))
