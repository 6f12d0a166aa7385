"""What each rank of a test does: train until one is sent SIGTERM, and go on with another number of ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accel
from accel import entry
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic import in_place
from accel.elastic.batch_size import rehearsal, run_noise
from accel.elastic.batch_size.accumulation import GradientAccumulation
from accel.elastic.batch_size.driver import BatchRun
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.run import ElasticRun
from accel.elastic.running import save_checkpoint
from accel.elastic.sample_position import remaining_epochs
from accel.elastic.save_policy import SavePolicy
from accel.elastic.saving.bucket_order import BucketOrder
from accel.elastic.saving.run import CheckpointRun
from accel.elastic.scaling_rules import Linear
from accel.elastic.training_state import capture_state, restore_state
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.run import ranks as accel_ranks
from accel.run.ranks import Ranks
from tests.hooked import hooked
from tests.process_group import exchange, parallel

SIGNAL_AT = 15


QUICK: dict[str, Any] = {"allow": "exact", "cache": False, "budget": "0.0001s"}


def in_turn(rank: int, world: int, calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Call several of the functions below, with their further arguments, in these processes; return by name."""
    told = {}
    for name, (function, *arguments) in calls.items():
        with pytest.MonkeyPatch.context() as patch:
            for owner, attribute in _PLAYED:  # what they put in its place is taken away again
                patch.setattr(owner, attribute, getattr(owner, attribute))
            patch.setitem(BatchRun.__init__.__kwdefaults__, "clock", time.perf_counter)
            told[name] = function(rank, world, *arguments)
    return told


_PLAYED: list[tuple[Any, str]] = [
    (accel_ranks, "PATIENCE_S"),
    (rehearsal.BatchRehearsal, "_exhausted"),
    (run_noise, "interval_of"),
    (Checkpoints, "save"),
    (SavePolicy, "_meeting_s"),
]


def played_clock() -> SimpleNamespace:
    """Time the steps of batches that may grow by a clock that the loop itself moves, and return it."""
    clock = SimpleNamespace(now=0.0)
    BatchRun.__init__.__kwdefaults__["clock"] = lambda: clock.now
    return clock


def known_noise(phi: float) -> None:
    """Have the noise scale be known from the first."""
    noise = NoiseInterval(phi, 0.8 * phi, 1.2 * phi)
    run_noise.interval_of = lambda estimate: noise  # type: ignore[assignment]


def dealt(samples: int) -> Any:
    """Return a loader of numbered samples, in batches of 4 of this rank's share."""
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.arange(samples))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=4))


def elastic_of(model: Any) -> ElasticRun:
    """Return what `optimize(elastic=)` has added to the run of a model."""
    run = entry.optimized(model)
    assert run is not None and run.elastic is not None
    return run.elastic


def batch_of(model: Any) -> BatchRun:
    """Return what decides the batch of a model."""
    batch = elastic_of(model).batch
    assert batch is not None
    return batch


def checkpoint_of(model: Any) -> CheckpointRun:
    """Return what saves a model."""
    checkpoint = elastic_of(model).checkpoint
    assert checkpoint is not None
    return checkpoint


def gathering() -> Callable[[Any], list[Any]]:
    ranks = Ranks()
    ranks.join(time.time())
    return lambda mine: ranks.decide(mine, list, "has not come to save a checkpoint")


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    return model, torch.optim.Adam(model.parameters())


def numbers(model: nn.Module) -> list[float]:
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [value for p in whole for value in p.flatten().tolist()]


def until_terminated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train; rank 1 is sent SIGTERM. Return where this rank stopped, and what it would have drawn next."""
    gather = gathering()
    model, optimizer = made(rank)
    checkpoints = Checkpoints(folder)
    with hooked(SavePolicy, meeting_s=0.05)(1e6, gather=gather) as policy:
        for step in range(1, 500):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            if rank == 1 and step == SIGNAL_AT:
                os.kill(os.getpid(), signal.SIGTERM)
            if policy.due():
                with policy.saving():
                    state = capture_state(model, optimizer, step=step, gather=gather)
                    if rank == 0:
                        checkpoints.save(state)
            if policy.stop:
                break
    return {"step": step, "weights": numbers(model), "draw": torch.rand(1).item()}


def resumed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Go on where `until_terminated` stopped."""
    state = Checkpoints(folder).load_latest(gathering())
    assert state is not None
    model, optimizer = made(rank + 10)
    notes = restore_state(state, model, optimizer)
    return {"step": state["step"], "weights": numbers(model), "draw": torch.rand(1).item(), "notes": notes}


