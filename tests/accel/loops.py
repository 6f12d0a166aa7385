"""Small training loops, and a strategy that surely wins, for the tests of the public calls."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

import accel
from accel import entry, startup
from accel.run import Run
from accel.script.training import ScriptTraining
from accel.session.session import Session
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import TrialDesign

WAIT_S = 0.0015
BATCH, SAMPLES = 8, 100  # 12 whole batches and one of 4


QUIET = "from accel.search import outlook\noutlook.is_crowded = lambda diagnosis: False\n"
"""Code for a process to run first: what else runs on the machine is no reason for a search to wait."""


class PlayedClock:
    """A clock that only the loop moves: no other process on the machine makes a trial noisy.

    Each reading takes 20 to 40 µs, drawn from a seed; a call that waits moves it by as long.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._random = random.Random(0)

    def __call__(self) -> float:
        self.now += 20e-6 * (1.0 + self._random.random())
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


clock: PlayedClock | None = None
"""What sessions are timed by, if not by the machine's."""


def play_clock(set_attribute: Callable[..., None] = setattr) -> None:
    """Time all that a search costs by a played clock from now on; `set_attribute` may be that of a monkeypatch.

    Whatever decides by a share of the run's time reads it: sessions and what they compare, what looks for models in a
    script, and accel's own start.
    """
    played = PlayedClock()
    set_attribute(sys.modules[__name__], "clock", played)
    for timed in (Session, ScriptTraining):
        set_attribute(timed.__init__, "__kwdefaults__", {**(timed.__init__.__kwdefaults__ or {}), "clock": played})
    set_attribute(startup, "time", SimpleNamespace(perf_counter=played, thread_time=lambda: 0.0))
    set_attribute(startup, "_imported_at", 0.0)


class Quick(Strategy):
    """The plain call, but `Net` does not wait in it: the same bits, several times as fast."""

    name = "quick"
    summary = "no waiting"
    treats = frozenset()
    exactness = Exactness.EXACT
    on: ClassVar[bool] = False

    def refusal(self, run: Run) -> str:
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        return TrialDesign(settle_steps=0)

    def enable(self, run: Run, setting: Any) -> None:
        Quick.on = True
        run.gate.add(self.name, lambda call: call)

    def disable(self, run: Run) -> None:
        Quick.on = False
        run.gate.remove(self.name)


class Net(nn.Module):
    """Dropout draws random numbers, BatchNorm keeps buffers, and each call waits unless `Quick` is on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not Quick.on:
            (clock or time).sleep(WAIT_S)
        return self.head(self.drop(torch.relu(self.norm(self.inner(x)))))  # type: ignore[no-any-return]


class KeepsItsSlot(Net):
    """Copies by a `__getstate__` of its own, as classes with something unpicklable do."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class CopiesByHand(Net):
    """Copies by a `__deepcopy__` of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesByHand:
        new = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Sample `i` is known from its index; the target tells which one it is."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], torch.tensor(index)


def make_loader(data: Dataset[Any] | None = None, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    data = data if data is not None else Samples()
    sampler = RandomSampler(data) if shuffle else SequentialSampler(data)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=BATCH, sampler=sampler, **options)


def make(seed: int = 0, kind: type[nn.Module] = Net) -> tuple[Any, DataLoader[Any], torch.optim.SGD]:
    torch.manual_seed(seed)
    model = kind()
    return model, make_loader(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, target % 3)


def training(
    model: Any, loader: Any, optimizer: Optimizer, *, loss: Callable[[Tensor, Tensor], Tensor] = loss_of
) -> Iterator[list[int]]:
    """Train for ever; yields, after each step, the numbers of the samples in it."""
    while True:
        for x, target in loader:
            optimizer.zero_grad()
            loss(model(x), target).backward()
            optimizer.step()
            yield target.tolist()


def advance(loop: Iterator[list[int]], steps: int) -> list[list[int]]:
    return [next(loop) for _ in range(steps)]


def advance_until(loop: Iterator[list[int]], condition: Callable[[], bool], limit: int = 3000) -> int:
    """Train until `condition` holds after a step; returns the number of steps."""
    for step in range(1, limit + 1):
        next(loop)
        if condition():
            return step
    raise AssertionError(f"the condition did not come to hold in {limit} steps")


def in_trial() -> bool:
    """True while the trial (or the plan) has `Quick` on."""
    return Quick.on


def settled(model: nn.Module) -> Callable[[], bool]:
    """Return a condition: the search is over. A report of each step would take as long as the step."""

    def is_settled() -> bool:
        record = entry.MODELS[model]
        return record.session.alive and not record.journal._controller.searching

    return is_settled


def go_to(phase: str, loop: Iterator[list[int]], model: nn.Module) -> int:
    """Train up to a phase of the search; returns the number of steps."""
    if phase == "observe":
        return len(advance(loop, 3))
    steps = advance_until(loop, in_trial if phase == "trial" else settled(model))
    if phase == "hold":
        assert accel.explain(model).plan == {"quick": None}
        steps += len(advance(loop, 5))
    return steps


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights, buffers, momentum and random state: what a run leaves behind, bit for bit."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for number, kept in enumerate(optimizer.state.values()):
        state |= {f"{number} {name}": v.clone() for name, v in kept.items() if isinstance(v, Tensor)}
    return state | {"random": torch.get_rng_state()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def plain_run(steps: int, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """What `steps` steps of the untouched loop leave behind."""
    return plain_run_of(Net, steps, seed, **options)


def plain_run_of(kind: type[nn.Module], steps: int, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """The same for another model."""
    model, loader, optimizer = make(seed, kind)
    advance(training(model, loader, optimizer, **options), steps)
    return everything(model, optimizer)


def assert_trains_the_same(train: Callable[[Any, Any, Any], object], *, of_the_optimizer: bool = True) -> None:
    """A loop of the user's leaves the same behind with accel as without; it is passed model, loader and optimizer."""
    left = []
    for wraps in (False, True):
        model, loader, optimizer = make()
        if wraps:
            passed = (optimizer,) if of_the_optimizer else ()
            model, loader = accel.optimize(model, loader, *passed, allow="exact", budget=60)[:2]
        train(model, loader, optimizer)
        left.append(everything(model, optimizer))
        accel.undo(model)
    assert_same(*left)


class Longer(torch.autograd.Function):
    """Passes values on, and gradients that are a twentieth too long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.05
