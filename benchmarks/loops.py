"""Small but realistic training loops, each written as a user would write it.

They are there to prove that `accel.optimize` never breaks, never slows and never changes training: run a loop once as
it is and once with `accel.optimize` for `wrap`, and compare the two outcomes.

    plain_run = run("cnn", steps=200)
    fast_run = run("cnn", steps=200, wrap=accel.optimize)

A loop is a generator: it trains, and yields `(loss, batch)` once per training step. `run` drives it and drops it after
the last step it wants, most often in the middle of an epoch, as a `break` would. A few loops hold a trap on purpose
(data that depends on how often the loader was iterated, two forward passes a step, batches held across steps); the
summary says which.
"""

# mypy: allow-untyped-calls
# (torch declares no types for `Tensor.backward`.)

from __future__ import annotations

import copy
import math
import random
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

Wrap = Callable[..., tuple[Any, ...]]
"""`wrap(model, loader)` or `wrap(model, loader, optimizer)`: gives back the same things, in the same order."""

Steps = Generator[tuple[Any, Any], None, None]
"""One `(loss, batch)` per training step."""

State = tuple[Tensor, Tensor]
"""The hidden state of an LSTM."""


def plain(*args: Any) -> tuple[Any, ...]:
    """The wrap that does nothing."""
    return args


# --- Running a loop --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run gave: everything that must not depend on `wrap`."""

    losses: list[float]
    """Loss of each training step."""
    state: dict[str, Tensor]
    """Copy of the state dict of every model trained, each key after the model's name: `model.0.weight`."""
    optimizer_state: list[dict[str, Any]]
    """Copy of the state dict of every optimizer (and gradient scaler) of the loop."""
    rng: Tensor
    """State of torch's CPU random generator right after the last step."""
    training: bool
    """Whether all models that are trained were in training mode right after the last step."""
    seen: list[int]
    """Checksum of the bytes of each step's batch, in the order in which the loop got them."""
    notes: dict[str, list[float]]
    """What else the loop wrote down, such as validation losses; empty for most."""


@dataclass
class Job:
    """What a loop is given, and where it leaves what `run` reads at the end."""

    steps: int
    seed: int
    wrap: Wrap
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    notes: dict[str, list[float]] = field(default_factory=dict)

    @property
    def epochs(self) -> range:
        """Epochs enough for `steps`; bounded, so that a loader that gives nothing cannot make a loop hang."""
        return range(self.steps)

    def keep(self, *optimizers: Any, **models: Any) -> None:
        """Name what the loop trains."""
        self.optimizers.extend(optimizers)
        self.models.update(models)


@dataclass(frozen=True)
class Loop:
    """A training loop of the suite."""

    name: str
    make: Callable[[Job], Steps]
    """Starts the loop; each `next` on what it gives does one training step."""
    summary: str
    """What is particular about it, in one line."""


LOOPS: dict[str, Loop] = {}


def loop(summary: str) -> Callable[[Callable[[Job], Steps]], Callable[[Job], Steps]]:
    """Add a loop to `LOOPS` under the name of its function."""

    def add(make: Callable[[Job], Steps]) -> Callable[[Job], Steps]:
        LOOPS[make.__name__] = Loop(make.__name__, make, summary)
        return make

    return add


def run(
    name: str, *, steps: int, seed: int = 0, wrap: Wrap = plain, on_step: Callable[[int], None] | None = None
) -> Outcome:
    """Train loop `name` for `steps` training steps; `on_step(i)` is called after each."""
    random.seed(seed)
    torch.manual_seed(seed)
    job = Job(steps=steps, seed=seed, wrap=wrap)
    losses: list[float] = []
    seen: list[int] = []
    with closing(LOOPS[name].make(job)) as training:
        for i, (loss, batch) in zip(range(steps), training, strict=False):
            losses.append(loss.item() if isinstance(loss, Tensor) else loss)
            seen.append(checksum(batch))
            if on_step is not None:
                on_step(i)
        if len(losses) < steps:
            raise RuntimeError(f"loop {name!r} ended after {len(losses)} of {steps} steps")
        return _outcome(job, losses, seen)


