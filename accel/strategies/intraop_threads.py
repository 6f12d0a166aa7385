"""intraop_threads: the number of threads one operator uses, against the processes that load data."""

from __future__ import annotations

from typing import Any

import torch

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.process_setting import ProcessSetting

_THREADS = ProcessSetting(torch.get_num_threads, torch.set_num_threads)


class IntraopThreads(Strategy):
    """Set `torch.set_num_threads`.

    Small operators lose more to waking threads than they win, and loader workers want a core of their own. Another
    number of threads splits sums elsewhere, hence `reordered`.
    """

    name = "intraop_threads"
    summary = "fewer threads per operator"
    treats = frozenset({Bottleneck.COMPUTE, Bottleneck.INPUT, Bottleneck.LAUNCH})
    exactness = Exactness.REORDERED
    host_dependent = True
    frees_cores = True

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: another device, another model, or nothing to choose from."""
        if run.device.type != "cpu":
            return "the model's operators run on the " + run.device.type.upper()
        if _THREADS.is_used_beside(self):
            return "another model has set the number of threads, which is that of the process"
        if not self.settings(run):
            return f"there is only {_THREADS.displaced()} thread to choose from"
        return ""

    def settings(self, run: Run) -> list[Any]:
        """Return as many as other processes leave cores, one thread less (a core for the loader), half, and one."""
        free = run.cores if run.observed.free_cores is None else run.observed.free_cores
        now = _THREADS.displaced()  # the loop may have set another number since the run began
        wanted = [free, now - 1, now // 2, 1]
        return [n for i, n in enumerate(wanted) if 1 <= n < now and n not in wanted[:i]]

    def enable(self, run: Run, setting: Any) -> None:
        """Set the number of threads."""
        run.threads = _THREADS.displaced()
        _THREADS.use(self, setting)

    def disable(self, run: Run) -> None:
        """Set the number that another model wants, or that was set before, unless the loop has set one meanwhile."""
        _THREADS.leave(self)

    def describe(self, setting: Any) -> str:
        """Return `threads=n`."""
        return f"threads={setting}"
