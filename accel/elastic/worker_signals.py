"""SIGTERM in a loader's worker processes: they go on while the loop does, until it has saved.

Schedulers, `timeout` and torchrun's agent send SIGTERM to all processes of a group at once. A worker that it ended
would be an exception in the loop, in the midst of the step after which the checkpoint is saved; several ranks take some
more steps until they have met. So a worker takes SIGTERM from the loop's process alone, as torch sends it to one that
does not end when it should; and it ends, as torch's workers do anyway, soon after that process is gone.

Nothing but who has sent a signal tells the two apart, and Python's handlers don't get to know that. So it is blocked,
and a thread waits for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess

from accel.dataio.engine.sigterm import TERMINATION, blocked

_TELLS = hasattr(signal, "sigwaitinfo")
"""The system tells who has sent a signal."""
_LOOKS_S = 1.0
"""Between two looks whether the loop's process is there, once somebody else wants the worker to end."""
_guarded = 0
"""The process in which the thread waits; one that is forked from it has none."""


class OutlivingInit:
    """A `worker_init_fn`, see `outliving`.

    Args:
        init: does what else is to be done.
        loop: process that may end the workers, beside the one that has started them.
    """

    answers_sigterm = _TELLS  # see `accel.dataio.engine.sigterm`

    def __init__(self, init: Callable[[int], None] | None, loop: int) -> None:
        self.init, self._loop = init, loop

    def __call__(self, number: int) -> None:
        """Begin worker `number`, which may also be a thread of the loop's process."""
        global _guarded
        is_main = threading.current_thread() is threading.main_thread()
        if _TELLS and is_main and os.getpid() not in (self._loop, _guarded):
            _guarded = os.getpid()
            signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)
            arguments = self._loop, os.getppid()
            threading.Thread(target=_await_end, args=arguments, name="accel-worker-sigterm", daemon=True).start()
        if self.init is not None:
            self.init(number)


def outliving(init: Callable[[int], None] | None = None) -> OutlivingInit:
    """Return a `worker_init_fn` that does the same as another one, in workers that only the loop's process ends.

    Where the system does not tell who has sent a signal, as macOS, workers end by any.

    Args:
        init: the loader's own; None if it has none.

    Example:
        >>> loader = DataLoader(dataset, num_workers=2, worker_init_fn=outliving())
    """
    return OutlivingInit(init, os.getpid())


def _await_end(loop: int, parent: int) -> None:
    sender = signal.sigwaitinfo(TERMINATION).si_pid
    while sender not in (loop, parent) and os.getppid() == parent:
        information = signal.sigtimedwait(TERMINATION, _LOOKS_S)
        sender = 0 if information is None else information.si_pid
    os._exit(0)  # as torch's own handler does when the loop's process has sent it


class BlockedSpawnProcess(SpawnProcess):
    """A process that is started with SIGTERM blocked."""

    def start(self) -> None:
        """Start the process."""
        with blocked("spawn"):
            super().start()


class BlockedSpawn(SpawnContext):
    """Starts processes by spawn with SIGTERM blocked, in the threads of the libraries that they import too."""

    Process = BlockedSpawnProcess


def outliving_context(context: BaseContext | None) -> BaseContext | None:
    """Return the context in which workers with an `outliving` function are started, in place of a loader's own.

    Args:
        context: of the loader; None for the default one.
    """
    # Asking for the default context would settle which one it is.
    is_spawn = context is None and multiprocessing.get_start_method(allow_none=True) == "spawn"
    return BlockedSpawn() if _TELLS and (is_spawn or type(context) is SpawnContext) else context
