"""What the ranks of the tests of local SGD do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Exact
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.local_sgd import LocalSGD
from accel.comm.one_bit import OneBit
from tests.comm.cases import SECONDS, message, same_everywhere
from tests.comm.local_sgd_training import Net, Optimizer, Published, Run, loss, two_groups, values
from tests.comm.tcp_bytes import sent_to, sockets

OPTIMIZERS: dict[str, Optimizer] = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "groups": lambda model: two_groups(model, momentum=0.9),
    # The bias before the normalisation has no gradient but rounding, which a small eps would make a step of.
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


def hosts_of(world: int, per_host: int, within: str) -> list[range]:
    size = per_host if within == "host" else 1
    return [range(low, low + size) for low in range(0, world, size)]


def withins(per_host: int) -> tuple[str, ...]:
    """Return where gradients may be averaged; the same thing on hosts of one rank."""
    return ("host", "rank") if per_host > 1 else ("rank",)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def as_dense(rank: int, world: int, per_host: int) -> dict[str, float]:
    """Compare averaging at every step with DDP: the largest difference of parameters, relative."""
    found = {}
    for name, within in (("plain", "rank"), ("nesterov", withins(per_host)[0]), ("groups", "rank")):
        run = Run(OPTIMIZERS[name], 2, 1, within=within, average_momentum=True)
        ddp = DistributedDataParallel(Net())
        optimizer = OPTIMIZERS[name](ddp)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        worst = 0.0
        for step in range(8):
            run.step(rank, step)
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
            schedule.step()
            got, want = (torch.cat([p.detach().view(-1) for p in one.parameters()]) for one in (run.ddp, ddp))
            worst = max(worst, relative(got, want))
        found[f"{name}, {within}"] = worst
        run.local.close()
    return found


PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("plain", {}, 1),
    "own momentum": ("momentum", {}, 1),
    "mean momentum": ("nesterov", {"average_momentum": True}, 1),
    "groups": ("groups", {"average_momentum": True}, 1),
    "adam": ("adam", {"average_momentum": True}, 1),
    "accumulation": ("momentum", {}, 3),
    "exact state": ("momentum", {"dense": True}, 1),
}
"""An optimizer, options of LocalSGD, and passes to a step."""
BY_RANK = ("own momentum", "accumulation")
"""Of these averaging within a rank is run beside that within a host; the others are as on hosts of one rank."""


def as_published(rank: int, world: int, per_host: int, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Compare with the algorithm on one process after each step, and replicas with each other."""
    found = {}
    for name, within in itertools.product(names, withins(per_host)):
        if within == "rank" and per_host > 1 and name not in BY_RANK:
            continue
        kind, given, parts = PUBLISHED[name]
        options = dict(given)
        run = _with_dense(OPTIMIZERS[kind], within) if options.pop("dense", False) else None
        run = run or Run(OPTIMIZERS[kind], 3, 4, within=within, **options)
        momentum = options.get("average_momentum", False)
        other = Published(world, OPTIMIZERS[kind], 3, 4, hosts_of(world, per_host, within), momentum)
        worst, same, apart = 0.0, [], []
        for step in range(11):
            got = run.step(rank, step, parts)
            worst = max(worst, relative(got, other.step(step, parts)[rank]))
            equal = same_everywhere(torch.cat([p.detach().view(-1) for p in run.ddp.parameters()]))
            # Dense up to step 3; averaged at steps 7 and 11.
            (same if step < 3 or step in (6, 10) else apart).append(equal)
            if step in (6, 10):
                same.append(same_everywhere(got))
        found[f"{name}, {within}"] = {
            "error": worst,
            "same": all(same),
            "apart": not any(apart),
            "hierarchical": run.local._weights.arrangement(run.local._weights.scheme).hierarchical,
        }
        run.local.close()
        if run.local._dense is not None:
            run.local._dense.close()
    return found


def _with_dense(optimizer: Optimizer, within: str) -> Run:
    """Return a run whose first phase goes through a CommState by hosts."""
    run = Run.__new__(Run)
    run.ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
    run.optimizer = optimizer(run.ddp)
    run.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 3, 0.7)
    dense = CommState(run.ddp, Exact(), hierarchical=True, timeout=SECONDS)
    run.local = LocalSGD(run.ddp, run.optimizer, 3, 4, within=within, dense=dense, timeout=SECONDS)
    return run


