"""Loops over sequences: recurrent, attention, tied weights, dictionaries of changing width."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from benchmarks.loops.data import Labelled, Sentences, counting, pad, waves
from benchmarks.loops.models import Bag, Classifier, Language, Recurrent
from benchmarks.loops.suite import Job, Steps, loop


@loop("LSTM with its hidden state: two forward passes a step; the optimizer is made after wrap")
def rnn(job: Job) -> Steps:
    loader = DataLoader(Labelled(*waves(960)), batch_size=32, shuffle=True)
    model = Recurrent(2, 96, classes=4)
    model, loader = job.wrap(model, loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            first, second = x.chunk(2, dim=1)
            early, state = model(first)
            late, state = model(second, state)
            loss = 0.5 * F.cross_entropy(early, y) + F.cross_entropy(late, y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("transformer encoder with dropout, AdamW and OneCycleLR; the scheduler is made before wrap")
def transformer(job: Job) -> Steps:
    text = Sentences(960)
    data = Labelled(text.ids, torch.tensor(text.labels))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = Classifier(201, 32, 32, classes=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=job.steps + 1)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for ids, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            yield loss, (ids, y)


@loop("dictionary batches of changing width from a collate function; the model takes keywords")
def dict_batches(job: Job) -> Steps:
    loader = DataLoader(Sentences(1920), batch_size=64, shuffle=True, collate_fn=pad)
    model = Bag(201, 256, classes=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for batch in loader:
            optimizer.zero_grad()
            logits = model(ids=batch["ids"], mask=batch["mask"])
            loss = F.cross_entropy(logits, batch["label"])
            loss.backward()
            optimizer.step()
            yield loss, batch


@loop("language model whose embedding and output layer share one parameter")
def tied(job: Job) -> Steps:
    ids = counting(960, 17, words=100)
    loader = DataLoader(Labelled(ids[:, :-1], ids[:, 1:]), batch_size=32, shuffle=True)
    model = Language(100, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            yield loss, (x, y)
