"""The base of accel's errors, where every folder can have it; `accel.errors` has the tree."""

from __future__ import annotations


class AccelError(Exception):
    """Base class of every error that accel raises on purpose."""


class InvalidArgument(AccelError, ValueError):
    """An argument of a public call breaks its contract; the text names the remedy."""


class InvalidType(InvalidArgument, TypeError):
    """An argument of a public call is of another kind than its contract says; the text names the remedy."""


class InvalidState(AccelError, RuntimeError):
    """A call comes when it can't be answered, or what was called has failed; the text says why."""


def check_numbers(**values: object) -> None:
    """Raise InvalidType for a value that is neither a number nor None; "4" is none, and torch may take it for one."""
    for name, value in values.items():
        if value is not None and not hasattr(value, "__float__"):
            raise InvalidType(f"{name} must be a number, got {value!r}; pass it without quotes or brackets")


for _kind in (AccelError, InvalidArgument, InvalidType, InvalidState):
    _kind.__module__ = "accel"  # as tracebacks name them
