"""What the ranks of test_collective.py do: they train under a given plan. Nothing here asserts."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import accel
import accel.compile.compiled_draws as draws
import accel.run.ranks
from accel import entry
from accel.guard.together import OutOfStep
from accel.search.plan import Plan, fingerprint

STEPS = 30
LONG = 64
"""Steps of a run in which something befalls a rank; the plan is taken over within the first 30."""
PATIENCE_S = 1.0
VERSION = torch.__version__
KINDS = ["killed", "stopped", "slow", "no room"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Images(nn.Module):
    """A convolution, and a block that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(images)).mean((2, 3))))  # type: ignore[no-any-return]


def batches(rank: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's batches."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [
        (torch.randn(8, 3, 6, 6, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(steps)
    ]
    return drawn


def wrapped(net: nn.Module) -> nn.Module:
    """Return it in DistributedDataParallel, with several buckets."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000
    return DistributedDataParallel(net, bucket_cap_mb=0.002)


def sharded(net: nn.Module) -> nn.Module:
    """Return it sharded, block by block."""
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block)  # type: ignore[arg-type]
    return fully_shard(net)


def spread(net: nn.Module) -> nn.Module:
    """Return it with the layers of its blocks split over ranks (tensor parallel)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[arg-type]
    return net


def train(
    rank: int,
    world: int,
    choices: dict[str, Any] | None,
    prepare: Callable[[int], None] = lambda rank: None,
    wrap: Callable[[nn.Module], nn.Module] = wrapped,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train under a plan, or plainly; tell what was on, what was said of it, and what is left."""
    torch.manual_seed(0)
    model = wrap(Images())
    prepare(rank)
    loader: Any = batches(0 if wrap is spread else rank, STEPS * accumulate)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if choices is not None:
        plan = Plan(fingerprint=fingerprint(model), model="Images", strategies=choices, allow="reduced")
        model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan)
    on: set[str] = set()
    found: dict[str, Any] = {"ended": ""}
    began = time.monotonic()
    try:
        for step, (images, target) in enumerate(loader):
            is_last = (step + 1) % accumulate == 0
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = is_last
            elif wrap is sharded:
                model.set_requires_gradient_sync(is_last)
            functional.cross_entropy(model(images), target).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            if choices is not None:
                on |= entry.MODELS[model].session.active.keys()
    except RuntimeError as error:  # of gloo, where another rank has died
        found["ended"] = str(error)
    found |= {"on": sorted(on), "seconds": time.monotonic() - began}
    if not found["ended"]:
        found["weights"] = {name: _whole(weight) for name, weight in model.state_dict().items()}
    if choices is not None:
        report, session = accel.explain(model), entry.MODELS[model].session
        found["rows"] = {row.name: (row.status, row.why) for row in report.rows if row.name in choices}
        found["failed"], found["still"] = session.failed, sorted(session.active)
        accel.undo(model)
    return found


def _whole(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def checkpointed(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Save a sharded model and its optimizer while blocks run compiled, and load both into one without accel."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made() -> tuple[Any, Any]:
        model = sharded(Images())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, images: Tensor, target: Tensor) -> None:
        functional.cross_entropy(model(images), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    with_aot(rank)
    torch.manual_seed(0)
    model, optimizer = made()
    keys = list(model.state_dict())
    choices: dict[str, Any] = {"torch_compile": "blocks", "fused_optimizer": "fused"}
    plan = Plan(fingerprint=fingerprint(model), model="Images", strategies=choices, allow="reordered")
    model, loader, optimizer = accel.optimize(model, batches(rank), optimizer, plan=plan)
    found: dict[str, Any] = {}
    for number, batch in enumerate(loader):
        if number == STEPS - 1:
            found["on"] = sorted(entry.MODELS[model].session.active)
            found["same keys"] = list(model.state_dict()) == keys
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, checkpoint_id=folder)
            copy, its_optimizer = made()
            loaded = dict(zip(("model", "optimizer"), get_state_dict(copy, its_optimizer), strict=True))
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(copy, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            step(copy, its_optimizer, *batch)
        step(model, optimizer, *batch)
    found["rows"] = {row.name: (row.status, row.why) for row in accel.explain(model).rows if row.name in choices}
    weights = [dict(each.named_parameters()) for each in (model, copy)]  # buffers are saved from one rank
    found["weights"], found["loaded"] = ({name: _whole(w) for name, w in each.items()} for each in weights)
    accel.undo(model)
    return found


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Sample `i` is known from its index."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(500e-6)  # beside which noting it takes little
        return torch.full((3, 6, 6), index / 160.0), torch.tensor(index % 4)


def fed(rank: int, world: int, choices: dict[str, Any] | None) -> dict[str, Any]:
    """Train on each rank's shard, dealt anew in each epoch; tell which samples came, and what is left."""
    torch.manual_seed(0)
    model: Any = wrapped(Images())
    data = Samples()
    loader: Any = DataLoader(data, 8, sampler=DistributedSampler(data, seed=3))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    if choices is not None:
        plan = Plan(fingerprint=fingerprint(model), model="Images", strategies=choices, allow="exact")
        model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan)
    came: list[float] = []
    on: set[str] = set()
    for epoch in range(6):
        loader.sampler.set_epoch(epoch)
        for images, target in loader:
            came += (160 * images[:, 0, 0, 0]).round().tolist()
            optimizer.zero_grad()
            functional.cross_entropy(model(images), target).backward()
            optimizer.step()
            if choices is not None:
                on |= entry.MODELS[model].session.active.keys()
    found = {"came": came, "weights": {name: _whole(weight) for name, weight in model.state_dict().items()}}
    if choices is not None:
        found |= {"on": sorted(on), "failed": entry.MODELS[model].session.failed}
        found["rows"] = {row.name: (row.status, row.why) for row in accel.explain(model).rows if row.name in choices}
        accel.undo(model)
    return found


def fed_by_each(rank: int, world: int, which: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Train once for each, on the same ranks."""
    return [fed(rank, world, one) for one in which]


def many(rank: int, world: int, which: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Train once for each, on the same ranks."""
    return [train(rank, world, *one) for one in which]


# -- what goes wrong on rank 1 -----------------------------------------------------------------------------------------


def plainly(rank: int) -> None:
    """Let nothing go wrong."""
    accel.run.ranks.PATIENCE_S, torch.__version__ = PATIENCE_S, VERSION  # type: ignore[assignment]
    _compile(lambda: None)


def slowly(rank: int) -> None:
    """Let rank 1 compile the first of its graphs for longer than the others are patient."""
    accel.run.ranks.PATIENCE_S = PATIENCE_S
    takes_s = [1.5 * PATIENCE_S] if rank == 1 else []
    _compile(lambda: time.sleep(takes_s.pop() if takes_s else 0.0))


def dying(rank: int) -> None:
    """Let rank 1 die while it compiles."""
    accel.run.ranks.PATIENCE_S = PATIENCE_S
    _compile(lambda: os._exit(3) if rank == 1 else None)


def without_room(rank: int) -> None:
    """Let rank 1 run out of memory in the candidate's replay."""

    def compiled(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if rank == 1:
                raise torch.OutOfMemoryError("no room")
            return graph.forward(*args)

        return run

    plainly(rank)
    draws.compile_with_plain_draws = compiled  # type: ignore[assignment]


def with_aot(rank: int) -> None:
    """Let autograd's graphs be captured too, as the compiler does, and run as they are."""
    from torch._dynamo.backends.debugging import aot_eager

    plainly(rank)
    draws.compile_with_plain_draws = aot_eager  # type: ignore[assignment]


def failing_to_compile(rank: int) -> None:
    """Let the compiler fail on rank 1."""
    plainly(rank)
    _compile(lambda: 1 / (1 - rank))


def schedules(rank: int, world: int, seeds: list[int]) -> list[dict[str, Any]]:
    """Do so for each, on the same ranks, of which none is killed."""
    return [schedule(rank, world, seed) for seed in seeds]


def schedule(rank: int, world: int, seed: int) -> dict[str, Any]:
    """Take a plan over while one rank is killed, stopped for a while, slow or out of memory, where chance puts it."""
    chance = random.Random(seed)
    kind, wrap = KINDS[seed % 4], (wrapped, sharded)[seed // 4 % 2]
    whose, at, compiled = chance.randrange(world), chance.randrange(5, LONG - 10), 0
    plainly(rank)
    torch.compiler.reset()
    telling: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: telling.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(log)

    def before() -> None:
        nonlocal compiled
        compiled += 1
        if rank == whose and kind == "slow":
            time.sleep(chance.uniform(0.5, 2.5) * PATIENCE_S)
        elif rank == whose and kind == "no room" and compiled > chance.randrange(3):
            raise torch.OutOfMemoryError("no room")

    _compile(before)
    torch.manual_seed(0)
    model, loader = wrap(Images()), batches(rank, LONG)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    began, ended = time.monotonic(), ""
    choices = {"torch_compile": "blocks" if wrap is sharded else "whole model"}
    plan = Plan(fingerprint=fingerprint(model), model="Images", strategies=choices, allow="reordered")
    model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan)
    try:
        for step, (images, target) in enumerate(loader):
            if (rank, step, kind) == (whose, at, "killed"):
                os._exit(3)
            if (rank, step, kind) == (whose, at, "stopped"):
                subprocess.Popen(["sh", "-c", f"sleep {2 * PATIENCE_S}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            functional.cross_entropy(model(images), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, OutOfStep) as error:  # of gloo, where another rank has died
        ended = str(error)
    found = {"ended": ended, "seconds": time.monotonic() - began, "told": telling, "compiled": compiled}
    if not ended:
        found["weights"] = {name: _whole(weight) for name, weight in model.state_dict().items()}
    accel.undo(model)
    logging.getLogger("accel").removeHandler(log)
    return found


def with_another_torch(rank: int) -> None:
    """Give rank 1 another version of torch."""
    torch.__version__ = f"2.13.{rank}"  # type: ignore[assignment]


def as_stages(net: nn.Module) -> nn.Module:
    """Give each rank another model, as the stages of a pipeline are."""
    return nn.Sequential(net, nn.Linear(4, 4)) if dist.get_rank() else net


def _compile(before: Callable[[], object]) -> None:
    """Have torch capture the graphs, and run them as they are: that takes no compiler."""

    def compiled(graph: Any, inputs: Any) -> Any:
        before()
        return graph.forward

    draws.compile_with_plain_draws = compiled  # type: ignore[assignment]
