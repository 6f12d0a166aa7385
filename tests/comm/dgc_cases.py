"""What the ranks of DGC's tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.dgc import DGC
from accel.comm.hooks import CommState, hook
from accel.comm.sgd_momentum import take_momentum
from tests.comm.cases import SECONDS, buckets, flat, message, same_everywhere
from tests.comm.dgc_training import DENSE_BELOW, SGD, Net, Published, Training, groups, loss


def as_dense(rank: int, world: int) -> dict[str, float]:
    """Compare ratio 1 with dense SGD: the largest difference of weights over 6 steps, relative."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "momentum": ({"momentum": 0.9}, None),
        "weight decay": ({"momentum": 0.9, "weight_decay": 0.02}, None),
        "nesterov": ({"momentum": 0.9, "weight_decay": 0.02, "nesterov": True}, None),
        "groups": ({"momentum": 0.9, "weight_decay": 0.02}, {"momentum": 0.5, "lr": 0.02, "nesterov": True}),
        "group without momentum": ({"momentum": 0.9, "weight_decay": 0.02}, {"momentum": 0.0}),
        "maximize": ({"momentum": 0.9, "weight_decay": 0.02, "lr": 1e-3, "maximize": True}, None),
    }
    found = {}
    for name, (given, second) in cases.items():
        for hierarchical in (False, True) if name in ("momentum", "groups") else (False,):
            sgd = {**SGD, **given}
            run = Training(DGC(1.0, dense_below=DENSE_BELOW), sgd, second, hierarchical=hierarchical)
            plain = Net()
            other = torch.optim.SGD(groups(plain, sgd, second), lr=0.1)
            # Both momentum and rate move at every step.
            schedules = [
                torch.optim.lr_scheduler.CyclicLR(one, 0.01, 0.1, step_size_up=3, base_momentum=0.5, max_momentum=0.9)
                if name == "momentum"
                else torch.optim.lr_scheduler.StepLR(one, 3, 0.5)
                for one in (run.sgd, other)
            ]
            worst = 0.0
            for step in range(6):
                got = run.step(rank, step)
                other.zero_grad()
                (sum(loss(plain, r, step) for r in range(world)) / world).backward()  # type: ignore[union-attr]
                other.step()
                want = flat([one.detach() for one in plain.parameters()])
                worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
                for one in schedules:
                    one.step()
            found[f"{name}, {'hosts' if hierarchical else 'flat'}"] = worst
            run.close()
    return found


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, {}, None),
    "decay": ({}, {"weight_decay": 0.02}, None),
    "nesterov": ({}, {"nesterov": True, "weight_decay": 0.02}, None),
    "groups": ({}, {"weight_decay": 0.02}, {"momentum": 0.5, "lr": 0.02}),
    "warm-up": ({"warmup_steps": 2, "warmup": (0.5, 0.25, 0.0625, 0.001)}, {}, None),
}


