"""Keep torch's compiler out of functions that are called in a loop's step, which may be compiled as a whole.

`torch._dynamo.disable` does so by a wrapper, which costs 0.4 µs a call, and imports the compiler. These functions are
marked instead, as that wrapper is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

from accel.profiler.interruptions import ACCEL, Tolerated

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Mark a function or method of accel: the compiler calls it as it is, and looks into nothing that it calls."""
    own: Any = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(own, FunctionType) and own.__code__.co_filename.startswith(ACCEL):
        own._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is it a part of its caller's graph
        with Tolerated("a function can't be kept from torch's compiler"):  # in a torch that has this otherwise
            skip: Any = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(own.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
