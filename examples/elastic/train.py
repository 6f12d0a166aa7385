"""Elastic training: the batch size is chosen while it trains, and the job goes on when workers come and go.

    python -m examples.elastic.train                          # alone on this machine
    python -m examples.elastic.train runs/elastic --epochs 3  # saved there; the same call once more goes on

`examples/elastic/nodes.py` runs it under torchrun, with a node that joins and one that is killed.
"""

from __future__ import annotations

import os
import time

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel

SAMPLES = 4096


def samples() -> TensorDataset:
    """Return points of two noisy classes, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 16, generator=generator)
    noise = 0.5 * torch.randn(SAMPLES, generator=generator)
    return TensorDataset(x, (x[:, :4].sum(1) + noise > 0).long())


def train(folder: str | None, epochs: int, pause_s: float) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)  # the operators are tiny: a second thread only waits
    data, is_distributed = samples(), dist.is_initialized()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    if is_distributed:
        model = DistributedDataParallel(model)
        loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    else:
        loader = DataLoader(data, batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    checkpoint = None if folder is None else accel.Checkpointing(folder=folder, interval_s=2.0)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(max_batch_size=512, checkpoint=checkpoint), cache=False
    )

    workers = dist.get_world_size() if is_distributed else 1
    leads = not is_distributed or dist.get_rank() == 0
    if leads:
        print(f"workers: {workers}", flush=True)
    for epoch in accel.remaining_epochs(loader, epochs):
        total, steps = 0.0, 0
        for x, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), label.to(device))
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
            time.sleep(pause_s)
        if leads:
            per_step = workers * loader.batch_sampler.batch_sizes[0]
            print(f"epoch {epoch + 1}: loss {total / max(steps, 1):.3f}, {per_step} samples a step", flush=True)
    if folder is not None:
        accel.save_checkpoint(model)  # so that the next call has nothing left to do


@click.command()
@click.argument("folder", required=False)
@click.option("--epochs", default=20, show_default=True)
@click.option("--pause", default=0.0, show_default=True, help="Seconds after each step, as a larger model would take.")
def main(folder: str | None, epochs: int, pause: float) -> None:
    """Train, saved in FOLDER if it is given."""
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(folder, epochs, pause)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
