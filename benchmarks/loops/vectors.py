"""Loops of perceptrons, each with its own way to get batches or to update the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from benchmarks.loops.data import Labelled, Stream, clusters
from benchmarks.loops.models import Scorer, perceptron
from benchmarks.loops.suite import Job, Steps, loop


@loop("perceptron, SGD with momentum; wrap gets model and loader only")
def mlp(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 768)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, loader = job.wrap(model, loader)
    yield from job.classify(model, loader, optimizer)


@loop("two models, two optimizers; wrap gets the generator and its optimizer, not the discriminator")
def gan(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 32, classes=4, noise=0.2)), batch_size=64, shuffle=True)
    generator = perceptron(16, 256, classes=32)
    discriminator = perceptron(32, 256, classes=1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    generator, loader, optimizer_g = job.wrap(generator, loader, optimizer_g)
    job.keep(optimizer_g, optimizer_d, generator=generator, discriminator=discriminator)

    for _ in job.epochs:
        for real, _label in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), 16))

            optimizer_d.zero_grad()
            loss_d = F.binary_cross_entropy_with_logits(discriminator(real), ones)
            loss_d = loss_d + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
            loss_d.backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
            loss_g.backward()
            optimizer_g.step()
            yield loss_d + loss_g, real


@loop("LBFGS: the optimizer calls a closure, so several forward and backward passes a step")
def lbfgs(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(3840, 32, noise=1.5)), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 10))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=5)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            yield loss, (x, y)


@loop("four micro-batches per optimizer step, held until the step is done")
def accumulation(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=16, shuffle=True, drop_last=True)
    model = perceptron(128, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        batches, total = [], 0.0
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            total += loss.item()
            batches.append((x, y))
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                yield total, batches
                batches, total = [], 0.0


@loop("the user's own bfloat16 autocast and gradient scaler")
def own_autocast(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 256, noise=5.0)), batch_size=64, shuffle=True)
    model = perceptron(256, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, scaler, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield loss, (x, y)


@loop("clipped gradients and OneCycleLR on SGD; the scheduler is made after wrap, on what wrap gave")
def one_cycle_clip(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 640)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=job.steps + 1)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            yield loss, (x, y)


@loop("iterable data set without a length, with other items in every pass")
def iterable(job: Job) -> Steps:
    loader = DataLoader(Stream(1920, 64, noise=2.5), batch_size=64)
    model = perceptron(64, 640)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    yield from job.classify(*job.wrap(model, loader, optimizer))


@loop("the model computes its loss and gives a dataclass; the loss has a second term from a hidden layer")
def dataclass_output(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = Scorer(128, 2048)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x, labels=y)
            loss = output.loss + 1e-3 * output.hidden.square().mean()
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("breaks out of every epoch after ten batches")
def early_break(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 768)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for i, (x, y) in enumerate(loader):
            if i == 10:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("no optimizer: the update is written out by hand")
def no_optimizer(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 768)
    model, loader = job.wrap(model, loader)
    job.keep(model=model)

    for _ in job.epochs:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
            yield loss, (x, y)


@loop("RMSprop, and a forward hook of the user's that writes down activations")
def rmsprop_hooks(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 640)
    means = job.notes["activation"] = []
    model[1].register_forward_hook(lambda module, args, output: means.append(output.mean().item()))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-4)
    yield from job.classify(*job.wrap(model, loader, optimizer))
