"""What captured steps and models share: which calls run eagerly, why, and what a capture that fails leaves."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from accel.device_memory import give_memory_back
from accel.errors import AccelError
from accel.graphs.obstacles import NotCapturable, StateMade
from accel.profiler.interruptions import ours

_T = TypeVar("_T")
MOST_COUNTED = 1024
_MOST_UNUSED = 4
"""Captures for the same arguments, none of which is replayed in a later call."""
_DIFFERS = (
    "where parameters, buffers or gradients lie differs each time; a buffer must be written to, and not replaced. Or a "
    "number of a module does: keep what each call changes in a buffer"
)
MANY = 64
MANY_KINDS = (
    f"{MANY} calls were of {MANY} kinds: inputs, where parameters and buffers lie, or numbers of modules or "
    "optimizers differ each time. What each call changes belongs into a buffer, and a learning rate into a tensor"
)


class CaptureError(AccelError):
    """A step or a model could not be captured; `why_not_capturable` names the line."""


class Captures:
    """Count captures and replays, and say why calls run eagerly.

    Args:
        what: is captured, a step or a model.
        strict: raise CaptureError in the place of a warning.
        say: is told why calls run eagerly, one sentence for each reason; default a warning.

    Attributes:
        captures: graphs captured so far.
        replays: calls that were replayed.
        why_eager: why calls run eagerly, one sentence for each reason.
    """

    def __init__(self, what: str, *, strict: bool, say: Callable[[str], None] | None = None) -> None:
        self.captures = self.replays = 0
        self.why_eager: list[str] = []
        self._what, self._strict, self._say_once = what, strict, say or warn
        self._unused: Counter[Hashable] = Counter()
        self._eager: set[Hashable] = set()

    def _attempt(self, key: Hashable, lasting: Hashable, record: Callable[[], _T]) -> _T | None:
        """Record; None where that fails, from then on for the key alone, or for a lasting reason for all like it."""
        is_out_of_memory = False
        try:
            return record()
        except StateMade:
            raise
        except NotCapturable as error:
            self._refuse(lasting, str(error))
        except ours() as error:
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._refuse(key, f"it could not be captured: {reason}; accel.graphs.why_not_capturable names the line")
        if is_out_of_memory:  # only here: the traceback held what was captured
            give_memory_back()
        return None

    def _note_capture(self, arguments: Hashable, lasting: Hashable) -> None:
        self.captures += 1
        self._unused[arguments] += 1
        if self._unused[arguments] > _MOST_UNUSED:
            self._refuse(lasting, _DIFFERS)

    def _note_replay(self, arguments: Hashable) -> None:
        self.replays += 1
        self._unused.pop(arguments, None)

    def _refuse(self, key: Hashable, reason: str, *, strict: bool = True) -> None:
        self._say(reason, strict=strict)
        if len(self._eager) >= MOST_COUNTED:
            self._eager.clear()
        self._eager.add(key)

    def _say(self, reason: str, *, strict: bool = True) -> None:
        if strict and self._strict:
            raise CaptureError(f"capture: the {self._what} can't be captured: {reason}")
        if reason not in self.why_eager:
            self.why_eager.append(reason)
            self._say_once(f"the {self._what} runs eagerly: {reason}")


def warn(text: Any) -> None:
    """Warn the caller of what was captured."""
    warnings.warn(f"accel.graphs.capture: {text}", RuntimeWarning, stacklevel=6)