def as_published(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Compare with the algorithm on one process over 8 steps, at 2 %: as many as the warm-up has."""
    found = {}
    for name in names:
        settings, given, second = PUBLISHED[name]
        compressor = DGC(**{"ratio": 0.02, "dense_below": DENSE_BELOW, **settings})
        run, want = (
            Training(compressor, {**SGD, **given}, second),
            Published(world, compressor, {**SGD, **given}, second),
        )
        worst, same = 0.0, True
        for step in range(8):
            got, right = run.step(rank, step), want.step(step)
            same &= same_everywhere(got)
            worst = max(worst, ((got - right).abs().max() / right.abs().max()).item())
        held = (run.own("velocity"), run.own("residual"))
        name_of = {id(p): name for name, p in want.net.named_parameters()}
        for mine, theirs in zip(held, (want.u[rank], want.v[rank]), strict=True):
            for p, value in theirs.items():
                if p.dim() > 1 and p.numel() >= DENSE_BELOW:
                    worst = max(worst, (mine[name_of[id(p)]] - value).abs().max().item())
        found[name] = {"error": worst, "same": same, "buckets": buckets(run.state)}
        run.close()
    return found


LAWS: dict[str, dict[str, Any]] = {
    "flat": {},
    "hosts": {"hierarchical": True},
    "rebuilt, views": {"find_unused_parameters": False, "gradient_as_bucket_view": True},
    "static": {"find_unused_parameters": False, "static_graph": True},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16, "bucket_cap_mb": 0.001},
    "float16": {"dtype": torch.float16, "hierarchical": True, "bucket_cap_mb": 0.001},
}
"""Options of DDP and of its state."""


def law(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Add up what was decoded, what is left, and m u + g of every step."""
    found = {}
    for name in names:
        run = Training(DGC(0.01, dense_below=DENSE_BELOW), SGD, **LAWS[name])
        plain = Net(run.dtype)
        decoded = {n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in run.net.named_parameters()}
        moved = {n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in run.net.named_parameters()}
        same = True
        for step in range(4):
            run.sgd.zero_grad()
            velocity, gradient = run.own("velocity"), own_gradient(plain, run, rank, step)
            loss(run.ddp, rank, step, True, run.dtype).backward()
            for n, p in run.net.named_parameters():
                assert p.grad is not None
                same &= same_everywhere(p.grad.view(-1))
                decoded[n] += p.grad.double().view(-1)
                moved[n] += SGD["momentum"] * velocity[n] + gradient[n] / world
            run.sgd.step()
        left, worst, share = run.own("residual"), 0.0, 0.0
        for n, p in run.net.named_parameters():
            if run.state.compressor.is_dense(p.shape):  # type: ignore[attr-defined]
                worst = max(worst, float(left[n].abs().max()))
                continue
            total = torch.stack([left[n], moved[n]])
            dist.all_reduce(total)
            scale = total[1].abs().max()
            worst = max(worst, ((decoded[n] + total[0] - total[1]).abs().max() / scale).item())
            share = max(share, (decoded[n] != 0).double().mean().item())
        found[name] = {"law": worst, "share": share, "same": same, "buckets": buckets(run.state)}
        run.close()
    return found


def own_gradient(plain: Net, run: Training, rank: int, step: int) -> dict[str, Tensor]:
    """Return this rank's gradients by name, from a model outside of DDP."""
    plain.load_state_dict(run.net.state_dict())
    plain.zero_grad()
    loss(plain, rank, step, True, run.dtype).backward()
    return {n: p.grad.double().view(-1) for n, p in plain.named_parameters() if p.grad is not None}


def held(run: Training) -> Tensor:
    return flat([*run.own("velocity").values(), *run.own("residual").values()])


def void_steps(run: Training, rank: int) -> dict[str, bool]:
    """Train, give rank 1 an infinity, then a NaN, in a matrix and in a bias, and train on."""
    for step in range(3):
        run.step(rank, step)
    before, arrived, untouched = held(run), True, True
    for bad in (float("inf"), float("nan")):
        for place in (run.net.layers[1].weight, run.net.layers[2].bias):
            run.sgd.zero_grad()
            handle = place.register_hook(  # type: ignore[union-attr,operator]
                lambda g, bad=bad: torch.full_like(g, bad) if rank == 1 else g
            )
            loss(run.ddp, rank, 3).backward()
            handle.remove()
            arrived &= not torch.isfinite(place.grad).all().item()  # type: ignore[union-attr,arg-type]
            untouched &= torch.equal(held(run), before)
    again = run.step(rank, 4)
    recovers = bool(torch.isfinite(again).all()) and same_everywhere(again)
    moved = not torch.equal(held(run), before)
    run.close()
    return {"arrived": arrived, "untouched": untouched, "recovers": recovers, "moved": moved}


VOID: dict[str, tuple[dict[str, float], bool]] = {
    "sparse, flat": ({}, False),
    "sparse, hosts": ({}, True),
    "dense, flat": ({"ratio": 1.0}, False),
}
"""Settings of DGC, and whether by hosts."""


def void_step(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Meet steps that are void."""
    found = {}
    for name in names:
        settings, hierarchical = VOID[name]
        compressor = DGC(**{"ratio": 0.01, "dense_below": DENSE_BELOW, **settings})  # type: ignore[arg-type]
        found[name] = void_steps(Training(compressor, SGD, hierarchical=hierarchical), rank)
    return found


def no_sync(rank: int, world: int) -> dict[str, Any]:
    """Accumulate two backward passes; they are one step of momentum."""
    compressor = DGC(0.02, dense_below=DENSE_BELOW)
    run, once = Training(compressor, SGD), Training(DGC(0.02, dense_below=DENSE_BELOW), SGD)
    worst = 0.0
    for step in range(4):
        run.sgd.zero_grad()
        with run.ddp.no_sync():
            loss(run.ddp, rank, 2 * step).backward()
        loss(run.ddp, rank, 2 * step + 1).backward()
        run.sgd.step()
        once.sgd.zero_grad()
        (loss(once.ddp, rank, 2 * step) + loss(once.net, rank, 2 * step + 1)).backward()
        once.sgd.step()
        worst = max(worst, (run.weights() - once.weights()).abs().max().item())
    run.close()
    once.close()
    return {"error": worst, "same": same_everywhere(run.weights())}


def without_a_step(rank: int, world: int) -> dict[str, Any]:
    """Average passes that no step of the optimizer follows: finite ones, void ones, and those of other ranks."""
    found: dict[str, Any] = {}
    run = Training(DGC(0.02, dense_below=DENSE_BELOW), SGD)
    run.step(rank, 0)
    loss(run.ddp, rank, 1).backward()
    found["finite"] = message(lambda: loss(run.ddp, rank, 2).backward())
    run.close()

    run, clean = Training(DGC(0.02, dense_below=DENSE_BELOW), SGD), Training(DGC(0.02, dense_below=DENSE_BELOW), SGD)
    for step in range(4):
        run.sgd.zero_grad()
        (float("inf") * loss(run.ddp, rank, step)).backward()  # GradScaler would make no step of it
        run.step(rank, step)
        clean.step(rank, step)
    found["void"] = torch.equal(run.weights(), clean.weights())
    run.close()
    clean.close()

    run = Training(DGC(0.02, dense_below=DENSE_BELOW), SGD)
    for _ in range(2):
        with run.ddp.join():
            for step in range(2 + rank):
                run.step(rank, step)
    found["joined"] = run.state.step
    run.close()
    return found


class Pictures(nn.Module):
    """A convolution whose weights lie with channels last, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.conv = nn.Conv2d(6, 8, 3, dtype=torch.float64)
        self.turned = nn.Parameter(torch.randn(8, 20, dtype=torch.float64).T)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.conv(x)).mean((2, 3)) @ self.turned.T).square().mean()