def buckets_put_back(rank: int, world: int) -> dict[str, Any]:
    """Lay out the buckets as another run had them, twice; return what is to be seen of it."""
    model, _ = made(0)
    order = BucketOrder(model)
    before = numbers(model), torch.get_rng_state().tolist(), order.state_dict()
    first, *_ = model.parameters()
    first.grad = torch.ones_like(first)
    for _ in range(2):
        order.load_state_dict({"order": [2, 0, 3, 1]})
    after = numbers(model), torch.get_rng_state().tolist()
    gradients = [None if each.grad is None else each.grad.sum().item() for each in model.parameters()]
    model(torch.randn(2, 3)).sum().backward()
    return {"before": before, "after": after, "gradients": gradients, "order": order.state_dict()["order"]}


SAMPLES, EPOCHS = 6000, 2


class _Ended(Exception):
    """In place of the process's end."""


def _raise_at_the_end(model: Any) -> None:
    """Have `_Ended` raised where the process would be ended by SIGTERM."""

    def ended() -> None:
        raise _Ended

    checkpoint_of(model)._terminate = ended


def optimized(rank: int, world: int, folder: Path, signal_at: int) -> dict[str, Any]:
    """Train under `optimize` with a growing batch; rank 1 is sent SIGTERM after some steps.

    Return, by epoch, the samples of each of this rank's steps.
    """
    known_noise(5000.0 * (1 + rank))  # each rank's own: all must scale their rates by rank 0's
    model, optimizer = made(rank)
    loader = dealt(SAMPLES)
    elastic = accel.Elastic(max_batch_size=96, checkpoint=folder)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic, allow="exact", cache=False)
    _raise_at_the_end(model)
    taken: dict[int, list[list[int]]] = {}
    steps = 0
    try:
        for epoch in remaining_epochs(loader, EPOCHS):
            for batch, index in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                taken.setdefault(epoch, []).append(index.tolist())
                steps += 1
                if rank == 1 and steps == signal_at:
                    os.kill(os.getpid(), signal.SIGTERM)
    except _Ended:
        pass
    weights, batch = numbers(model), batch_of(model)
    accel.undo(model)
    return {"taken": taken, "weights": weights, "note": batch.report.note, "base": batch.record.base}


