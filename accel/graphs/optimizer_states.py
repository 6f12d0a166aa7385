"""What a recording has done to the state of optimizers: only what is written in place goes on in replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.graphs.module_states import LeftBehind


class OptimizerStates:
    """The states of optimizers as they were when this was made.

    Args:
        optimizers: whose states these are.
        device: that is recorded for. What the host does with tensors on the CPU is done at once, and in no replay.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._before: list[dict[Any, Any]] = [
            {key: dict(own) if isinstance(own, dict) else own for key, own in optimizer.state.items()}
            for optimizer in optimizers
        ]
        self._dicts = [dict(optimizer.state) for optimizer in optimizers]
        self._on_host: list[tuple[str, Tensor, int, Tensor]] = []
        if device.type != "cpu":
            own = [each for known in self._before for each in known.values() if isinstance(each, dict)]
            named = [(str(name), value) for each in own for name, value in each.items() if _is_on_host(value)]
            self._on_host = [(name, value, value._version, value.clone()) for name, value in named]

    def check(self) -> None:
        """Raise if an entry has come, or has been replaced: each replay would begin with the old one.

        Raises:
            RuntimeError: if so.
            LeftBehind: if a tensor on the CPU was written to.
        """
        for name, _, _ in self._changes():
            raise RuntimeError(f"an optimizer's state must be written to in place. Found: {name!r} was replaced")
        for name, value, version, _ in self._on_host:
            if value._version != version:
                raise LeftBehind(
                    f"its optimizer writes to a tensor on the CPU ({name!r} in its state), which no replay does; take "
                    "one that keeps it on the device (capturable=True or fused=True)"
                )

    def have_more(self) -> bool:
        """Return whether there are entries that were not there: optimizers make them in their first step."""
        return any(before is None for _, before, _ in self._changes())

    def put_back(self) -> None:
        """Make the states what they were, but for what was written in place on the device."""
        for optimizer, known, dicts in zip(self._optimizers, self._before, self._dicts, strict=True):
            for key in [key for key in optimizer.state if key not in known]:
                del optimizer.state[key]
            for key, own in known.items():
                optimizer.state[key] = dicts[key]  # the same one, by which graphs know the state
                if isinstance(own, dict):
                    dicts[key].clear()
                    dicts[key].update(own)
        for _, value, version, content in self._on_host:
            if value._version != version:
                with torch.no_grad():
                    value.copy_(content)

    def _changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, before, now) of each entry that is another object, None where there was none."""
        for optimizer, known in zip(self._optimizers, self._before, strict=True):
            for key, own in optimizer.state.items():
                before = known.get(key, {})
                if not isinstance(own, dict) or not isinstance(before, dict):
                    if own is not before:
                        yield str(key), known.get(key), own
                    continue
                for name, now in own.items():
                    if now is not (one := before.get(name)) and not _is_same_number(now, one):
                        yield name, one, now


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_inference()


def _is_same_number(now: Any, before: Any) -> bool:
    return isinstance(now, bool | int | float | str) and type(now) is type(before) and bool(now == before)
