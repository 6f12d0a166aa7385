"""Calls that Ctrl-C may leave half done, at any line, and what mends it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from accel.profiler.interruptions import ours


class Mendable(Protocol):
    """What can be put in order after an interruption.

    Attributes:
        served: number of the next batch.
        broken: whether something was left half done.
    """

    served: int
    broken: bool

    def mend(self, handed: int | None = None) -> None:
        """Put it in order; the batches from number `handed` on have not reached the loop."""


_S = TypeVar("_S", bound=Mendable)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def mended(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Have what an interruption leaves half done mended, at once or, if that was interrupted too, by the next call."""

    @functools.wraps(method)
    def call(self: _S, /, *args: _P.args, **options: _P.kwargs) -> _R:
        handed = self.served
        try:
            if self.broken:
                self.mend()
            return method(self, *args, **options)
        except ours():
            raise
        except BaseException:
            self.broken = True
            self.mend(handed)
            raise

    return call
