"""What the ranks of test_ranks.py do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import accel
import accel.run.ranks
from accel import entry, starting, strategies
from accel.strategies.trial_design import TrialDesign
from tests.accel import loops
from tests.accel.loops import Net, Quick, loss_of

PATIENCE_S = 1.0
LONG_S = 30.0
"""Patience where nobody leaves without a word: a busy machine may hold a rank up for longer."""

Act = Callable[[int, int], None]


def _batches(count: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 6, generator=generator), torch.arange(8)) for _ in range(count)]


def _train(
    rank: int, lengths: list[int], act: Act, optimized: bool, *, epochs: int, ddp: bool, join: bool
) -> tuple[Any, Any]:
    """Train on as many batches an epoch as this rank has; `act(epoch, step)` is part of the loop's body."""
    torch.manual_seed(0)
    net = Net()
    model: Any = DistributedDataParallel(net) if ddp else net
    loader: Any = _batches(lengths[rank], rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if optimized:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="lossy", budget=60)
    for epoch in range(epochs):
        with model.join() if join else contextlib.nullcontext():
            for step, (x, target) in enumerate(loader):
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()
                act(epoch, step)
    return model, loops.everything(net, optimizer)


@contextlib.contextmanager
def _noted() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found["seconds"] = time.monotonic() - began
    found["told"] = [str(one.message) for one in caught if str(one.message).startswith("accel")]


def _prepare(patience_s: float = PATIENCE_S) -> None:
    accel.run.ranks.PATIENCE_S = patience_s
    strategies.REGISTRY[:] = [Quick]
    loops.WAIT_S = 0.001
    Quick.on = False  # a case before may have ended while it was
    loops.play_clock()  # what a busy machine does to the times of steps decides nothing


def _compared(
    rank: int, world: int, lengths: list[int], act: Act, epochs: int = 2, ddp: bool = True, join: bool = False
) -> dict[str, Any]:
    """Train with and without accel; tell what was said, how long it took, and what is left of it."""
    _prepare(LONG_S if act is nothing and len(set(lengths)) == 1 else PATIENCE_S)
    options: dict[str, Any] = {"epochs": epochs, "ddp": ddp, "join": join}
    with _noted() as found:
        model, state = _train(rank, lengths, act, True, **options)
    _, plain = _train(rank, lengths, lambda epoch, step: None, False, **options)
    found["same"] = [name for name in state if not torch.equal(state[name], plain[name])] == []
    optimized = entry.MODELS.get(model)
    found["alive"] = optimized is not None and optimized.session.alive
    found["on"] = Quick.on
    found["own collective"] = _own_collective(rank)
    return found


def _own_collective(rank: int) -> list[int]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rank)
    return everyone


def nothing(epoch: int, step: int) -> None:
    """Do nothing."""


def joined(rank: int, world: int, lengths: list[int]) -> dict[str, Any]:
    """Train within join(), each rank on as many batches as its length says."""
    return _compared(rank, world, lengths, nothing, join=True)


def late(rank: int, world: int, epoch: int, step: int) -> dict[str, Any]:
    """Let rank 1 do something of its own for longer than the others wait."""

    def act(now: int, at: int) -> None:
        if rank == 1 and (now, at) == (epoch, step):
            time.sleep(2 * PATIENCE_S)

    return _compared(rank, world, [40] * world, act)


def alone(rank: int, world: int, who: int) -> dict[str, Any]:
    """Let only one rank call optimize."""
    _prepare()
    options: dict[str, Any] = {"epochs": 1, "ddp": True, "join": False}
    with _noted() as found:
        _, state = _train(rank, [20] * world, nothing, rank == who, **options)
    _, plain = _train(rank, [20] * world, nothing, False, **options)
    found["same"] = [name for name in state if not torch.equal(state[name], plain[name])] == []
    found["own collective"] = _own_collective(rank)
    return found


def much_later(rank: int, world: int) -> dict[str, Any]:
    """Let rank 1 call optimize when rank 0 has long gone on plainly."""
    _prepare()
    options: dict[str, Any] = {"epochs": 1, "ddp": True, "join": False}
    with _noted() as found:
        if rank == 1:
            _train(rank, [5] * world, nothing, False, **options)
        _train(rank, [5] * world, nothing, True, **options)
        if rank == 0:
            _train(rank, [5] * world, nothing, False, **options)
    found["own collective"] = _own_collective(rank)
    return found


def dies(rank: int, world: int, last: int) -> dict[str, Any]:
    """Let rank 1 die after a step; the models are each rank's own, so nobody else notices."""
    _prepare()

    def act(epoch: int, step: int) -> None:
        if rank == 1 and step == last:
            os._exit(3)

    with _noted() as found:
        _train(rank, [40] * world, act, True, epochs=1, ddp=False, join=False)
    return found


class _Stop(Exception):
    pass


