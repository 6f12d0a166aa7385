"""SIGTERM in a loader's worker processes: they go on while the loop does, until it has saved.

Schedulers, `timeout` and torchrun's agent send SIGTERM to all processes of a group at once. A worker that it ended
would be an exception in the loop, in the midst of the step after which the checkpoint is saved; several ranks take some
more steps until they have met. So a worker takes SIGTERM from the loop's process alone, as torch sends it to one that
does not end when it should; and it ends, as torch's workers do anyway, soon after that process is gone.

Nothing but who has sent a signal tells the two apart, and Python's handlers don't get to know that. So it is blocked,
and a thread waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial

_TERMINATION = {signal.SIGTERM}
_LOOKS_S = 1.0
"""Between two looks whether the loop's process is there, once somebody else wants the worker to end."""
_guarded = 0
"""The process in which the thread waits; one that is forked from it has none."""


def outliving(init: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return a `worker_init_fn` that does the same as another one, in workers that only this process ends.

    Where the system does not tell who has sent a signal, as macOS, workers end by any.

    Args:
        init: the loader's own; None if it has none.

    Example:
        >>> loader = DataLoader(dataset, num_workers=2, worker_init_fn=outliving(None))
    """
    return partial(_begin_worker, init, os.getpid())


def _begin_worker(init: Callable[[int], None] | None, loop: int, number: int) -> None:
    global _guarded
    is_main = threading.current_thread() is threading.main_thread()
    tells = hasattr(signal, "sigwaitinfo")
    if tells and is_main and os.getpid() not in (loop, _guarded):  # a worker may also be a thread of the loop's process
        _guarded = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATION)
        thread = threading.Thread(
            target=_await_end, args=(loop, os.getppid()), name="accel-worker-sigterm", daemon=True
        )
        thread.start()
    if init is not None:
        init(number)


def _await_end(loop: int, parent: int) -> None:
    sender = signal.sigwaitinfo(_TERMINATION).si_pid
    while sender != loop and os.getppid() == parent:
        information = signal.sigtimedwait(_TERMINATION, _LOOKS_S)
        sender = 0 if information is None else information.si_pid
    os._exit(0)  # as torch's own handler does when the loop's process has sent it