def drift(rank: int, world: int) -> str:
    """Let one rank skip a step unseen."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(OPTIMIZERS["plain"], 0, 3, within="rank")

    def train() -> None:
        for step in range(5):
            run.optimizer.zero_grad()
            scaler.scale(loss(run.ddp, rank, step) * (float("inf") if rank == step == 1 else 1)).backward()
            scaler.step(run.optimizer)
            scaler.update()

    said = message(train)
    run.local.close(average=False)
    return said


# Saving, and the end


def resume(rank: int, world: int, per_host: int) -> dict[str, bool]:
    """Stop amid local steps with a checkpoint of each rank, and after `average()` with that of rank 0."""
    found = {}
    for within in withins(per_host):
        whole = Run(OPTIMIZERS["momentum"], 2, 4, within=within)
        for step in range(10):
            whole.step(rank, step)
        whole.local.close(average=False)
        first = Run(OPTIMIZERS["momentum"], 2, 4, within=within)
        for step in range(4):
            first.step(rank, step)
        saved = pickle.loads(pickle.dumps(_checkpoint(first)))
        first.local.close(average=False)
        second = _load(saved, within)
        for step in range(4, 10):
            second.step(rank, step)
        found[f"{within}: own checkpoints"] = torch.equal(values(whole.ddp), values(second.ddp))
        second.local.close(average=False)

        if within == "host":
            continue  # as for ranks, whose weights differ more
        straight = Run(OPTIMIZERS["momentum"], 2, 4, within=within, average_momentum=True)
        for step in range(4):
            straight.step(rank, step)
        straight.local.average()
        one: list[Any] = [pickle.dumps(_checkpoint(straight)) if rank == 0 else None]
        dist.broadcast_object_list(one)
        again = _load(pickle.loads(one[0]), within, average_momentum=True)
        for step in range(4, 10):
            straight.step(rank, step)
            again.step(rank, step)
        found[f"{within}: rank 0's checkpoint"] = torch.equal(values(straight.ddp), values(again.ddp))
        straight.local.close()
        again.local.close()
    return found


def _checkpoint(run: Run) -> dict[str, Any]:
    parts = {"model": run.ddp.module, "optimizer": run.optimizer, "schedule": run.schedule, "local": run.local}
    return {name: copy.deepcopy(one.state_dict()) for name, one in parts.items()}


def _load(saved: dict[str, Any], within: str, **options: Any) -> Run:
    run = Run(OPTIMIZERS["momentum"], 2, 4, within=within, **options)
    run.ddp.module.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.schedule.load_state_dict(saved["schedule"])
    run.local.load_state_dict(saved["local"])
    return run


def ends(rank: int, world: int) -> dict[str, Any]:
    """Close in the middle of local steps, with and without a dense state, and after an error."""
    found: dict[str, Any] = {}
    for name in ("own", "state"):
        ddp = DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["plain"](ddp)
        dense = CommState(ddp, Half(), timeout=SECONDS) if name == "state" else None
        with LocalSGD(ddp, optimizer, 1, 5, within="rank", dense=dense, timeout=SECONDS) as local:
            for step in range(3):
                _plain_step(ddp, optimizer, rank, step)
            phase = local.local, ddp.broadcast_buffers
            apart = not same_everywhere(values(ddp))
        closed = same_everywhere(values(ddp))
        for step in range(3, 5):
            _plain_step(ddp, optimizer, rank, step)
        weights = torch.cat([one.detach().view(-1) for one in ddp.parameters()])
        found[name] = {
            "phase": phase,
            "apart": apart,
            "closed": closed,
            "dense again": same_everywhere(weights),
            "steps": local.step,
            "hooks": len(ddp._comm_hooks),
            "buffers": ddp.broadcast_buffers,
            "left": len(optimizer._optimizer_step_post_hooks),
        }
        local.close()
        if dense is not None:
            dense.close()
    ddp = DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["plain"](ddp)

    def broken() -> None:
        with LocalSGD(ddp, optimizer, 0, 5, within="rank", timeout=timedelta(seconds=5)):
            _plain_step(ddp, optimizer, rank, 0)
            if rank == 0:
                raise KeyError("of the user")
            raise RuntimeError("of another user")

    found["error"] = message(broken)
    return found


def _plain_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, rank, step).backward()
    optimizer.step()


class Codes(torch.optim.Optimizer):
    """Momentum kept as 8 bits with a scale, and a step size that it finds by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "found": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                old = (state["codes"] * state["scale"]).view_as(parameter) if state else 0.0
                new = 0.9 * old + parameter.grad
                state["scale"] = new.abs().amax().view(1) / 127
                state["codes"] = (new / state["scale"]).round().to(torch.int8)
                group["found"] = 0.9 * group["found"] + 0.1 / (1 + float(parameter.grad.norm()))
                parameter.sub_(new * group["lr"] * group["found"])


CLOSED: dict[str, Optimizer] = {
    **OPTIMIZERS,
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, amsgrad=True),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, fused=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-3),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01, eps=1e-3),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.001),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True, eps=1e-3),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "codes": lambda model: Codes(model.parameters()),
}


def closes(rank: int, world: int, per_host: int, names: list[str]) -> dict[str, dict[str, bool]]:
    """Close after 4 to 6 steps of which one was dense, and train on under DDP alone."""
    found = {}
    for number, name in enumerate(names):
        optimizer = CLOSED[name]
        options: dict[str, Any] = {"average_momentum": True} if name == "nesterov" else {}
        run, apart = Run(optimizer, 1, 2, within=withins(per_host)[number % per_host], **options), False
        for at in range(4 + number % 3):
            _plain_step(run.ddp, run.optimizer, rank, at)
            apart |= not all_same(run)
        if name == "fused adam":  # as where steps were skipped
            run.optimizer.state[run.ddp.module.first.weight]["step"] += rank
        run.ddp.module.norm.num_batches_tracked += rank
        run.local.close()
        one = {"apart": apart, "closed": all_same(run), "buffers": same_everywhere(buffers(run.ddp))}
        for at in range(10, 14):
            _plain_step(run.ddp, run.optimizer, rank, at)
        found[name] = {**one, "trained on": all_same(run)}
    return found


