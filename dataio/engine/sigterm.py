"""SIGTERM where worker processes are started: one that answers it itself has no thread that would die of it.

The system gives a signal to any thread that does not block it, and a thread begins with the mask of the one that starts
it, a process too. A worker has a thread before its `worker_init_fn` is called, and more where it first imports
libraries. So SIGTERM is blocked by the process that starts it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

TERMINATION = frozenset({signal.SIGTERM})


def is_answered(init: Any) -> bool:
    """Return whether a `worker_init_fn` has its worker answer SIGTERM: it says so, by `answers_sigterm = True`."""
    return getattr(init, "answers_sigterm", False) is True


@contextlib.contextmanager
def blocked(start_method: str) -> Iterator[None]:
    """Block SIGTERM in this thread, and in what it starts meanwhile; one that comes is taken afterwards.

    Args:
        start_method: of the processes to be started.

    Example:
        >>> with blocked("fork"):
        ...     process.start()
    """
    if start_method == "spawn":
        resource_tracker.ensure_running()  # by the first process it would be now, and older Pythons then unblock
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
