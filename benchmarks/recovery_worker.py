"""A rank of the jobs that `benchmarks.recovery` kills one of: the same training, kept alive in three ways.

    torchrun --standalone --nproc-per-node=2 --max-restarts=9 -m benchmarks.recovery_worker script FOLDER

Each step is a line in a file of the rank: when it ended, its number, how many took part.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PACE_S = 0.02
"""Slept in each step, as a larger model would compute."""
SAVE_EVERY = 20
"""Steps, of the script that saves by itself; accel is asked for the same."""
_LOSS = nn.CrossEntropyLoss()


class Counted(nn.Module):
    """A small model that counts its training steps in its state."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        out: Tensor = self.layers(x)
        return out


def samples() -> TensorDataset:
    """Return the samples, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(65_536, 64, generator=generator), torch.arange(65_536) % 10)


class Log:
    """The steps of a rank, a line each."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{time.time_ns()}-{os.getpid()}.jsonl").open("w", encoding="utf-8", buffering=1)

    def __call__(self, step: int, world: int) -> None:
        """Note a step that has ended."""
        self._file.write(json.dumps({"at": time.time(), "step": step, "world": world}) + "\n")


def step_of(model: Any, counted: Counted, optimizer: Any, batch: tuple[Tensor, Tensor]) -> int:
    """Train on a batch; return how many steps the model has taken then."""
    x, target = batch
    optimizer.zero_grad()
    _LOSS(model(x), target).backward()
    optimizer.step()
    time.sleep(PACE_S)
    counted.steps += 1
    return int(counted.steps)


def endlessly(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from loader


def _distributed() -> tuple[Any, Counted, torch.optim.Optimizer, DataLoader[Any]]:
    dist.init_process_group("gloo")
    counted = Counted()
    data = samples()
    loader = DataLoader(data, 16, sampler=DistributedSampler(data))
    return DistributedDataParallel(counted), counted, torch.optim.AdamW(counted.parameters()), loader


def script(folder: Path) -> None:
    """Save every few steps and load at the start, as scripts under torchrun do."""
    model, counted, optimizer, loader = _distributed()
    saved, log = folder / "checkpoint.pt", Log(folder)
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        counted.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for batch in endlessly(loader):
        step = step_of(model, counted, optimizer, batch)
        log(step, dist.get_world_size())
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": counted.state_dict(), "optimizer": optimizer.state_dict()}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


def accel_checkpoint(folder: Path) -> None:
    """Let accel save and restore."""
    import accel
    from accel.elastic.options import Checkpointing

    model, counted, optimizer, loader = _distributed()
    # As often as the script does; by default it is at most every ten minutes.
    saving = Checkpointing(folder=str(folder / "checkpoints"), interval_s=SAVE_EVERY * 1.25 * PACE_S)
    model, loaded, optimizer = accel.optimize(
        model, loader, optimizer, elastic=accel.Elastic(checkpoint=saving), cache=False
    )
    log = Log(folder)
    for batch in endlessly(loaded):
        log(step_of(model, counted, optimizer, batch), dist.get_world_size())


def torchft(folder: Path) -> None:
    """Be a replica group of TorchFT, whose others go on without it and give it their weights when it is back."""
    from torchft import DistributedDataParallel as Replicated  # type: ignore[import-not-found,unused-ignore]
    from torchft import Manager, Optimizer, ProcessGroupGloo

    counted = Counted()
    inner = torch.optim.AdamW(counted.parameters())

    def state() -> dict[str, Any]:
        return {"model": counted.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        counted.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=os.environ["REPLICA_GROUP"],
        timeout=timedelta(seconds=30),
    )
    model, optimizer, log = Replicated(manager, counted), Optimizer(manager, inner), Log(folder)
    for batch in endlessly(DataLoader(samples(), 16, shuffle=True)):
        step_of(model, counted, optimizer, batch)
        log(manager.current_step(), manager.num_participants())


def ray_train(config: dict[str, str]) -> None:
    """Be a worker of Ray Train's, which keeps the checkpoints that it is handed."""
    import tempfile

    import ray.train

    torch.set_num_threads(1)
    counted, data = Counted(), samples()
    optimizer, model = torch.optim.AdamW(counted.parameters()), DistributedDataParallel(counted)
    if (saved := ray.train.get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
        counted.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    log = Log(Path(config["folder"]))
    for batch in endlessly(DataLoader(data, 16, sampler=DistributedSampler(data))):
        step = step_of(model, counted, optimizer, batch)
        log(step, dist.get_world_size())
        if step % SAVE_EVERY:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                state = {"model": counted.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, Path(folder) / "checkpoint.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({}, checkpoint=checkpoint)


WAYS: dict[str, Callable[[Path], None]] = {"script": script, "accel": accel_checkpoint, "torchft": torchft}


@click.command()
@click.argument("way", type=click.Choice(list(WAYS)))
@click.argument("folder", type=click.Path(path_type=Path))
def main(way: str, folder: Path) -> None:
    """Train, kept alive in one WAY, until killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    WAYS[way](folder)


if __name__ == "__main__":
    main()
