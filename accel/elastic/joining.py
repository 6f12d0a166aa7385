"""A process that joins a training which goes on meanwhile: `python -m accel.elastic.joining train.py --epochs=30`.

`LocalJob` starts it under torchrun. The script runs as ever. Until it calls `accel.optimize` its process group stands
in for the one that it will join: rank and size are those to come, and what is exchanged comes from nobody, so that
each newcomer has its own values. There it says that it has come, waits until the others are between two steps, forms
the group with them, and goes on from the checkpoint that they have just saved. What the script exchanges still comes
from nobody until it begins a pass over its loader: the others are in the midst of one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from accel.elastic import regroup
from accel.elastic.resize_orders import Meeting, ResizeOrder, ResizeOrders, orders_of_job
from accel.errors import AccelError
from accel.profiler.script import Script

NUMBER, FIRST, RANKS = "ACCEL_RESIZE_NUMBER", "ACCEL_RESIZE_FIRST", "ACCEL_RESIZE_RANKS"
"""Of the environment: the order that this process was started for, the first of its newcomers, all ranks to be."""
_LOOK_S = 0.02
_WAITS_S = 600.0
"""For the others to come between two steps: who holds the job ends this process if they don't."""
_KEPT = (
    *("barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast"),
    *("broadcast_object_list", "scatter_object_list"),
)
"""Exchanges that leave a process what it has, as long as the others take no part."""
_GATHERED = ("all_gather_object", "gather_object")
"""Those that fill a list with what each has: one's own, meanwhile."""
_joining: Joining | None = None


class Joining:
    """A process on its way into a training.

    Args:
        orders: of the job.
        order: that it was started for.
        rank: that it is to be.
    """

    def __init__(self, orders: ResizeOrders, order: ResizeOrder, rank: int) -> None:
        self._orders, self._order, self._rank = orders, order, rank
        self.has_joined = False
        self._own = {name: getattr(dist, name) for name in ("init_process_group", *_KEPT, *_GATHERED)}

    def begin(self) -> None:
        """Stand in for the group that the script makes."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        def init(*_: Any, **__: Any) -> None:
            self._own["init_process_group"]("fake", store=FakeStore(), rank=self._rank, world_size=self._order.ranks)

        def keep(*_: Any, **__: Any) -> None:
            """Leave what this process has."""

        def gather(into: list[Any], own: Any, *_: Any, **__: Any) -> None:
            into[:] = [own] * len(into)

        def gather_on_one(own: Any, into: list[Any] | None = None, *_: Any, **__: Any) -> None:
            if into is not None:
                gather(into, own)

        stand_ins = {"init_process_group": init, **dict.fromkeys(_KEPT, keep)}
        stand_ins |= dict(zip(_GATHERED, (gather, gather_on_one), strict=True))
        for name, stand_in in stand_ins.items():
            setattr(dist, name, stand_in)

    def exchange(self) -> None:
        """Let what the script exchanges go to the others."""
        for name, own in self._own.items():
            setattr(dist, name, own)

    def join(self, model: nn.Module) -> None:
        """Wait for the others, and form the group with them.

        Raises:
            AccelError: if they don't come.
        """
        number = self._order.number
        dist.init_process_group = self._own["init_process_group"]
        self._orders.arrive(number, self._rank)
        meeting = self._awaited()
        store = regroup.store_of(meeting)
        regroup.say_here(store, self._rank)
        regroup.form(
            model,
            store,
            number,
            rank=self._rank,
            size=self._order.ranks,
            backend=meeting.backend,
        )
        self.has_joined = True

    def _awaited(self) -> Meeting:
        deadline = time.monotonic() + _WAITS_S
        while (meeting := self._orders.meeting_of(self._order.number)) is None:
            if time.monotonic() > deadline:
                raise AccelError(f"the ranks that train have not come to form a group within {_WAITS_S:.0f} s")
            time.sleep(_LOOK_S)
        return meeting


def join(model: nn.Module) -> bool:
    """Join the training that this process was started for; return whether it is one that was started so."""
    if _joining is not None and not _joining.has_joined:
        _joining.join(model)
    return _joining is not None


def exchange() -> None:
    """Let what the script exchanges go to the others, now that it does what they do."""
    global _joining
    if _joining is not None and _joining.has_joined:
        _joining.exchange()
        _joining = None


def main(arguments: Sequence[str]) -> None:
    """Run a script, or `-m` a module, as a process that joins."""
    global _joining
    orders = orders_of_job()
    if orders is None or NUMBER not in os.environ:
        raise SystemExit("accel.elastic.joining is started by LocalJob(..., in_place=True)")
    order = ResizeOrder(int(os.environ.pop(NUMBER)), int(os.environ.pop(RANKS)))
    first = int(os.environ.pop(FIRST))
    rank, local = (first + int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
    sizes = {name: str(order.ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.update(sizes, RANK=str(rank), LOCAL_RANK=str(local))
    # Of the module that the script imports, not of the one that is run here.
    from accel.elastic import joining

    joining._joining = joining.Joining(orders, order, rank)
    joining._joining.begin()
    is_module = arguments[0] == "-m"
    target, *own = arguments[1:] if is_module else arguments
    script = Script(target, own, module=is_module)
    exec(script.code(), script.globals)


if __name__ == "__main__":
    main(sys.argv[1:])
