"""A small DDP job that is interrupted where a schedule says so, and writes down what each of its steps took."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accel
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic import checkpoint, training_state
from accel.elastic.batch_size import run_noise
from accel.elastic.checkpoint import Disk
from accel.elastic.options import Checkpointing
from accel.elastic.sample_position import remaining_epochs
from accel.elastic.save_policy import SavePolicy
from accel.elastic.saving import run as checkpoint_run
from accel.goodput.efficiency import NoiseInterval
from tests.hooked import hooked

SAMPLES, EPOCHS = 203, 2
MOMENTS = ("forward", "backward", "stepped", "epoch", "end")


@dataclass(frozen=True)
class End:
    """A signal that a rank is sent.

    Args:
        step: of its run, from 0, at which or after which the moment is waited for.
        moment: one of `MOMENTS`, or the number of an operation on the disk in a save.
        signal: its number.
    """

    step: int
    moment: str | int
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Run:
    """One start of the job; `ends` by rank, and none where it is left to finish."""

    world: int
    batch: int
    most: int | None = None
    """max_batch_size, over all ranks."""
    ends: tuple[tuple[int, End], ...] = ()


class Interrupted:
    """Sends this process its signal when its moment has come."""

    def __init__(self, end: End | None) -> None:
        self.end, self.step = end, 0

    def at(self, moment: str | int) -> None:
        """Say where the job is."""
        if self.end is not None and self.step >= self.end.step and moment == self.end.moment:
            number, self.end = self.end.signal, None
            os.kill(os.getpid(), number)


class InterruptedDisk(Disk):
    """A disk that says which operation of a save is next."""

    def __init__(self, interrupted: Interrupted) -> None:
        self._interrupted, self._count = interrupted, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("make_folder", "open", "write", "sync", "sync_folder", "rename", "remove"):
            # torch.save writes some tens of times: each folder that is made begins anew.
            self._count = 0 if name == "make_folder" else self._count + 1
            self._interrupted.at(self._count)
        return super().__getattribute__(name)


class Log:
    """Lines of JSON, each there as soon as it is written, also if the process is killed after that."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **values: Any) -> None:
        os.write(self._file, (json.dumps(values) + "\n").encode())


class Count:
    """The steps of the whole training, saved beside accel's own count."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def train(run: Run, rank: int, folder: Path, log: Log, pace: Callable[[], None] = lambda: None) -> None:
    """Train as a script would, on one rank, and call `pace` in each step; the process group is there."""
    interrupted = Interrupted(dict(run.ends).get(rank))
    _in_a_hurry(interrupted)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model: nn.Module = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    loader: Any = DataLoader(data, run.batch, sampler=DistributedSampler(data, seed=4))
    count = Count()
    saved = Checkpointing(folder=folder, schedulers=[schedule], more={"count": count}, interval_s=0.02)
    elastic = accel.Elastic(max_batch_size=run.most, checkpoint=saved)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic, allow="exact", cache=False)

    log(begins=count.steps)
    for epoch in remaining_epochs(loader, EPOCHS):
        for batch, target, index in loader:
            taken = {"samples": index.tolist(), "fresh": loader.batch_sampler.fresh}
            log(step=count.steps, epoch=epoch, world=run.world, **taken)
            interrupted.at("forward")
            pace()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch * random.uniform(0.9, 1)), target * np.random.uniform(0.9, 1))
            loss.backward()
            interrupted.at("backward")
            optimizer.step()
            count.steps += 1
            interrupted.step += 1
            interrupted.at("stepped")
        interrupted.at("epoch")
        schedule.step()
    interrupted.at("end")
    log(ended=_digest(model.module.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    accel.undo(model)


def _in_a_hurry(interrupted: Interrupted) -> None:
    """Save and meet every few steps, and let the noise be such that batches grow."""
    noise = NoiseInterval(5000.0, 4000.0, 6000.0)
    patched: Any = (run_noise, checkpoint, checkpoint_run)
    patched[0].interval_of = lambda estimate: noise
    patched[1].Disk = partial(InterruptedDisk, interrupted)
    patched[2].SavePolicy = partial(hooked(SavePolicy, meeting_s=0.01), share=0.5)


def _digest(*states: Any) -> str:
    """Return what is the same for states that are the same in each bit."""
    sums = hashlib.sha256()
    for value in _leaves(states):
        sums.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return sums.hexdigest()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def forked(run: Run, rank: int, port: int, folder: Path, log: Path, fault: str) -> None:
    """Be a rank of a run, in a process of its own."""
    variables = {"RANK": rank, "WORLD_SIZE": run.world, "LOCAL_WORLD_SIZE": run.world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    lines = Log(log)
    try:
        if fault:
            FAULTS[fault]()
        dist.init_process_group("gloo")
        train(run, rank, folder, lines)
    except BaseException:
        lines(error=traceback.format_exc())
        os._exit(1)
    os._exit(0)  # past gloo's own end, which waits for ranks that died


# Faults that a test puts in to see that they are found.


def _shifted(batches: int) -> None:
    load = ElasticSampler.load_state_dict

    def shifted(self: ElasticSampler, state: Any) -> None:
        position = state["position"] + batches * sum(self.batch_sizes)
        load(self, {**state, "position": min(self.length, max(0, position))})

    vars_of: Any = ElasticSampler
    vars_of.load_state_dict = shifted


def _no_random_state() -> None:
    part: Any = training_state
    part.set_random_state = lambda state: None


def _no_moments() -> None:
    of_class: Any = torch.optim.AdamW
    of_class.load_state_dict = lambda self, state: None


def _nothing() -> None:
    part: Any = checkpoint_run.CheckpointRun
    part.restore = lambda self: None


FAULTS = {
    "nothing is restored": _nothing,
    "one batch is taken twice": partial(_shifted, -1),
    "one batch is left out": partial(_shifted, 1),
    "random states are not restored": _no_random_state,
    "the optimizer is not restored": _no_moments,
}
