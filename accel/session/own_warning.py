"""A warning of accel's own, which must not end a run in which warnings are made errors."""

from __future__ import annotations

import warnings

from accel.profiler import stderr


def warn(text: str, stacklevel: int) -> None:
    """Warn the user; where Python raises instead (`-W error`), the text goes to stderr.

    Args:
        text: what the user is told.
        stacklevel: as `warnings.warn` takes it, counted from the caller.
    """
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except Warning:
        stderr.write(f"accel: {text}")
