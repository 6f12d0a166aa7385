"""intraop_threads: the number of threads one operator uses, against the processes that load data."""

from __future__ import annotations

from typing import Any

import torch

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.run.host_load import HostLoad
from accel.strategies.base import Exactness, Strategy
from accel.strategies.process_setting import ProcessSetting
from accel.strategies.trial_design import TrialDesign

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

    def __init__(self) -> None:
        self._watch = OtherProcesses()

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

    def trial_design(self, run: Run) -> TrialDesign:
        """Try it out of its turn, too, when other processes come or leave: its own watch of the host tells."""
        return TrialDesign(describe="threads={}".format, depends_on_host=True, watch=self._watch)


class OtherProcesses:
    """The other processes on the host, as far as they matter: they have come, or have left.

    Where the threads of an operator outnumber the free cores, each waits for the one that has none, however much the
    others spin: on two cores beside one busy process a step of ResNet-50 took 0.30 s with two threads and 0.13 s with
    one. Such a gain is far above the noise that other processes make, and gone, or a loss, as soon as they are.
    """

    def __init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was seen."""
        self.is_used = False
        self.are_here = False
        self.news: HostLoad | None = None
        self._shared, self._quiet = 0, 0
        self._needed, self._quiet_needed = 1, 1
        self._is_answered = False

    def see(self, load: HostLoad | None) -> None:
        """Take in a look at the host, None if there was none."""
        if load is None:
            return
        self.are_here = load.is_shared
        self._shared = self._shared + 1 if load.is_shared else 0
        self._quiet = self._quiet + 1 if load.is_quiet else 0
        if load.is_quiet:
            self._is_answered = False
            self.news = load if self.is_used and self._quiet >= self._quiet_needed else None
        elif self._shared >= self._needed and not self._is_answered:
            self._is_answered = True
            self.news = load

    def not_kept(self) -> None:
        """Act on others only after twice as many looks as before: those that come and go would cost a trial each."""
        self.is_used = False
        self._needed *= 2
        self._shared = 0
        self._is_answered, self.news = False, None

    def left_open(self) -> None:
        """Try again without fewer threads only after twice as many quiet looks as before."""
        self._quiet_needed *= 2
        self._quiet = 0
