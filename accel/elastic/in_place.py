"""Going on with another number of ranks, in the processes that stay: none is started anew, no sample is lost.

    LocalJob     starts the processes that are added, and gives an order once they have come to accel.optimize
    all ranks    agree that it can be, and save a checkpoint after the step under way
    added        load it, and run their script up to its first pass over the loader
    leaving      end with status 0
    the others   leave their process group, form one anew on a new store, and go on from that checkpoint: those that
                 stay in the pass over the loader that they are in, those that are added in the one that they begin

Until then an added process has a process group of its own, of one rank. So what it exchanges comes from itself, and
what follows is what follows a start on so many ranks, without the start. Orders and answers are keys of a TCPStore that
`LocalJob` has opened:

    order        number and ranks       by LocalJob
    come-N-RANK                         by an added process, in accel.optimize
    group-N      port and backend       by rank 0, once it has saved: of the store on which the group is formed
    answer-N     problem                by rank 0: "" once the ranks train, else why they go on as they were
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.comm.selection import reducer
from accel.dataio.elastic_sampler import ElasticSampler, share_among
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.saving import bucket_order
from accel.errors import AccelError
from accel.profiler.interruptions import ours
from accel.run import ranks as run_ranks
from accel.run.ranks import Ranks

ORDERS, SEEN, RANK = "ACCEL_RESIZES", "ACCEL_RESIZES_SEEN", "ACCEL_RESIZES_RANK"
"""In the environment of a job: the port of its orders, the number of the last order that was given before a process
began or was carried out in it, and the rank that an added process is to be."""
_ADDRESS = "127.0.0.1"
_LOOK_S = 0.2
"""Between two looks for an order: a single rank would look at each step."""
_COME_S, _SAVING_S, _WAITS_S = 20.0, 30.0, 600.0
"""For added processes to come to their first pass; for rank 0 to write, beside the others; and for a process that is
added to be taken: LocalJob ends it if that takes too long."""

_ORDERS_S = timedelta(seconds=10)
"""For the store of the orders to answer."""

Restart = Callable[[Callable[[], None]], None]
"""Ends what accel does with the model, calls what it is given, and begins anew, from the checkpoint."""


class ResizeOrder(NamedTuple):
    """To go on with so many ranks."""

    number: int = 0
    """Of the orders, from 1; 0 is none."""
    ranks: int = 0


def _store_at(port: int) -> Any:
    return dist.TCPStore(_ADDRESS, port, is_master=False, timeout=_ORDERS_S)  # type: ignore[attr-defined]


def orders_of_job() -> Any:
    """Return the store of the orders that this process's job takes; None if it takes none, or who gave them is gone."""
    port = os.environ.get(ORDERS)
    with contextlib.suppress(RuntimeError):
        return _store_at(int(port)) if port else None
    return None


def open_store() -> Any:
    """Return a store of this process that others on this machine reach."""
    return dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def value_of(store: Any, key: str) -> str | None:
    """Return what a key has; None while it has nothing, or its process is gone."""
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


