"""SIGTERM and a loader's worker processes: they live on while the loop does, until it has saved.

`timeout` and torchrun's agent send SIGTERM to all processes of a group at once. A worker that it ended would be an
exception in the loop, in the midst of the step after which the checkpoint is saved; several ranks take some more steps
until they have met. So each worker has a process group of its own. It ends, as torch's workers do anyway, when the
loop's process tells it to, and soon after that process is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable


class OutlivingInit:
    """A `worker_init_fn`, see `outliving`.

    Args:
        init: does what else is to be done.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init, self._loop = init, os.getpid()

    def __call__(self, number: int) -> None:
        """Begin worker `number`, which may also be a thread of the loop's process."""
        if os.getpid() != self._loop:
            with contextlib.suppress(OSError):  # a process that leads a session has a group of its own
                os.setpgid(0, 0)
        if self.init is not None:
            self.init(number)


def outliving(init: Callable[[int], None] | None = None) -> OutlivingInit:
    """Return a `worker_init_fn` that does the same as another one, in workers that no signal to the loop's group ends.

    Args:
        init: the loader's own; None if it has none.

    Example:
        >>> loader = DataLoader(dataset, num_workers=2, worker_init_fn=outliving())
    """
    return OutlivingInit(init)
