"""What a recording has done to the state of optimizers: only what is written in place goes on in replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer


class OptimizerStates:
    """The states of optimizers as they were when this was made.

    Args:
        optimizers: whose states these are.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._before: list[dict[Any, Any]] = [
            {key: dict(own) if isinstance(own, dict) else own for key, own in optimizer.state.items()}
            for optimizer in optimizers
        ]

    def check(self) -> None:
        """Raise RuntimeError if an entry has come, or has been replaced: each replay would begin with the old one."""
        for name, _, _ in self._changes():
            raise RuntimeError(f"an optimizer's state must be written to in place. Found: {name!r} was replaced")

    def have_more(self) -> bool:
        """Return whether there are entries that were not there: optimizers make them in their first step."""
        return any(before is None for _, before, _ in self._changes())

    def put_back(self) -> None:
        """Make the states what they were, but for what was written in place."""
        for optimizer, known in zip(self._optimizers, self._before, strict=True):
            for key in [key for key in optimizer.state if key not in known]:
                del optimizer.state[key]
            for key, own in known.items():
                optimizer.state[key] = dict(own) if isinstance(own, dict) else own

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


def _is_same_number(now: Any, before: Any) -> bool:
    return isinstance(now, bool | int | float | str) and type(now) is type(before) and bool(now == before)
