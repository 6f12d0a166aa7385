"""One rank of the runs in test_ddp.py: `RANK=0 python -m tests.accel.ddp_worker SCENARIO FOLDER`.

Trains under accel until the search is over, then plainly for as many steps, and saves what both left behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import accel
from accel import entry, strategies
from accel.run import Run
from tests.accel import loops
from tests.accel.loops import Net, Quick, Samples, everything, loss_of

MOST_STEPS = 1500


class Fragile(Quick):
    """As quick as `Quick`, but rank 1 can't switch it on."""

    name = "fragile"

    def enable(self, run: Run, setting: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such device on this rank")
        super().enable(run, setting)


class Diverging(Quick):
    """Wrong on rank 1 alone."""

    name = "diverging"

    def enable(self, run: Run, setting: Any) -> None:
        Quick.on = True
        rank = dist.get_rank()
        run.gate.add(self.name, lambda call: lambda *args: call(*args) * (1.0 + 0.5 * rank))


REGISTRIES: dict[str, list[Any]] = {
    "before the wrap": [Quick],
    "wrapped": [Quick],
    "fails on one rank": [Fragile, Quick],
    "wrong on one rank": [Diverging],
    "uneven batches": [Quick],
}


def _epochs(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if isinstance(loader, DataLoader):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader
        epoch += 1


def _loader(scenario: str, rank: int) -> Any:
    if scenario == "uneven batches":
        # As token-bucketed batches are: each rank has sizes of its own, and as many batches as the others.
        sizes = torch.randint(4, 12, (16,), generator=torch.Generator().manual_seed(rank)).tolist()
        return [(torch.ones(size, 6), torch.arange(size)) for size in sizes]
    data = Samples(170)
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=3))


def _settled(model: Any) -> bool:
    """Tell, on both ranks alike, whether the search is over on rank 0, which holds it."""
    box = [accel.explain(model).state != "searching"]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def train(scenario: str, rank: int, steps: int = 0) -> dict[str, Any]:
    """Train for `steps` steps plainly, or under accel if none are given."""
    optimized = not steps
    torch.manual_seed(100 + rank)  # dropout differs, as in real runs; DDP makes the weights equal at the start
    net = Net()
    loader = _loader(scenario, rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    options: dict[str, Any] = {"allow": "exact", "budget": 60}
    tuned: Any = net
    model: Any = net
    if optimized and scenario != "wrapped":
        tuned, loader, optimizer = accel.optimize(net, loader, optimizer, **options)
    model = DistributedDataParallel(net)
    if optimized and scenario == "wrapped":
        tuned, loader, optimizer = accel.optimize(model, loader, optimizer, **options)
        assert tuned is model
    batches = _epochs(loader)
    done = 0
    while done < (steps or MOST_STEPS):
        if optimized and done % 20 == 10 and _settled(tuned):
            break
        done += 1
        x, target = next(batches)
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()
    result: dict[str, Any] = {"steps": done, "state": everything(net, optimizer)}
    if optimized:
        report = accel.explain(tuned)
        result["plan"] = report.plan
        result["active"] = entry.MODELS[tuned].session.active
        result["on"] = Quick.on
        result["report"] = report.to_json()
        accel.undo(tuned)
    return result


def main(scenario: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    strategies.REGISTRY[:] = REGISTRIES[scenario]
    loops.play_clock()
    accelerated = train(scenario, rank)
    plain = train(scenario, rank, accelerated["steps"])
    torch.save({"plain": plain, "accelerated": accelerated}, folder / f"{rank}.pt")
    dist.barrier()  # a rank that leaves while gloo still works for the other is ended by SIGABRT now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