class InPlace:
    """Carry out the orders of a job; `is_alone` returns whether no other model is trained."""

    def __init__(
        self,
        orders: Any,
        model: nn.Module,
        optimizer: Optimizer,
        sampler: ElasticSampler,
        restart: Restart,
        is_alone: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._orders, self._model, self._optimizer, self._sampler = orders, model, optimizer, sampler
        self._restart, self._is_alone, self._say = restart, is_alone, say
        self._done = int(os.environ.get(SEEN, "0"))  # not the newest: it may have come while this run began
        self._store: Any = None
        self._backend = ""
        self._seen, self._looked, self._began = ResizeOrder(), 0.0, 0.0
        self.proxy: LoaderProxy | None = None

    def order(self) -> ResizeOrder:
        """Return the newest order, as of some tenths of a second ago; only rank 0 is asked for it."""
        if time.monotonic() - self._looked >= _LOOK_S and run_ranks.leads():
            self._looked = time.monotonic()
            try:
                words = self._orders.get("order").decode() if self._orders.check(["order"]) else "0 0"
                self._seen = ResizeOrder(*map(int, words.split()))
            except RuntimeError:  # who gave orders is gone for good; torch warns of it at each look
                self._looked = math.inf
        return self._seen

    def is_due(self, order: ResizeOrder) -> bool:
        """Return whether an order, as all ranks know it, is to be carried out here: not where an epoch ends.

        A process that has come would begin with a pass without a batch.
        """
        if order.number <= self._done or order.ranks <= 0:
            return False
        step = order.ranks * self._sampler.batch_sizes[self._sampler.rank]
        return self._sampler.ledger.steps_left > 0 and self._sampler.length - self._sampler.position >= step

    # -- ranks that train ----------------------------------------------------------------------------------------------

    def agree(
        self, order: ResizeOrder, ranks: Ranks, save: Callable[[], bool], is_told_to_end: Callable[[], bool]
    ) -> bool:
        """Save, and return whether the ranks go on as ordered; all of them call it, between two steps.

        Raises:
            RuntimeError: if a rank does not come; nothing has been changed then.
        """
        self._done, self._began = order.number, time.monotonic()
        try:
            problem, port, self._backend = self._agreed(order, ranks, save, is_told_to_end)
        except ours() as error:
            self._answer(order, ranks, f"{type(error).__name__}: {error}")
            raise
        if problem:
            self._answer(order, ranks, problem)
        elif not ranks.leads and ranks.rank < order.ranks:
            self._store = _store_at(port)
        return not problem

    def _answer(self, order: ResizeOrder, ranks: Ranks, problem: str) -> None:
        if ranks.leads:
            with contextlib.suppress(RuntimeError):  # whoever has given the order may be gone
                self._orders.set(f"answer-{order.number}", problem)
            self._say(f"the ranks stay as they are: {problem}")

    def _agreed(
        self, order: ResizeOrder, ranks: Ranks, save: Callable[[], bool], is_told_to_end: Callable[[], bool]
    ) -> tuple[str, int, str]:
        own = self._reason_against()
        problem: str = ranks.decide(own, lambda brought: next(filter(None, brought), ""), "did not come to resize")
        if problem:
            return problem, 0, ""
        is_saved = save()

        def answer(ends: list[bool]) -> tuple[str, int, str]:
            if not is_saved or any(ends):
                return "it was told to end" if is_saved else "no checkpoint could be saved", 0, ""
            self._store, backend = open_store(), _backend()
            self._orders.set(f"group-{order.number}", f"{self._store.port} {backend}")
            try:
                added = [f"here-{rank}" for rank in range(ranks.size, order.ranks)]
                self._store.wait(added, timedelta(seconds=_COME_S))
            except RuntimeError:
                return "an added process has not come to its first pass over the loader", 0, ""
            return "", self._store.port, backend

        return ranks.decide(is_told_to_end(), answer, "did not come to resize", _SAVING_S)

    def _reason_against(self) -> str:
        """Return why the training can't go on with other ranks in its processes; '' if it can."""
        assert self.proxy is not None
        if not (dist.is_available() and dist.is_initialized()):
            return "the script has no process group, which it must make with one rank, too"
        if dist.get_pg_count() > 1:
            return "the script has made process groups of its own"
        if not self._is_alone():
            return "more than one model is trained"
        if "Redundancy" in type(self._optimizer).__name__:
            return "each rank has a part of its optimizer's state"
        if len(set(self._sampler.batch_sizes)) > 1:
            return "its ranks have batches of different sizes"
        if self._sampler.ledger.holds_batches:
            return "its loop holds batches that it has not trained on"
        underway = self.proxy._accel_fetching.underway
        if underway.oldest is not underway.current:
            return "its loop has begun a pass over the loader within another one"
        own = _parallel(self._model)
        if len(own) < _alive():
            gc.collect()  # some may be left in a circle
            if len(own) < _alive():
                return "a DistributedDataParallel is not in the model"
        return next(filter(None, map(_reason_of, own)), "")

    def change(self, order: ResizeOrder, ranks: Ranks) -> None:
        """Go on as the ranks have agreed; an error ends the loop, since half a group can't go on.

        Raises:
            SystemExit: on ranks that leave.
        """
        if ranks.rank >= order.ranks:
            raise SystemExit(0)
        if ranks.leads:
            self._store.set("go", "")
        self._form_and_restart(order, ranks.rank)
        if ranks.leads:
            with contextlib.suppress(RuntimeError):
                self._orders.set(f"answer-{order.number}", "")
            self._say(f"{ranks.size} ranks are {order.ranks} now, after {time.monotonic() - self._began:.2f} s")

    # -- processes that are added --------------------------------------------------------------------------------------

    @property
    def is_added(self) -> bool:
        return RANK in os.environ

    def wait(self) -> None:
        """Say that this process has come, and wait until the others have saved.

        Raises:
            AccelError: if they don't.
        """
        number = self._done
        self._orders.set(f"come-{number}-{os.environ[RANK]}", "")
        deadline = time.monotonic() + _WAITS_S
        while (words := value_of(self._orders, f"group-{number}")) is None:
            if time.monotonic() > deadline:
                raise AccelError(f"the ranks that train have not come to form a group within {_WAITS_S:.0f} s")
            time.sleep(_LOOK_S / 10)
        port, self._backend = words.split()
        self._store = _store_at(int(port))

    def join(self) -> None:
        """Form the group with the others, at the beginning of the first pass over the loader.

        Raises:
            RuntimeError: if they have given this process up.
        """
        rank, ranks = int(os.environ.pop(RANK)), int(os.environ["LOCAL_WORLD_SIZE"])
        self._store.set(f"here-{rank}", "")
        self._store.wait(["go"], timedelta(seconds=2 * _COME_S))
        global _has_joined
        _has_joined = True
        self._form_and_restart(ResizeOrder(self._done, ranks), rank)

    def _form_and_restart(self, order: ResizeOrder, rank: int) -> None:
        global _store
        _store = self._store  # of the group: a rank that leaves may still look into the one before
        os.environ[SEEN] = str(order.number)

        def form() -> None:
            parallel = _parallel(self._model)
            for ddp in parallel:
                del ddp.reducer, ddp.logger  # whose hooks go with them
            dist.destroy_process_group()
            group = PrefixStore(f"resize-{order.number}", self._store)
            dist.init_process_group(self._backend, store=group, rank=rank, world_size=order.ranks)
            for ddp in parallel:
                reducer.go_over_to(ddp, dist.group.WORLD)
            # A newcomer's script may not have put its hooks there yet; and all ranks lay out their buckets, or none.
            heard: list[Any] = [None] * order.ranks
            dist.all_gather_object(heard, any(map(bucket_order.is_heard, self._model.parameters())))
            bucket_order.is_heard_elsewhere = any(heard)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(order.ranks), LOCAL_WORLD_SIZE=str(order.ranks))
            run_ranks.begin_anew()
            share_among(self._sampler, order.ranks, rank, self._sampler.batch_sizes[self._sampler.rank])

        self._restart(form)


_store: Any = None
_has_joined = False


def has_joined() -> bool:
    """Return, once, whether this process has just joined the others: it deals samples as they do."""
    global _has_joined
    before, _has_joined = _has_joined, False
    return before


def _reason_of(ddp: DistributedDataParallel) -> str:
    if ddp.process_group is not dist.group.WORLD:
        return "its DistributedDataParallel has a process group of its own"
    if ddp._comm_hooks:
        return "its gradients are exchanged in another way, by a communication hook or a strategy that was kept"
    return (
        "" if reducer.is_renewable(ddp) else "its DistributedDataParallel can't be made again (static_graph, join(), …)"
    )


def _backend() -> str:
    """Return the backend of the process group as `init_process_group` takes it: one, or one for each kind of device."""
    name = dist.get_backend()
    return dist.get_backend_config() if name == "undefined" else str(name)


def _alive() -> int:
    return sum(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())


def _parallel(model: nn.Module) -> list[DistributedDataParallel]:
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
