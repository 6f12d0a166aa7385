"""A loop whose loader has workers, in a process of its own: what a test sends SIGTERM to, with all of its group."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from pathlib import Path

import torch
import torch.utils.data._utils.worker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.elastic.save_policy import Termination

STEP = 3
"""Within which the signal comes."""


def train(folder: Path) -> None:
    """Train until a signal ends this; leave the workers' numbers once the step is under way, and what was raised."""
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1  # s; by itself a worker looks for the loop each 5 s
    noted: list[int] = []
    note = Termination._note

    def seen(self: Termination, number: int, frame: object) -> None:
        noted.append(number)
        note(self, number, frame)  # type: ignore[arg-type]

    Termination._note = seen  # type: ignore[method-assign]
    try:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = DataLoader(TensorDataset(torch.randn(4000, 4)), batch_size=2, num_workers=2)
        model, loader, optimizer = accel.optimize(
            model, loader, optimizer, elastic=accel.Elastic(checkpoint=folder / "saved"), allow="exact", cache=False
        )
        for step, (x,) in enumerate(loader):
            model(x).sum().backward()
            if step == STEP:
                workers = [str(process.pid) for process in multiprocessing.active_children()]
                (folder / "part").write_text(" ".join(workers))
                (folder / "part").rename(folder / "workers")
                while not noted:
                    time.sleep(0.01)
                time.sleep(0.2)  # by now a worker that had died would have been noticed, in the midst of the step
            optimizer.step()
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
    os._exit(0)
