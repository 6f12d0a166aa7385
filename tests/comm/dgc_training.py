"""A model under DGC, and the algorithm as published, on one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Compressor
from accel.comm.dgc import DGC
from accel.comm.hooks import CommState, hook
from accel.comm.sgd_momentum import SGDMomentum, take_momentum
from tests.comm.cases import SECONDS, flat, lacks, same_everywhere

SGD = {"lr": 0.05, "momentum": 0.9}
DENSE_BELOW = 64


class Net(nn.Module):
    """Matrices large and small, biases, a scalar, and a layer that not every step uses."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes = (12, 40, 33, 41, 6)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes))
        self.extra = nn.Linear(12, 40, dtype=dtype)
        self.small = nn.Parameter(torch.full((3, 6), 0.5, dtype=dtype))
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) + (self.extra(x) if extra and number == 0 else 0))
        return x * self.small.sum(0) * self.gain


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(3 * x[:, :6]).to(dtype)


def loss(model: nn.Module, rank: int, step: int, extra: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = batch(rank, step, dtype)
    return (model(x, extra) - y).square().mean()


def groups(model: nn.Module, sgd: dict[str, Any], second: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return one parameter group, or two where the second layer's differs."""
    if second is None:
        return [{"params": list(model.parameters()), **sgd}]
    apart = set(model.layers[1].parameters())  # type: ignore[union-attr,operator]
    return [
        {"params": [one for one in model.parameters() if one not in apart], **sgd},
        {"params": [one for one in model.parameters() if one in apart], **sgd, **second},
    ]


class Training:
    """A model under DGC."""

    def __init__(
        self, compressor: Compressor, sgd: dict[str, Any], second: dict[str, Any] | None = None, **options: Any
    ) -> None:
        dtype, group = options.pop("dtype", torch.float64), options.pop("process_group", None)
        self.net = Net(dtype)
        keys = ("hierarchical", "error_feedback")
        ours = {key: options.pop(key) for key in keys if key in options}
        self.take, self.scaler = options.pop("take", True), options.pop("scaler", None)
        if not self.take:
            ours["scaler"] = self.scaler
        options = {"bucket_cap_mb": 0.004, "find_unused_parameters": True, **options}
        self.ddp = DistributedDataParallel(self.net, process_group=group, **options)
        self.state = CommState(self.ddp, compressor, process_group=group, timeout=SECONDS, **ours)
        self.ddp.register_comm_hook(self.state, hook)
        self.sgd = torch.optim.SGD(groups(self.net, sgd, second), lr=0.1)
        self.dtype = dtype
        self.momentum: SGDMomentum | None = take_momentum(self.state, self.sgd, self.scaler) if self.take else None

    def step(self, rank: int, number: int, extra: bool = True) -> Tensor:
        self.sgd.zero_grad()
        loss(self.ddp, rank, number, extra, self.dtype).backward()
        self.sgd.step()
        return self.weights()

    def weights(self) -> Tensor:
        return flat([one.detach() for one in self.net.parameters()]).clone()

    def own(self, field: str) -> dict[str, Tensor]:
        """Return a field of this rank by parameter, in float64."""
        kept = self.state.state_dict()["own"].get(field, {})
        found = {}
        for name, one in self.net.named_parameters():
            whole = torch.zeros(one.numel(), dtype=torch.float64)
            for skipped, values in kept.get(name, []):
                whole[skipped : skipped + values.numel()] += values
            found[name] = whole
        return found

    def close(self) -> None:
        self.state.close()


def dense_step(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, step: int) -> None:
    """Take a step with the mean of all ranks' losses."""
    optimizer.zero_grad()
    (sum(loss(model, rank, step) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
    optimizer.step()


def held(run: Training) -> Tensor:
    """Return all that a run remembers."""
    return flat([*run.own("velocity").values(), *run.own("residual").values()])


def check_law(run: Training, rank: int, world: int, steps: int, bound: float, limit: float | None = None) -> int:
    """Train, and check that what was decoded and what is left are the sum of velocities.

    Args:
        bound: of the largest difference.
        limit: of the norm, if it is clipped.

    Returns:
        How many parameters have something left.
    """
    plain = Net(run.dtype)
    sums = {n: torch.zeros(2, p.numel(), dtype=torch.float64) for n, p in run.net.named_parameters()}
    for step in range(steps):
        run.sgd.zero_grad()
        plain.load_state_dict(run.net.state_dict())
        plain.zero_grad()
        loss(plain, rank, step, True, run.dtype).backward()
        velocity = run.own("velocity")
        gradient = {n: p.grad.double().view(-1) / world for n, p in plain.named_parameters() if p.grad is not None}
        norm = flat(list(gradient.values())).norm().item()
        factor = 1.0 if limit is None else min(1.0, limit / math.sqrt(world) / norm)
        loss(run.ddp, rank, step, True, run.dtype).backward()
        for n, p in run.net.named_parameters():
            assert p.grad is not None
            assert same_everywhere(p.grad.view(-1))
            sums[n][0] += p.grad.double().view(-1)
            sums[n][1] += SGD["momentum"] * velocity[n] + factor * gradient[n]
        run.sgd.step()
    residual, coarse = run.own("residual"), 0
    for n, p in run.net.named_parameters():
        total = torch.stack([residual[n], sums[n][1]])
        dist.all_reduce(total)
        assert lacks(sums[n][0] + total[0], total[1]) < bound, n
        coarse += bool(total[0].any())
        assert not (total[0].any() and run.state.compressor.is_dense(p.shape)), n  # type: ignore[attr-defined]
    return coarse


def check_void_steps(run: Training, rank: int) -> None:
    """Train, give rank 1 an infinity, then a NaN, in a matrix and in a bias, and train on."""
    for step in range(3):
        run.step(rank, step)
    before = held(run)
    for bad in (float("inf"), float("nan")):
        for place in (run.net.layers[1].weight, run.net.layers[2].bias):
            run.sgd.zero_grad()
            handle = place.register_hook(  # type: ignore[union-attr,operator]
                lambda g, bad=bad: torch.full_like(g, bad) if rank == 1 else g
            )
            loss(run.ddp, rank, 3).backward()
            handle.remove()
            assert not torch.isfinite(place.grad).all(), "it arrives"  # type: ignore[union-attr,arg-type]
            assert torch.equal(held(run), before), "what is remembered is untouched"
    again = run.step(rank, 4)
    assert torch.isfinite(again).all()
    assert same_everywhere(again)
    assert not torch.equal(held(run), before)
    run.close()


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


class Published:
    """The algorithm of the paper, one rank after the other; weight decay and small tensors as documented."""

    def __init__(self, world: int, compressor: DGC, sgd: dict[str, Any], second: dict[str, Any] | None = None) -> None:
        self.net, self.world, self.dgc = Net(), world, compressor
        self.groups = groups(self.net, {"weight_decay": 0.0, "nesterov": False, **sgd}, second)
        self.u, self.v = [self._zeros() for _ in range(world)], [self._zeros() for _ in range(world)]
        self.b = self._zeros()

    def _zeros(self) -> dict[Any, Tensor]:
        return {p: torch.zeros_like(p).view(-1) for p in self.net.parameters()}

    def step(self, number: int) -> Tensor:
        dgc, gradients = self.dgc, []
        for rank in range(self.world):
            self.net.zero_grad()
            loss(self.net, rank, number).backward()
            own = {p: p.grad.view(-1) / self.world for p in self.net.parameters()}  # type: ignore[union-attr]
            if dgc.max_grad_norm is not None:
                norm = flat(list(own.values())).norm()
                factor = min(1.0, dgc.max_grad_norm / math.sqrt(self.world) / norm.item())
                own = {p: factor * g for p, g in own.items()}
            gradients.append(own)
        with torch.no_grad():
            for group in self.groups:
                for p in group["params"]:
                    self._move(p, group, [own[p] for own in gradients], dgc.ratio_at(number + 1))
        return flat([one.detach() for one in self.net.parameters()]).clone()

    def _move(self, p: Tensor, group: dict[str, Any], gradients: list[Tensor], ratio: float) -> None:
        m, lr, w = group["momentum"], group["lr"], p.view(-1)
        dense = group["weight_decay"] * w
        arrives = torch.zeros_like(w)
        if p.dim() < 2 or p.numel() < DENSE_BELOW:
            dense = dense + sum(gradients)
        else:
            for rank, g in enumerate(gradients):
                u, v = self.u[rank][p], self.v[rank][p]
                u.mul_(m).add_(g)
                v.add_(g + m * u if group["nesterov"] else u)
                if ratio * self.world >= 1:
                    arrives += v
                    v.zero_()
                    continue
                sent = v.abs().topk(math.ceil(ratio * v.numel())).indices
                arrives[sent] += v[sent]
                v[sent] = 0
                if self.dgc.masking:
                    u[sent] = 0
        b = self.b[p]
        b.mul_(m).add_(dense)
        w.sub_(lr * (arrives + (dense + m * b if group["nesterov"] else b)))
