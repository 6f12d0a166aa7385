"""A model under post-local SGD, and the algorithm as published, all replicas in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.local_sgd import LocalSGD
from tests.comm.cases import SECONDS

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers, a normalisation with running statistics, a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(12, 37, dtype=dtype), nn.Linear(37, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(37, dtype=dtype)
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.gain


def loss(model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
    """Return the loss of a rank's own batch; parts of a step are accumulated."""
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    # Ranks see different data: each alone would go elsewhere.
    return (model(x.to(next(model.parameters()).dtype)) - torch.sin((3 + rank) * x[:, :6])).square().mean()


def two_groups(model: nn.Module, **sgd: Any) -> torch.optim.Optimizer:
    """Return SGD whose second layer has settings of its own."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    apart = list(inner.second.parameters())
    rest = [one for one in inner.parameters() if all(one is not other for other in apart)]
    return torch.optim.SGD([{"params": rest}, {"params": apart, "lr": 0.02, "weight_decay": 0.1}], lr=0.05, **sgd)


def values(model: nn.Module) -> Tensor:
    """Return weights and running statistics, flat."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    found = [one for one in inner.state_dict().values() if one.is_floating_point()]
    return torch.cat([one.detach().double().reshape(-1) for one in found])


class Run:
    """One rank's module, optimizer and schedule."""

    def __init__(self, optimizer: Optimizer, start_step: int, every: int, **options: Any) -> None:
        self.ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        self.optimizer = optimizer(self.ddp)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.local = LocalSGD(self.ddp, self.optimizer, start_step, every, timeout=SECONDS, **options)

    def step(self, rank: int, step: int, parts: int = 1) -> Tensor:
        self.optimizer.zero_grad()
        for part in range(parts - 1):
            with self.ddp.no_sync():
                loss(self.ddp, rank, step, part).backward()
        loss(self.ddp, rank, step, parts - 1).backward()
        self.optimizer.step()
        self.schedule.step()
        return values(self.ddp)


class Published:
    """Algorithm of the paper, with a model and an optimizer for each rank."""

    def __init__(
        self, world: int, optimizer: Optimizer, start_step: int, every: int, hosts: Sequence[range], momentum: bool
    ) -> None:
        self.models = [Net() for _ in range(world)]
        self.optimizers = [optimizer(one) for one in self.models]
        self.schedules = [torch.optim.lr_scheduler.StepLR(one, 3, 0.7) for one in self.optimizers]
        self.start_step, self.every, self.hosts, self.momentum = start_step, every, hosts, momentum
        self.steps = 0

    def step(self, step: int, parts: int = 1, skips: Sequence[int] = ()) -> list[Tensor]:
        """Take one step; ranks in `skips` found infinities. Return the values of each rank."""
        world, local = len(self.models), self.steps >= self.start_step
        if not local:  # DDP gives rank 0's statistics to all
            for one in self.models[1:]:
                _assign([list(one.buffers())], list(self.models[0].buffers()))
        gradients = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            for part in range(parts):
                loss(model, rank, step, part).backward()
            gradients.append([one.grad for one in model.parameters()])
        groups = self.hosts if local else [range(world)]
        for group in groups:
            mean = [sum(several) / len(group) for several in zip(*(gradients[r] for r in group), strict=True)]
            for rank in group:
                for parameter, gradient in zip(self.models[rank].parameters(), mean, strict=True):
                    parameter.grad = gradient.clone()
                if not set(skips) & set(group):
                    self.optimizers[rank].step()
                self.schedules[rank].step()
        if local or not skips:
            self.steps += 1
        if local and (self.steps - self.start_step) % self.every == 0:
            self.average()
        return [values(one) for one in self.models]

    def average(self) -> None:
        kept = [[*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())] for model in self.models]
        if self.momentum:
            for rank, optimizer in enumerate(self.optimizers):
                for parameter in self.models[rank].parameters():
                    state = optimizer.state[parameter]
                    kept[rank] += [state[key] for key in sorted(state) if key != "step"]
        means = [sum(one.detach() for one in several) / len(several) for several in zip(*kept, strict=True)]
        _assign(kept, means)


def _assign(replicas: list[list[Tensor]], to: list[Tensor]) -> None:
    with torch.no_grad():
        for tensors in replicas:
            for tensor, value in zip(tensors, copy.deepcopy(to), strict=True):
                tensor.copy_(value)
