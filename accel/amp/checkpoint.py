"""Checkpoints of a model with 16-bit weights: float32 under the usual names, as if it were trained in float32."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel.amp.masters import MasterWeights

_HALF = frozenset({torch.float16, torch.bfloat16})


class _Given(NamedTuple):
    """A float32 copy that is in somebody's state, and how often it had been written to."""

    of: weakref.ref[Tensor]
    value: Tensor
    version: int


class Float32Checkpoint:
    """Hooks of a decorated model's modules: they save master weights, and load them without rounding.

    So a checkpoint of any level can be loaded into a model of any other, bit for bit. 16-bit weights without masters
    are saved in float32, too.

    Args:
        optimizers: masters of those that train the model.
    """

    def __init__(self, optimizers: Iterable[MasterWeights] = ()) -> None:
        self._optimizers = list(optimizers)
        self._given: _Given | None = None
        """The smallest of the values that were given away and are nobody's memory: not to keep all for a warning."""
        self._has_warned = False

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
                master = next((m for m in (each.follow(tensor) for each in self._optimizers) if m is not None), None)
                state_dict[key] = self._given_away(tensor, key) if master is None else master

    def _given_away(self, tensor: Tensor, key: str) -> Tensor:
        """Return a float32 copy, and warn if the one before was written to, as a moving average does."""
        value, known = tensor.detach().float(), self._given
        if value.is_inference():  # torch counts no writes to it
            return value
        same = known is not None and known.of() is tensor
        if known is not None and same and known.value._version != known.version:
            self._warn(key)
        if known is None or same or value.numel() < known.value.numel():
            self._given = _Given(weakref.ref(tensor), value, value._version)
        return value

    def _warn(self, key: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"accel.amp: {key} of state_dict() was written to, which changes nothing: of 16-bit weights without "
                "master weights, as those of a copy, it holds float32 copies. Make a moving average of the model "
                "before decorate, or write to parameters() and buffers()",
                RuntimeWarning,
                stacklevel=2,
            )

    def load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Set the master weights of one module's parameters before torch sets these."""
        self._given = None  # what was written to it may be what is loaded
        for name, p in module._parameters.items():
            value = state_dict.get(f"{prefix}{name}")
            if p is not None and isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point():
                for each in self._optimizers:
                    each.take(p, value.to(p.device))
