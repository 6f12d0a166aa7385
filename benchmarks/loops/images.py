"""Loops over images: convolutions, augmentation, workers, frozen layers, a moving average."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.loops.data import Augmented, Labelled, Normalised, images
from benchmarks.loops.models import convolutions
from benchmarks.loops.suite import Job, Steps, loop


@loop("Conv-BN-ReLU network, Adam; wrap gets the optimizer too")
def cnn(job: Job) -> Steps:
    loader = DataLoader(Labelled(*images(960)), batch_size=32, shuffle=True)
    model = convolutions(24)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    yield from job.classify(*job.wrap(model, loader, optimizer))


@loop("dropout, and augmentation in the data set: both draw from torch's global generator, in turns")
def cnn_dropout(job: Job) -> Steps:
    loader = DataLoader(Augmented(*images(960)), batch_size=32, shuffle=True)
    model = convolutions(16, dropout=0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    yield from job.classify(*job.wrap(model, loader, optimizer))


@loop("frozen layers, whose batch norm still counts; the optimizer has the last layer only")
def frozen(job: Job) -> Steps:
    loader = DataLoader(Labelled(*images(960)), batch_size=32, shuffle=True)
    model = convolutions(24)
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1, momentum=0.9)
    yield from job.classify(*job.wrap(model, loader, optimizer))


@loop("two worker processes; a random sampler with a generator of its own")
def workers(job: Job) -> Steps:
    data = Normalised(*images(960))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(job.seed))
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2)
    model = convolutions(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    yield from job.classify(*job.wrap(model, loader, optimizer))


@loop("augmentation inside two workers: what an item is depends on which worker loads it, and when")
def workers_augment(job: Job) -> Steps:
    loader = DataLoader(Augmented(*images(960)), batch_size=32, shuffle=True, num_workers=2)
    model = convolutions(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    yield from job.classify(*job.wrap(model, loader, optimizer))


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Mean loss over a loader, with the model in evaluation mode meanwhile."""
    model.eval()
    losses = [F.cross_entropy(model(x), y).item() for x, y in loader]
    model.train()
    return math.fsum(losses) / len(losses)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    """Move the averaged weights towards the model's."""
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(weight, 1 - decay)
    for copied, buffer in zip(average.buffers(), model.buffers(), strict=True):
        copied.copy_(buffer)


@loop("a deep copy of the wrapped model follows it as a moving average; both are validated after every epoch")
def two_models_ema(job: Job) -> Steps:
    x, y = images(1024)
    loader = DataLoader(Labelled(x[:800], y[:800]), batch_size=32, shuffle=True)
    held_out = DataLoader(Labelled(x[800:], y[800:]), batch_size=112)
    model = convolutions(16, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    average = copy.deepcopy(model)
    job.keep(optimizer, model=model, average=average)
    scores = job.notes["validation"] = []

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            follow(average, model)
            yield loss, (x, y)
        scores += [validate(model, held_out), validate(average, held_out)]
