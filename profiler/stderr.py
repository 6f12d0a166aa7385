"""A line for the user, on stderr: what is said there must not end a run that has none, or has closed it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator


def write(text: str, end: str = "\n") -> None:
    """Write to stderr at once; as in Python itself, nothing comes of it if there is none, or the script has closed it.

    Nor if writing fails in any other way: a script may put an object of its own in the place of stderr.
    """
    if sys.stderr is not None:  # print() would write to stdout then
        with contextlib.suppress(Exception):
            print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def none_if_closed() -> Iterator[None]:
    """Have no stderr in place of one that the script has closed or detached: libraries that log would raise."""
    is_closed = True  # or detached: then even asking raises
    with contextlib.suppress(ValueError):
        is_closed = getattr(sys.stderr, "closed", False)
    with contextlib.redirect_stderr(None) if is_closed else contextlib.nullcontext():
        yield


def warn(text: str, stacklevel: int) -> None:
    """Warn the user; where Python raises instead (`-W error`), the text goes to stderr, and the run goes on."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except Warning:
        write(f"accel: {text}")
