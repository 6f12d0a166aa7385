"""Going on with another number of ranks, in the processes that stay: no process is started anew, no sample lost.

    all ranks    agree that it can be, and save a checkpoint after the step under way
    some         leave: their processes end, with status 0
    the others   form the group anew, with those that have come (`joining`), and go on from that checkpoint, in the loop
                 and in the pass over the loader that they are in

So what follows is what follows a start on so many ranks, without the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic import regroup
from accel.elastic.resize_orders import SEEN, Meeting, ResizeOrder, ResizeOrders
from accel.profiler.interruptions import ours
from accel.run.ranks import Ranks

_ADDRESS = "127.0.0.1"
"""Orders are given on one machine."""
_SAVING_S = 30.0
"""That rank 0 may write for, after the others: twice as much is waited for."""


_before: Ranks | None = None
"""The ranks before the last change."""


class InPlace:
    """Carry out the orders of a job.

    Args:
        orders: of the job.
        model: of the loop.
        optimizer: of the model.
        sampler: of its loader.
        restart: ends what accel does with the model, calls what it is given, and begins anew, from the checkpoint.
        say: prints one line for the user.
    """

    def __init__(
        self,
        orders: ResizeOrders,
        model: nn.Module,
        optimizer: Optimizer,
        sampler: ElasticSampler,
        restart: Callable[[Callable[[], None]], None],
        say: Callable[[str], None],
    ) -> None:
        self._orders, self._model, self._optimizer, self._sampler = orders, model, optimizer, sampler
        self._restart, self._say = restart, say
        self._done = int(os.environ.get(SEEN, "0"))  # not the newest: it may have come while this run began
        self._store: Any = None
        """On rank 0: of the group to be."""
        self._meeting: Meeting | None = None
        """Of that, once the ranks have agreed on it."""
        self._began = 0.0
        self.proxy: LoaderProxy | None = None
        """Of the loader; known once the run follows it."""

    def seen(self) -> ResizeOrder:
        """Return the newest order."""
        return self._orders.order()

    def is_due(self, order: ResizeOrder) -> bool:
        """Return whether an order, as all ranks know it, is to be carried out here: not where an epoch ends.

        A process that has come would begin with a pass without a batch.
        """
        if order.number <= self._done or order.ranks <= 0:
            return False
        step = order.ranks * self._sampler.batch_sizes[self._sampler.rank]
        return self._sampler.steps_left > 0 and self._sampler.length - self._sampler.position >= step

    def agree(
        self, order: ResizeOrder, ranks: Ranks, save: Callable[[], bool], is_told_to_end: Callable[[], bool]
    ) -> bool:
        """Save, and return whether the ranks go on as ordered; all of them call it, between two steps.

        Args:
            order: the same on all ranks.
            ranks: that train now.
            save: saves a checkpoint, and returns on rank 0 whether it could.
            is_told_to_end: returns whether this process was sent SIGTERM.

        Raises:
            RuntimeError: if a rank does not come; nothing has been changed then.
        """
        self._done, self._began, self._store = order.number, time.monotonic(), None
        try:
            problem, self._meeting = self._agreed(order, ranks, save, is_told_to_end)
        except ours() as error:
            self._refuse(order, ranks, f"{type(error).__name__}: {error}")
            raise
        if self._meeting is None:
            self._refuse(order, ranks, problem)
        return self._meeting is not None

    def _refuse(self, order: ResizeOrder, ranks: Ranks, problem: str) -> None:
        if ranks.leads:
            self._orders.answer(order.number, problem)
            self._say(f"the ranks stay as they are: {problem}")

    def _agreed(
        self, order: ResizeOrder, ranks: Ranks, save: Callable[[], bool], is_told_to_end: Callable[[], bool]
    ) -> tuple[str, Meeting | None]:
        assert self.proxy is not None
        underway = self.proxy._accel_fetching.underway
        own = regroup.reason_against(self._model, self._optimizer, self._sampler, underway)
        problem: str = ranks.decide(own, lambda brought: next(filter(None, brought), ""), "did not come to resize")
        if problem:
            return problem, None
        is_saved = save()

        def answer(ends: list[bool]) -> tuple[str, Meeting | None]:
            if not is_saved:
                return "no checkpoint could be saved", None
            if any(ends):
                return "it was told to end", None
            self._store, port = regroup.open_store(_ADDRESS)
            meeting = Meeting(_ADDRESS, port, regroup.backend())
            self._orders.meet_at(order.number, meeting)
            if not regroup.all_here(self._store, range(ranks.size, order.ranks)):
                return "an added process has not come to the group", None
            return "", meeting

        return ranks.decide(is_told_to_end(), answer, "did not come to resize", _SAVING_S)

    def change(self, order: ResizeOrder, ranks: Ranks) -> None:
        """Go on as the ranks have agreed; an error ends the loop, since half a group can't go on.

        Raises:
            SystemExit: on ranks that leave.
        """
        assert self._meeting is not None
        if ranks.rank >= order.ranks:
            raise SystemExit(0)
        global _before
        _before = ranks  # its store is this process's: a rank that leaves may still look into it
        os.environ[SEEN] = str(order.number)
        rank, backend = ranks.rank, self._meeting.backend
        store = self._store or regroup.store_of(self._meeting)
        if ranks.leads:
            regroup.let_go(store)

        def form() -> None:
            regroup.form(self._model, store, order.number, rank=rank, size=order.ranks, backend=backend)
            self._sampler.share_among(order.ranks, rank)

        self._restart(form)
        if rank == 0:
            self._orders.answer(order.number, "")
            self._say(f"{ranks.size} ranks are {order.ranks} now, after {time.monotonic() - self._began:.2f} s")
