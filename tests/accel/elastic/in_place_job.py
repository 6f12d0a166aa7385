"""A DDP job that goes on while its ranks change, and writes down what each of its steps took."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accel
from accel.elastic.batch_size import run_noise
from accel.elastic.options import Checkpointing
from accel.elastic.sample_position import remaining_epochs
from accel.elastic.save_policy import SavePolicy
from accel.elastic.saving import run as checkpoint_run
from accel.goodput.efficiency import NoiseInterval
from tests.accel.elastic.scheduled_job import Log

SAMPLES, EPOCHS, PACE_S = 3000, 3, 0.25


class Hasty(SavePolicy):
    """Ranks that meet every few steps."""

    _meeting_s = 0.05


def main(folder: Path, kind: str) -> None:
    """Train in a folder; `kind` is of the job."""
    checkpoint_run.SavePolicy = Hasty  # type: ignore[misc]
    run_noise.interval_of = lambda estimate: NoiseInterval(5000.0, 4000.0, 6000.0)
    dist.init_process_group("gloo")
    own = [os.getpid()]
    dist.broadcast_object_list(own)  # of a newcomer, its own
    if kind == "groups":
        dist.new_group([0])
    if kind == "fails" and "ACCEL_RESIZES_RANK" in os.environ:
        raise RuntimeError("a fault of the newcomer's")
    torch.manual_seed(dist.get_rank())
    model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    workers = 2 if kind == "workers" else 0
    batch = 8 // dist.get_world_size() if kind == "divides" else 4
    loader: Any = DataLoader(data, batch, sampler=DistributedSampler(data, seed=4), num_workers=workers)
    saved = Checkpointing(folder=folder / "checkpoints", schedulers=[schedule])
    most = 32 if kind == "grows" else None
    model, loader, optimizer = accel.optimize(
        model,
        loader,
        optimizer,
        allow="exact",
        cache=False,
        elastic=accel.Elastic(checkpoint=saved, max_batch_size=most),
    )
    log = Log(folder / "logs" / str(os.getpid()))
    dist.barrier()  # a newcomer is alone here: the others are in the midst of their loop
    for epoch in remaining_epochs(loader, EPOCHS):
        _exchange(kind)
        for batch, target, index in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
            weights = sum(float(each.detach().abs().sum()) for each in model.parameters())
            fresh = index.tolist()[: loader.batch_sampler.fresh]
            log(
                epoch=epoch,
                rank=dist.get_rank(),
                world=dist.get_world_size(),
                fresh=fresh,
                weights=weights,
                at=time.time(),
            )
            if not (folder / "hurry").exists():
                time.sleep(PACE_S)
        _exchange(kind)
        schedule.step()
    log(ended=schedule.last_epoch, rate=optimizer.param_groups[0]["lr"])
    time.sleep(0.3)  # as below: a process that ends then is aborted
    dist.destroy_process_group()


def _exchange(kind: str) -> None:
    """Exchange something, as scripts do around their epochs.

    Not where workers are forked right after it: in one run of some twenty a worker then waited for ever, in
    `_PyThreadState_DeleteExcept` after the fork, for a lock that another thread had held (CPython 3.11, torch 2.13).
    """
    if kind != "workers":
        dist.all_reduce(torch.ones(()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
