"""What the ranks of test_observation.py do."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.profiler.experiments import counterfactuals as experiments
from accel.profiler.system.meters import DdpWait


def every_case(rank: int, world: int) -> dict[str, Any]:
    """Return what each of these finds, one after the other."""
    return {
        "waits": waits(rank, world),
        "exchanges": (exchanges(3, synced=True), exchanges(3, synced=False)),
        "habits": habits(rank, world),
        "without": without(rank, world),
    }


def exchanges(every: int, *, synced: bool) -> float:
    """Update after several batches, with an exchange after each or the last of them; return what was counted."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    seen = DdpWait()
    for step in range(4):
        for micro in range(every):
            model.require_backward_grad_sync = synced or micro == every - 1
            model(torch.ones(2, 4)).sum().backward()
        seen.sample([model], step)
    seen.stop()
    return seen.exchanges()


def habits(rank: int, world: int) -> dict[str, tuple[bool, int, bool]]:
    """Return of some loops whether the last exchange is left out, how many buckets there are, if a search is timed."""
    inverted, right = [True, True, False], [False, False, True]
    loops: dict[str, tuple[list[bool], dict[str, Any]]] = {
        "inverted": (inverted, {}),
        "right": (right, {}),
        "small buckets": (right, {"bucket_cap_mb": 0.001}),
        "searches": (right, {"find_unused_parameters": True}),
        "has unused": (right, {"find_unused_parameters": True}),
    }
    found = {}
    for name, (synced, options) in loops.items():
        layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)])
        if name == "has unused":
            layers.add_module("unused", _Unused())
        model, seen = DistributedDataParallel(layers, **options), DdpWait()
        for step in range(5):
            for is_synced in synced:
                model.require_backward_grad_sync = is_synced
                model(torch.ones(2, 16)).sum().backward()
            seen.sample([model], step)
        seen.stop()
        found[name] = seen.leaves_out_last(), len(seen.bucket_bytes), seen.search() > 0
    return found


class _Unused(nn.Module):
    """Has a weight that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


def without(rank: int, world: int) -> list[tuple[int, int, bool, bool]]:
    """Return of each experiment the buckets with and without the suspect, and whether gradients stay what they are."""
    found = []
    for cause in ("communication.small_buckets", "communication.unused_search", "communication.each_micro_step"):
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)])
        model = DistributedDataParallel(layers, bucket_cap_mb=0.001, find_unused_parameters="unused" in cause)

        def step(model: DistributedDataParallel = model) -> tuple[int, Tensor, int]:
            before = model._get_ddp_logging_data().get("iteration", 0)  # type: ignore[no-untyped-call]
            model.zero_grad()
            for _ in range(2):
                model(torch.full((2, 16), rank + 1.0)).square().mean().backward()
            times = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            sizes = str(times.get("rebuilt_bucket_sizes") or times["bucket_sizes"]).count(",") + 1
            return (
                sizes,
                torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
                (times["iteration"] - before),
            )

        is_micro = "micro" in cause
        tried = experiments.last_exchange([model], 2) if is_micro else experiments.other_reducer([model], cause)
        assert tried is not None
        usual = [step() for _ in range(3)][-1]
        with tried.off():
            off = [step() for _ in range(3)][-1]
        again = [step() for _ in range(3)][-1]
        same = bool(torch.allclose(usual[1], off[1])) and bool(torch.equal(usual[1], again[1]))
        count = 2 if is_micro else 0
        found.append((usual[count], off[count], same and tried.worked(), model.find_unused_parameters))
    return found


def waits(rank: int, world: int) -> dict[str, float]:
    """Let rank 0 wait for rank 1's gradients; return its step anatomy, ms."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DataLoader(TensorDataset(torch.randn(72, 4), torch.zeros(72, dtype=torch.long)), batch_size=4)
    _, loader, _ = accel.optimize(model, plain, optimizer, disable=strategies.names(), budget=60)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        time.sleep(0.1 * rank)
        loss.backward()
        optimizer.step()
    found = dict(accel.explain(model).anatomy_before) if rank == 0 else {}
    accel.undo(model)
    return found