def leaves(rank: int, world: int, how: str) -> dict[str, Any]:
    """Let rank 1 leave its loop early, undo accel there, or let accel fail; the models are each rank's own."""
    _prepare(PATIENCE_S if how == "raise" else LONG_S)

    def act(epoch: int, step: int) -> None:
        if rank == 1 and step == 5:
            if how == "raise":
                raise _Stop
            (model,) = entry.MODELS
            if how == "undo":
                accel.undo(model)
            if how == "fail":
                session = entry.MODELS[model].session
                session.runner._close_step = lambda *_: 1 / 0  # type: ignore[assignment, return-value]

    with _noted() as found, contextlib.suppress(_Stop):
        _train(rank, [40] * world, act, True, epochs=1, ddp=False, join=False)
    found["own collective"] = _own_collective(rank)
    entry.MODELS.clear()
    return found


class Together(Quick):
    """Stands for what all ranks must switch at the same step."""

    touches = frozenset({"ranks"})


class Halfway(Together):
    """Can't be switched on on rank 1."""

    name = "halfway"

    def enable(self, run: Any, setting: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such device on this rank")
        super().enable(run, setting)


def halfway(rank: int, world: int) -> dict[str, Any]:
    """Let rank 1 fail to switch on what all must switch at the same step; tell whether a step was taken with it."""
    _prepare(LONG_S)
    strategies.REGISTRY[:] = [Halfway]
    ever: list[bool] = []
    with _noted() as found:
        options: dict[str, Any] = {"epochs": 1, "ddp": False, "join": False}
        model, _ = _train(rank, [60] * world, lambda epoch, step: ever.append(Quick.on), True, **options)
    found["ever on"] = any(ever)
    found["rows"] = {row.name: (row.status, row.why) for row in accel.explain(model).rows}
    found["own collective"] = _own_collective(rank)
    accel.undo(model)
    return found


class Prepared(Quick):
    """Must be prepared on each rank before it can be switched on there; on rank 0 that takes two looks."""

    name = "prepared"

    def __init__(self) -> None:
        self._asked, self._is_ready = 0, False

    def trial_design(self, run: Any) -> TrialDesign:
        preparing = self._asked > 0 and not self._is_ready
        return TrialDesign(settle_steps=0, prepare=self._waits, is_preparing=preparing)

    def _waits(self) -> str:
        self._asked += 1
        self._is_ready = self._asked > 1 - dist.get_rank()
        return "" if self._is_ready else "it is being prepared"

    def enable(self, run: Any, setting: Any) -> None:
        if not self._is_ready:
            raise OSError("it is not ready")
        super().enable(run, setting)


def prepared(rank: int, world: int) -> dict[str, Any]:
    """Try what each rank has to prepare."""
    _prepare(LONG_S)
    strategies.REGISTRY[:] = [Prepared]
    with _noted() as found:
        model, _ = _train(rank, [300] * world, nothing, True, epochs=1, ddp=True, join=False)
    found["rows"] = {row.name: (row.status, row.why) for row in accel.explain(model).rows}
    found["alive"] = entry.MODELS[model].session.alive
    found["own collective"] = _own_collective(rank)
    accel.undo(model)
    return found


def keeps(rank: int, world: int) -> dict[str, Any]:
    """Let accel fail on rank 1 while such a strategy is on."""
    _prepare(LONG_S)
    strategies.REGISTRY[:] = [Together]
    done: list[int] = []

    def act(epoch: int, step: int) -> None:
        if Quick.on and not done:
            done.append(step)
            if rank == 1:
                (model,) = entry.MODELS
                entry.MODELS[model].session.runner._close_step = lambda *_: 1 / 0  # type: ignore[assignment, return-value]

    with _noted() as found:
        model, _ = _train(rank, [80] * world, act, True, epochs=1, ddp=False, join=False)
    found["met one"] = bool(done)
    found["alive"] = entry.MODELS[model].session.alive
    found["on"] = Quick.on
    accel.undo(model)
    found["on after undo"] = Quick.on
    found["own collective"] = _own_collective(rank)
    return found


def deciding_fails(rank: int, world: int) -> dict[str, Any]:
    """Let rank 0 fail while the others wait for its decision."""
    decisions = starting.decisions

    def broken(state: Any) -> Any:
        raise OSError("no room left")
        yield

    starting.decisions = broken  # type: ignore[assignment]
    try:
        return _compared(rank, world, [20] * world, nothing, epochs=1)
    finally:
        starting.decisions = decisions


def one_after_the_other(rank: int, world: int, which: list[tuple[Callable[..., Any], Any]]) -> list[dict[str, Any]]:
    """Run cases on the same ranks: what went wrong in one must not show in the next."""
    found = []
    for case, argument in which:
        entry.MODELS.clear()
        found.append(case(rank, world, *argument))
        dist.barrier()
    return found
