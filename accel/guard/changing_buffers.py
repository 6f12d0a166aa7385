"""What a model's own call changes in it: running statistics, counters. Found by looking, so that little is copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# A look copies the buffers; a few show what moves in every call.
_LOOKS = 8
_ELEMENTS = 1_000_000
_SCALARS = (int, float, bool, str, type(None))


class ChangingBuffers:
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
        self._copies: dict[int, Tensor] = {}
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

    def saved(self) -> list[Any]:
        """Copy all that moves, and return what `restore` wants; there is one copy, the latest."""
        known = zip(self._buffers.values(), self._copies.values(), strict=False)
        if len(self._copies) != len(self._buffers) or any(b.shape != c.shape for b, c in known):
            self._copies = {number: buffer.clone() for number, buffer in self._buffers.items()}
        else:
            _copy(self._copies.values(), self._buffers.values())
        return [owner.get(name) for (_, name), owner in self._attributes.items()]

    def restore(self, saved: list[Any]) -> None:
        """Put back what was copied last."""
        _copy(self._buffers.values(), self._copies.values())
        for ((_, name), owner), value in zip(self._attributes.items(), saved, strict=True):
            owner[name] = value


def _copy(to: Iterable[Tensor], start: Iterable[Tensor]) -> None:
    """Copy tensors, a call for each kind: one by one, a hundred of BatchNorm's take 0.5 ms on a GPU."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(to, start, strict=True):
        if one.shape != other.shape:
            continue  # it was given another size meanwhile: there is nothing to put back
        ones, others = kinds.setdefault((one.dtype, one.device), ([], []))
        ones.append(one)
        others.append(other)
    with torch.no_grad():
        for ones, others in kinds.values():
            torch._foreach_copy_(ones, others)
