"""What a model's own call changes in it: running statistics, counters. Found by looking, so that little is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# A look copies the buffers; a few show what moves in every call.
_LOOKS = 8
_ELEMENTS = 1_000_000
_SCALARS = (int, float, bool, str, type(None))


class Moving:
    """Buffers and plain attributes of `model` that change from call to call.

    Args:
        model: what is looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looks = 0
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}
        self._values: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._buffers: dict[int, Tensor] = {}
        self._attributes: dict[tuple[int, str], dict[str, Any]] = {}

    def look(self) -> None:
        """Find out what has changed since the last look; a call of the model lies between."""
        if self._looks >= _LOOKS:
            return
        # By value: BatchNorm's statistics keep their version when they change.
        contents = {id(b): (b, b.detach().clone()) for b in self._model.buffers() if b.numel() <= _ELEMENTS}
        values = {
            (id(module), name): (vars(module), value)
            for module in self._model.modules()
            for name, value in vars(module).items()
            if name != "training" and isinstance(value, _SCALARS)
        }
        if self._looks:
            before = self._contents
            self._buffers |= {i: b for i, (b, c) in contents.items() if i in before and not c.equal(before[i][1])}
            self._attributes |= {
                k: owner for k, (owner, value) in values.items() if self._values.get(k, (owner, value))[1] != value
            }
        self._looks, self._contents, self._values = self._looks + 1, contents, values
        if self._looks == _LOOKS:
            self._contents, self._values = {}, {}

    def saved(self) -> tuple[list[Tensor], list[Any]]:
        """Return copies of all that moves."""
        attributes = [owner.get(name) for (_, name), owner in self._attributes.items()]
        return [buffer.clone() for buffer in self._buffers.values()], attributes

    def restore(self, saved: tuple[list[Tensor], list[Any]]) -> None:
        """Put back what `saved` returned."""
        with torch.no_grad():
            for buffer, value in zip(self._buffers.values(), saved[0], strict=True):
                buffer.copy_(value)
        for ((_, name), owner), value in zip(self._attributes.items(), saved[1], strict=True):
            owner[name] = value