class _Bounded(nn.Module):
    """Runs out of memory with more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.norm, self.most = nn.Linear(3, 1), nn.BatchNorm1d(1), most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        y: torch.Tensor = self.norm(self.linear(x))
        return y


def one_rank_has_less_memory(rank: int, world: int, is_asked: bool) -> dict[str, Any]:
    """Train under a growing batch of which rank 1 takes at most 4 samples, the others any; return each step's.

    Where it is asked, it knows before it makes a call.
    """
    if is_asked and rank == 1:
        rehearsal.BatchRehearsal._exhausted = lambda self, samples, held: "too much"  # type: ignore[method-assign]
    known_noise(5000.0)
    model: Any = DistributedDataParallel(_Bounded(4 if rank == 1 else 10**6))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    elastic = accel.Elastic(max_batch_size=256)
    model, loader, optimizer = accel.optimize(model, dealt(480), optimizer, elastic=elastic, **QUICK)
    taken = []
    for _ in range(2):
        for x, _ in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            taken.append(len(x))
    weights, note = numbers(model), batch_of(model).report.note
    why = [row.why for row in accel.explain(model).batch_rows]
    accel.undo(model)
    return {"taken": taken, "weights": weights, "note": note, "why": why}


def accumulates_as_one_batch(rank: int, world: int, kind: str) -> dict[str, Any]:
    """Train with three batches a step, clipped, and with one of as many samples; count the exchanges of DDP."""

    def trained(pieces: int) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = parallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        exchanged = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            exchanged.append(bucket.index())
            work: Any = torch.distributed.all_reduce(bucket.buffer().div_(world), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        if kind == "ddp":
            model.register_comm_hook(None, hook)
        accumulation = GradientAccumulation(model, [optimizer])
        draw = torch.Generator().manual_seed(rank)
        for _ in range(10):
            for x in torch.randn(6, 3, generator=draw).double().chunk(pieces):
                accumulation.begin_batch([len(x) * world] * pieces)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        accumulation.close()
        return numbers(model), len(exchanged)

    (weights, exchanges), (expected, plainly) = trained(3), trained(1)
    return {"weights": weights, "expected": expected, "exchanges": exchanges, "plainly": plainly}


def optimized_puts_off(rank: int, world: int, kind: str, micro_steps: int) -> dict[str, Any]:
    """Train under `max_batch_size`; a loop of several micro-steps puts the exchange off to the last of them."""
    torch.manual_seed(0)
    model = parallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2400, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.arange(2400))
    loader: Any = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    settings: dict[str, Any] = {"allow": "exact", "cache": False, "budget": "0.0001s"}
    elastic = accel.Elastic(max_batch_size=64)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic, **settings)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    taken: list[int] = []
    for number, (x, index) in enumerate(loader):
        is_last = (number + 1) % micro_steps == 0
        exchange(model, kind, is_last)
        (model(x).sum(1) - x.sum(1)).square().mean().div(micro_steps).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        taken += index.tolist()
    run = entry.optimized(model)
    assert run is not None and run.elastic is not None and run.elastic.batch is not None
    batch = run.elastic.batch
    assert batch.noise.meter is not None and batch.record.policy is not None
    found = {
        "updates": len(steps),
        "counted": batch.record.step.ended,
        "by_loop": batch.record.step.by_loop,
        "base": batch.record.base,
        "decided": [each.batch for each in batch.record.policy.decisions],
        "taken": taken,
        "note": batch.report.note,
        "measured": batch.noise.meter.noise.measured,
        "estimate": tuple(batch.noise.meter.noise.estimate()),
        "weights": numbers(model),
    }
    accel.undo(model)
    return found


def one_rank_leaves_steps_out(rank: int, world: int, same: bool) -> dict[str, Any]:
    """Train where rank 1 finds the norm of its gradient too large for a step now and then, before it is exchanged."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = GradientAccumulation(model, [optimizer])
    draw = torch.Generator().manual_seed(rank)
    for step in range(40):
        accumulation.begin_batch([4 * world] * 3)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=draw)).square().mean().backward()
        if rank == 0 or step % 3 == 2 or step % 4:
            optimizer.step()
    # The loop leaves it in the midst of a step, and goes on without its batches, with the same optimizer or another.
    assert accumulation.present.taken > 0
    going_on = optimizer if same else torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        going_on.zero_grad()
        model(torch.randn(4, 3, generator=draw)).square().mean().backward()
        going_on.step()
    refusal = accumulation.refusal
    accumulation.close()
    return {"weights": numbers(model), "refusal": refusal}