def buffers(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.double().reshape(-1) for one in model.buffers()])


def all_same(run: Run) -> bool:
    """Tell whether all ranks have the same weights and optimizer, to the bit."""
    state = run.optimizer.state_dict()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [[one.tolist() for one in run.ddp.parameters()], repr(_plain(state))])
    return all(one == parts[0] for one in parts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def closes_without_state(rank: int, world: int) -> dict[str, Any]:
    """Close where one rank's optimizer has no state of a parameter, and where it has another one."""
    found: dict[str, Any] = {}
    for name in ("none", "other"):
        run = Run(OPTIMIZERS["momentum"], 0, 9, within="rank")
        run.step(rank, 0)
        first = run.optimizer.state[run.ddp.module.first.weight]
        if rank == 0:
            first.clear()
            if name == "other":
                first["momentum_buffer"] = torch.zeros(3)
        found[name] = message(run.local.close), all_same(run)
        run.local.close(average=False)
    return found


# Bytes


def traffic(rank: int, world: int, per_host: int) -> dict[str, dict[str, float]]:
    """Count what each rank sends to others, of its own host and of others, per byte of weights, in each phase."""
    found = {}
    for within, momentum in (("host", False), ("rank", True)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(512, 1023))
        weight_bytes = sum(p.nbytes for p in ddp.parameters())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        local = LocalSGD(ddp, optimizer, 3, 3, within=within, average_momentum=momentum, timeout=SECONDS)

        def step(ddp: nn.Module = ddp, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            ddp(torch.ones(1, 512)).sum().backward()
            optimizer.step()

        phases: dict[str, tuple[Callable[[], None], int]] = {"first": (step, 2), "dense": (step, 1)}
        # The first averaging is at step 6: pipelines have met by then.
        phases |= {"meeting": (step, 3), "local": (step, 2), "averaging": (step, 1)}
        for phase, (call, times) in phases.items():
            dist.barrier()
            before = sockets()
            for _ in range(times):
                call()
            dist.barrier()  # on a busy machine some of it waits in the kernel until the peer reads
            after = sockets()
            both: list[Any] = [None] * world
            dist.all_gather_object(both, (before, after))
            sent = sent_to(rank, [one[0] for one in both], [one[1] for one in both])
            own_host = {r: count for r, count in sent.items() if r // per_host == rank // per_host}
            found[f"{within}, {momentum}, {phase}"] = {
                "within": sum(own_host.values()) / weight_bytes / times,
                "between": (sum(sent.values()) - sum(own_host.values())) / weight_bytes / times,
            }
        local.close()
    return found


# What is refused


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the message of each bad input, on every rank."""
    ddp = DistributedDataParallel(Net())
    sgd = OPTIMIZERS["momentum"](ddp)

    def make(model: Any = ddp, optimizer: Any = sgd, start_step: int = 0, every: int = 2, **options: Any) -> str:
        return message(lambda: LocalSGD(model, optimizer, start_step, every, timeout=SECONDS, **options))

    found = {
        "start_step": make(start_step=-1),
        "every": make(every=0),
        "within": make(within="node"),
        "no DDP": make(model=Net()),
        "no optimizer": make(optimizer="sgd"),
        "dense": make(dense="int8"),
        "foreign": make(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)),
        "missing": make(optimizer=torch.optim.SGD(ddp.module.first.parameters(), lr=0.1)),
        "settings differ": make(every=2 + rank),
        "complex": _complex(),
    }
    for name, compressor in (("DGC", DGC()), ("signs", OneBit(momentum=True))):
        with_momentum = CommState(ddp, compressor, timeout=SECONDS)
        found[name] = make(dense=with_momentum)
        with_momentum.close()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found["zero"] = make(optimizer=ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1))
    hooked = DistributedDataParallel(Net())
    state = CommState(hooked, timeout=SECONDS)
    hooked.register_comm_hook(state, hook)
    found["hooked"] = make(model=hooked, optimizer=OPTIMIZERS["plain"](hooked))
    state.close()

    local = LocalSGD(ddp, sgd, 0, 2, within="rank", timeout=SECONDS)
    found["version"] = message(lambda: local.load_state_dict({}))
    if rank:
        sgd.state[next(ddp.parameters())]["momentum_buffer"] = torch.zeros((), dtype=torch.float64)
    local.average_momentum = True
    found["state differs"] = message(local.average)
    local.close(average=False)
    return found


def _complex() -> str:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    ddp = DistributedDataParallel(Phase())
    return message(lambda: LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 0, 1, timeout=SECONDS))