def _outcome(job: Job, losses: list[float], seen: list[int]) -> Outcome:
    states = {name: model.state_dict() for name, model in job.models.items()}
    return Outcome(
        losses=losses,
        state={f"{name}.{key}": value.clone() for name, state in states.items() for key, value in state.items()},
        optimizer_state=[copy.deepcopy(optimizer.state_dict()) for optimizer in job.optimizers],
        rng=torch.get_rng_state(),
        training=all(model.training for model in job.models.values()),
        seen=seen,
        notes=job.notes,
    )


def checksum(batch: Any, start: int = 0) -> int:
    """CRC of all tensors of a batch, of any nesting; depends on values, order, type and shape, not on strides."""
    if isinstance(batch, Tensor):
        start = zlib.crc32(f"{batch.dtype}{tuple(batch.shape)}".encode(), start)
        return zlib.crc32(batch.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, start)
    for part in batch.values() if isinstance(batch, dict) else batch:
        start = checksum(part, start)
    return start


# --- Data ------------------------------------------------------------------------------------------------------------
# Made from a generator of its own with a fixed seed: every run has the same data, and making it draws nothing from
# torch's global generator.


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


class Labelled(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and their labels."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Augmented(Labelled):
    """Images, flipped at random and shifted by up to two pixels: draws from torch's global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        dy, dx = torch.randint(-2, 3, (2,)).tolist()
        return image.roll((dy, dx), dims=(-2, -1)), label


class Normalised(Labelled):
    """Inputs brought to mean 0 and deviation 1 one by one, so that an item costs something to load."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return (x - x.mean()) / (x.std() + 1e-6), y


class Sentences(Dataset[dict[str, Any]]):
    """Token lists of uneven length with a label, as dictionaries."""

    def __init__(self, count: int, words: int = 200, classes: int = 4) -> None:
        g = _generator()
        self.labels = torch.randint(classes, (count,), generator=g).tolist()
        self.lengths = torch.randint(8, 33, (count,), generator=g).tolist()
        topic = torch.rand(classes, words, generator=g) ** 4
        self.ids = torch.multinomial(topic[torch.tensor(self.labels)], 32, replacement=True, generator=g) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": self.ids[index, : self.lengths[index]], "label": self.labels[index]}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Items made on the fly, others in every pass, with no length."""

    def __init__(self, count: int, features: int, classes: int = 10, noise: float = 1.0) -> None:
        self.count = count
        self.noise = noise
        self.centres = torch.randn(classes, features, generator=_generator())
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        g = _generator(self.passes)
        for _ in range(self.count):
            label = torch.randint(len(self.centres), (), generator=g)
            yield self.centres[label] + self.noise * torch.randn(self.centres.shape[1], generator=g), label


def clusters(count: int, *shape: int, classes: int = 10, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Points of any shape around one centre per class."""
    g = _generator()
    centres = torch.randn(classes, *shape, generator=g)
    y = torch.randint(classes, (count,), generator=g)
    return centres[y] + noise * torch.randn(count, *shape, generator=g), y


def images(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Colour images of one coarse pattern per class, with noise."""
    x, y = clusters(count, 3, 4, 4, noise=0.3)
    fine = F.interpolate(x, size=(size, size), mode="nearest")
    return fine + 0.5 * torch.randn(fine.shape, generator=_generator(1)), y


def waves(count: int, length: int = 32, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Noisy two-channel waves; the class is the frequency."""
    g = _generator()
    y = torch.randint(classes, (count,), generator=g)
    phase = torch.arange(length) * (y[:, None] + 1) * 0.2 + 6.28 * torch.rand(count, 1, generator=g)
    wave = torch.stack([phase.sin(), phase.cos()], dim=-1)
    return wave + 0.2 * torch.randn(wave.shape, generator=g), y


def counting(count: int, length: int, words: int) -> Tensor:
    """Token sequences that count up, each by a step of its own from 1 to 3."""
    g = _generator()
    first, stride = torch.randint(words, (count, 1), generator=g), torch.randint(1, 4, (count, 1), generator=g)
    return (first + stride * torch.arange(length)) % words


# --- Models that more than one loop uses -----------------------------------------------------------------------------


def perceptron(features: int, width: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def convolutions(channels: int, *, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * channels, 10),
    )


# --- The loops -------------------------------------------------------------------------------------------------------


@loop("perceptron, SGD with momentum; wrap gets model and loader only")
def mlp(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 768)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, loader = job.wrap(model, loader)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("Conv-BN-ReLU network, Adam; wrap gets the optimizer too")
def cnn(job: Job) -> Steps:
    loader = DataLoader(Labelled(*images(960)), batch_size=32, shuffle=True)
    model = convolutions(24)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("dropout, and augmentation in the data set: both draw from torch's global generator, in turns")
def cnn_dropout(job: Job) -> Steps:
    loader = DataLoader(Augmented(*images(960)), batch_size=32, shuffle=True)
    model = convolutions(16, dropout=0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


class Recurrent(nn.Module):
    """LSTM classifier that takes and gives its hidden state."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, state = self.lstm(x, state)
        return self.head(y[:, -1]), state


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


class Classifier(nn.Module):
    """Small transformer encoder over tokens."""

    def __init__(self, words: int, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(ids) + self.position).mean(1))
        return out


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
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


def pad(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate sentences of uneven length: the width of a batch is that of its longest."""
    ids = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return {"ids": ids, "mask": ids > 0, "label": torch.tensor([item["label"] for item in items])}


class Bag(nn.Module):
    """Mean of word vectors, then a perceptron; called by keyword."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.head = perceptron(width, 2 * width, classes)

    def forward(self, *, ids: Tensor, mask: Tensor) -> Tensor:
        total = (self.embed(ids) * mask.unsqueeze(-1)).sum(1)
        out: Tensor = self.head(total / mask.sum(1, keepdim=True))
        return out


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


@loop("frozen layers, whose batch norm still counts; the optimizer has the last layer only")
def frozen(job: Job) -> Steps:
    loader = DataLoader(Labelled(*images(960)), batch_size=32, shuffle=True)
    model = convolutions(24)
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1, momentum=0.9)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@dataclass
class Output:
    """What `Scorer` gives."""

    loss: Tensor
    logits: Tensor
    hidden: Tensor


class Scorer(nn.Module):
    """Computes its own loss, and gives a dataclass."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = self.body(x)
        logits = self.head(hidden)
        return Output(F.cross_entropy(logits, labels), logits, hidden)


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


@loop("two worker processes; a random sampler with a generator of its own")
def workers(job: Job) -> Steps:
    data = Normalised(*images(960))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(job.seed))
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2)
    model = convolutions(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("augmentation inside two workers: what an item is depends on which worker loads it, and when")
def workers_augment(job: Job) -> Steps:
    loader = DataLoader(Augmented(*images(960)), batch_size=32, shuffle=True, num_workers=2)
    model = convolutions(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


@loop("RMSprop, and a forward hook of the user's that writes down activations")
def rmsprop_hooks(job: Job) -> Steps:
    loader = DataLoader(Labelled(*clusters(1920, 128, noise=4.0)), batch_size=64, shuffle=True)
    model = perceptron(128, 640)
    means = job.notes["activation"] = []
    model[1].register_forward_hook(lambda module, args, output: means.append(output.mean().item()))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-4)
    model, loader, optimizer = job.wrap(model, loader, optimizer)
    job.keep(optimizer, model=model)

    for _ in job.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss, (x, y)


class Language(nn.Module):
    """Language model whose output layer is its embedding: one parameter under two names."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.output.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.output(self.body(self.embed(ids))[0])
        return out


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
