"""Tell an error that a strategy may have caused from one of the loop's own, by the frames that it came through.

raised in a strategy's code, torch's compilers, or what they have made      a strategy's
an operator or a module of torch failed within the model                    either's: a weight may lie otherwise now
raised by the model, its hooks and what they call, checks of torch's too    the loop's
an operator of Python's that knows no such operands (`None + 1`)            the loop's
an interruption (`accel.profiler.interruptions`), a class of the loop's     the loop's
"""

from __future__ import annotations

import sys

from accel.profiler import interruptions

_COMPILERS = ("_dynamo", "_inductor", "_functorch", "fx")
_INTO_THE_MODEL = ("nn.modules.module", "_library.custom_ops")
"""Modules of torch that call what is written for the model."""
_CHECKS = ("torch.testing", "torch._assert")
_OF_PYTHON = ("unsupported operand type", "object is not", "object does not")
_OF_OPERATORS = (RuntimeError, TypeError, AssertionError, MemoryError)
"""What operators and modules raise for other dtypes, strides and room than they can do with."""


def of_strategies() -> tuple[type[Exception], ...]:
    """Return what an `except` clause around a call under strategies is to catch: what they may have caused."""
    error = sys.exc_info()[1]
    return interruptions.ours() if isinstance(error, Exception) and may_be_of_strategies(error) else ()


def may_be_of_strategies(error: Exception) -> bool:
    """Tell whether strategies may have caused an error in a call that went through them."""
    if interruptions.is_of_the_loop(type(error)):
        return False
    at, whose = error.__traceback__, "strategy"
    is_raised = False
    while at is not None:
        place, module = interruptions.place_of(at.tb_frame), at.tb_frame.f_globals.get("__name__", "")
        inside = module.removeprefix("torch.")
        if place == "accel" or (place == "torch" and inside.split(".")[0] in _COMPILERS):
            whose = "strategy"
        elif place == "torch" and (whose == "loop" or inside in _INTO_THE_MODEL):
            is_a_check = f"{module}.{at.tb_frame.f_code.co_name}".startswith(_CHECKS)
            whose = "loop" if whose == "loop" and is_a_check else "torch"
        elif place == "loop" and whose == "torch":
            whose = "loop"
        is_raised, at = interruptions.is_raised(at), at.tb_next
    if whose == "strategy":
        return True
    is_the_loops = whose == "loop" and (is_raised or _is_of_python(error))
    return isinstance(error, _OF_OPERATORS) and not is_the_loops


def _is_of_python(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, TypeError) and "Tensor" not in text and any(part in text for part in _OF_PYTHON)