def laid_out(rank: int, world: int) -> dict[str, float]:
    """Give momentum back to weights whose dimensions lie in another order: how far the buffers are from dense SGD's."""
    pictures = lambda r, step: torch.randn(  # noqa: E731
        4, 6, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + r)
    )
    net, plain = Pictures().to(memory_format=torch.channels_last), Pictures()
    ddp = DistributedDataParallel(net)
    state = CommState(ddp, DGC(1.0, dense_below=DENSE_BELOW), timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    sgd, other = (torch.optim.SGD(one.parameters(), **SGD) for one in (net, plain))
    momentum = take_momentum(state, sgd)
    for step in range(3):
        sgd.zero_grad()
        ddp(pictures(rank, step)).backward()
        sgd.step()
        other.zero_grad()
        (sum(plain(pictures(r, step)) for r in range(world)) / world).backward()
        other.step()
    momentum.close()
    state.close()
    theirs = dict(plain.named_parameters())
    buffers = {name: (sgd.state[one], other.state[theirs[name]]) for name, one in net.named_parameters()}
    return {
        name: (own["momentum_buffer"] - dense["momentum_buffer"]).abs().max().item()
        for name, (own, dense) in buffers.items()
    }


class Scaler:
    """The scale of a GradScaler, to be set by hand."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def apart(make: Callable[[Scaler | None], Training], rank: int) -> float:
    """Compare steps with a loss scale that changes with steps without one: the largest difference of weights."""
    scaler = Scaler()
    run, without = make(scaler), make(None)
    worst = 0.0
    for step in range(6):
        scaler.scale = 2.0 ** (3 * step)
        run.sgd.zero_grad()
        (scaler.scale * loss(run.ddp, rank, step)).backward()
        for p in run.net.parameters():
            p.grad.div_(scaler.scale)  # type: ignore[union-attr]
        run.sgd.step()
        worst = max(worst, (run.weights() - without.step(rank, step)).abs().max().item())
    run.close()
    without.close()
    return worst


def handed_over(rank: int, world: int) -> dict[str, Any]:
    """Train densely, under DGC at ratio 1, and densely again; compare with dense training throughout."""
    found: dict[str, Any] = {}
    for nesterov in (False, True):
        sgd = {**SGD, "weight_decay": 0.02, "nesterov": nesterov}
        run, plain = Training(DGC(1.0, dense_below=DENSE_BELOW), sgd, take=False), Net()
        other = torch.optim.SGD(plain.parameters(), **sgd)
        worst, options = 0.0, []
        for step in range(9):
            if step == 3:
                run.momentum = take_momentum(run.state, run.sgd)
            if step == 6:
                assert run.momentum is not None
                run.momentum.close()
                run.momentum.close()
            other.zero_grad()
            (sum(loss(plain, r, step) for r in range(world)) / world).backward()  # type: ignore[union-attr]
            other.step()
            if 3 <= step < 6:
                run.step(rank, step)
                before = {name: run.sgd.param_groups[0][name] for name in ("momentum", "weight_decay", "nesterov")}
                options.append(before == {name: sgd[name] for name in before})
                gradient = run.net.layers[0].bias.grad
            else:
                run.sgd.zero_grad()
                local = sum(loss(run.net, r, step) for r in range(world)) / world
                local.backward()  # type: ignore[union-attr]
                run.sgd.step()
            worst = max(worst, (run.weights() - flat([p.detach() for p in plain.parameters()])).abs().max().item())
        found[str(nesterov)] = {
            "error": worst,
            "options": all(options),
            "left": float(held(run).abs().sum()),
            "gradient kept": gradient is not None and not torch.equal(gradient, torch.zeros_like(gradient)),
            "asks again": message(lambda: loss(run.ddp, rank, 0).backward()),  # noqa: B023
        }
        run.close()
    return found


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the message of each bad hand-over."""
    run = Training(DGC(0.01), SGD, take=False)
    found = {"not taken": message(lambda: loss(run.ddp, rank, 0).backward())}
    run.close()
    run = Training(DGC(0.01), SGD, take=False, dtype=torch.float32)
    net, state = run.net, run.state
    for name, optimizer in {
        "adam": torch.optim.Adam(net.parameters()),
        "dampening": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
        "fused": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True),
        "another model": torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9),
    }.items():
        found[name] = message(lambda optimizer=optimizer: take_momentum(state, optimizer))
    take_momentum(state, run.sgd)
    found["twice"] = message(lambda: take_momentum(state, run.sgd))
    found["closure"] = message(lambda: run.sgd.step(lambda: 0.0))
    run.close()
    other = Training(DGC(0.01, momentum=False), SGD, take=False)
    found["without"] = message(lambda: take_momentum(other.state, other.sgd))
    adam = torch.optim.Adam(other.net.parameters())
    loss(other.ddp, rank, 0).backward()
    adam.step()
    found["adam trains"] = str(same_everywhere(other.weights()))
    other.close()
    return found