def optimized_accumulates(rank: int, world: int) -> dict[str, Any]:
    """Train under `max_batch_size` where no more than 8 samples fit at once and the exchange takes long."""
    known_noise(50_000.0)
    clock = played_clock()
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(_Bounded(8))

    def slowly(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        clock.now += 0.02
        work: Any = torch.distributed.all_reduce(bucket.buffer().div_(world), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, slowly)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    elastic = accel.Elastic(max_batch_size=64)
    model, loader, optimizer = accel.optimize(model, dealt(4000), optimizer, elastic=elastic, **QUICK)
    taken, most = [], 0
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for x, index in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        clock.now += 1e-3 + 1e-6 * len(x)
        optimizer.step()
        taken += index.tolist()
        most = max(most, len(x))
    why, note = [row.why for row in accel.explain(model).batch_rows], batch_of(model).report.note
    taken_steps = len(steps)
    for number, (x, _) in enumerate(loader):
        if number == 10:
            accel.undo(model)  # perhaps in the midst of a step
        if number == 20:
            break
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert model.require_backward_grad_sync
    return {"taken": taken, "most": most, "why": why, "note": note, "weights": numbers(model), "steps": taken_steps}


PAUSE_AT, ASK_AT, LATE_STEPS = 20, 40, 60


def late(rank: int, world: int, folder: Path, late_rank: int) -> dict[str, Any]:
    """Train with a checkpoint; one rank alone is busy in the loop for longer than the others wait, as evaluation is.

    Return what was said and warned, which step was saved, and how many there were.
    """
    accel_ranks.PATIENCE_S = 0.5
    SavePolicy._meeting_s = 1e-9  # ranks meet after every step
    model, optimizer = made(rank)
    elastic = accel.Elastic(checkpoint=folder)
    model, loader, optimizer = accel.optimize(model, dealt(4 * world * LATE_STEPS), optimizer, elastic=elastic, **QUICK)
    checkpoint = checkpoint_of(model)
    said: list[str] = []
    checkpoint._say = said.append
    steps = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, (batch, _) in enumerate(loader):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if rank == late_rank and step == PAUSE_AT:
                time.sleep(0.8)
            if rank == 1 and step == ASK_AT:
                checkpoint.request()
            steps += 1
    saved = checkpoint.training.checkpoints.load_latest()
    texts = [str(each.message) for each in caught if "checkpoint" in str(each.message)]
    accel.undo(model)
    return {"said": said, "warned": texts, "saved": saved and saved["step"], "steps": steps}


def one_has_left(rank: int, world: int, folder: Path, leaving: int) -> list[str]:
    """Train, and save at the end of the script, where one rank is gone; return what the other is warned of."""
    accel_ranks.PATIENCE_S = 0.5
    model, optimizer = made(rank)
    elastic = accel.Elastic(checkpoint=folder)
    model, loader, optimizer = accel.optimize(model, dealt(16 * world), optimizer, elastic=elastic, **QUICK)
    for batch, _ in loader:
        model(batch).sum().backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank != leaving:
            save_checkpoint(model)
    accel.undo(model)
    return [str(each.message) for each in caught]


WRITING_S = 0.5


def rank_0_writes_slowly(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train until rank 1 is sent SIGTERM; return when this rank ended, and when it had written."""
    written: list[float] = []
    save = Checkpoints.save

    def slowly(self: Checkpoints, state: Any) -> Path:
        time.sleep(WRITING_S)
        path = save(self, state)
        written.append(time.monotonic())
        return path

    Checkpoints.save = slowly  # type: ignore[method-assign]
    model, optimizer = made(rank)
    elastic = accel.Elastic(checkpoint=folder)
    model, loader, optimizer = accel.optimize(model, dealt(4000), optimizer, elastic=elastic, **QUICK)
    _raise_at_the_end(model)
    try:
        for step, (x, _) in enumerate(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
    except _Ended:
        ended = time.monotonic()
        accel.undo(model)
        return {"ended": ended, "written": written}
    raise AssertionError("it was not ended")


ODD_STEPS, ODD_PATIENCE_S, PAUSE_S = 60, 0.5, 0.8


def odd(rank: int, world: int, kind: str) -> dict[str, Any]:
    """Train with a batch that may grow, where ranks part in one way or another.

    Return the samples taken, how long the longest step took, and what was warned and noted.
    """
    clock = played_clock()
    accel_ranks.PATIENCE_S = ODD_PATIENCE_S
    known_noise(5000.0)
    model, optimizer = made(0)
    elastic = accel.Elastic(max_batch_size=64)
    model, loader, optimizer = accel.optimize(model, dealt(4 * world * ODD_STEPS), optimizer, elastic=elastic, **QUICK)
    taken, longest = [], 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            with model.join() if kind == "join" else contextlib.nullcontext():
                began = time.monotonic()
                for step, (batch, index) in enumerate(loader):
                    optimizer.zero_grad()
                    model(batch).square().sum().backward()
                    clock.now += 1e-3 + 1e-6 * len(batch)
                    optimizer.step()
                    taken.append((epoch, index.tolist()[: loader.batch_sampler.fresh]))
                    longest, began = max(longest, time.monotonic() - began), time.monotonic()
                    if kind == "stops" and (epoch, step, rank) == (0, 10, 1):
                        time.sleep(PAUSE_S)
                    if kind == "join" and (epoch, step, rank) == (0, 10, 1):
                        break
            if kind == "evaluates" and rank == 0:
                with torch.no_grad():
                    model.module(torch.randn(8, 3))
                time.sleep(PAUSE_S)
    told = [str(each.message) for each in caught if "accel" in str(each.message) or "batch" in str(each.message)]
    note, batch = batch_of(model).report.note, loader.batch_sampler.batch_sizes[rank]
    accel.undo(model)
    weights = numbers(model)
    return {"taken": taken, "longest": longest, "told": told, "note": note, "batch": batch, "weights": weights}


def _loader_and_elastic(rank: int, odd: str, folder: Path) -> tuple[DataLoader[Any], accel.Elastic]:
    """Return what a rank passes to `optimize`; rank 1 passes something else than the others."""
    odd = odd if rank == 1 else ""
    data = TensorDataset(torch.randn(48 if odd == "samples" else 24, 3))
    dealt = {"seed": {"seed": 1}, "shuffle": {"shuffle": False}, "tail": {"drop_last": True}}.get(odd, {})
    sampler: DistributedSampler[Any] = DistributedSampler(data, **dealt)  # type: ignore[arg-type]
    elastic = accel.Elastic(
        max_batch_size=32 if odd == "max_batch_size" else 64,
        scaling_rule=Linear() if odd == "scaling_rule" else None,
        checkpoint=None if odd == "checkpoint" else folder,
    )
    if odd == "an ElasticSampler":
        return DataLoader(data, batch_sampler=ElasticSampler(data, batch_size=8, order="torch", tail="fill")), elastic
    if odd == "a BatchSampler":
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 8, False)), elastic
    return DataLoader(data, 8 if odd == "batch_size" else 4, sampler=sampler, drop_last=odd == "drop_last"), elastic


def one_rank_is_unlike(rank: int, world: int, kinds: list[str], folder: Path) -> list[str]:
    """Call `optimize` on ranks that would deal the samples in different ways; return what each call raises."""
    told = []
    for kind in kinds:
        model, optimizer = made(0)
        loader, elastic = _loader_and_elastic(rank, kind, folder / kind)
        try:
            accel.optimize(model, loader, optimizer, elastic=elastic, allow="exact", cache=False)
            told.append("")
        except InvalidArgument as error:
            told.append(str(error))
        accel.undo(model)
    return told


def one_rank_has_joined(rank: int, world: int, odd: str, folder: Path) -> dict[str, Any]:
    """Call `optimize` where rank 1 has joined the others, with another loader; return by what its samples are dealt."""
    if rank == 1:
        in_place._has_joined = True
    model, optimizer = made(0)
    loader, elastic = _loader_and_elastic(rank, odd, folder)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic, allow="exact", cache=False)
    sampler = loader.batch_sampler
    taken = [index for step in sampler for index in step]
    accel.undo(model)
    return {"sizes": sampler.batch_sizes, "tail": sampler.tail, "taken": taken}


def dealt_by_a_list(rank: int, world: int, folder: Path, stop_at: int) -> list[list[int]]:
    """Train with batches of one size on each rank, for some steps or to the epoch's end; return the samples taken."""
    model, optimizer = made(0)
    data = TensorDataset(torch.randn(60, 3), torch.arange(60))
    own = ElasticSampler(data, batch_size=[4, 8], tail="uneven")
    loader: Any = DataLoader(data, batch_sampler=own)
    elastic = accel.Elastic(checkpoint=folder)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic, **QUICK)
    taken = []
    for step, (x, index) in enumerate(loader, start=1):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        taken.append(index.tolist())
        if step == stop_at:
            save_checkpoint(model)
            break
    accel.undo(model)
    return taken
