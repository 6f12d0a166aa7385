"""Loops as others write them: wrapped optimizers, own threads, closures, outputs in objects, inference mode."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.profiler.loop.optimizers import followed_by
from accel.strategies.fused_optimizer import FusedOptimizer
from tests.accel.loops import Longer, Quick, assert_trains_the_same, loss_of, make, make_loader, play_clock
from tests.accel.test_session import Faster, Slow

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Wrapped(torch.optim.Optimizer):
    """Steps another optimizer, whose groups and state it shows as its own: as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def __getstate__(self) -> Any:
        return self.__dict__.copy()

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Inherits(torch.optim.Optimizer):
    """Steps another optimizer, with the same list of groups: as SAM's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.base = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.base.step(closure)


def many_layers() -> nn.Module:
    """Return a model whose update takes much of a step, parameter by parameter."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))


@pytest.mark.parametrize("wrapper", [Wrapped, Inherits])
def test_an_optimizer_that_wraps_another_goes_on_updating(monkeypatch: pytest.MonkeyPatch, wrapper: Any) -> None:
    """The comparison of updates emptied the real optimizer: from there on no weight moved."""
    monkeypatch.setattr(strategies, "REGISTRY", [FusedOptimizer])
    model, x = many_layers(), torch.randn(64, 4)
    inner = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=None)
    loader: Any = DataLoader(TensorDataset(x, x.flip(1)), batch_size=4)
    model, loader, optimizer = accel.optimize(model, loader, wrapper(inner), budget=60)
    for _ in range(7):
        for batch, target in loader:
            before = model[-1].weight.detach().clone()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
            assert not torch.equal(before, model[-1].weight)
    row = next(row for row in accel.explain(model).rows if row.name == "fused_optimizer")
    assert "its update" not in row.why and "Error" not in row.why
    assert len(inner.param_groups[0]["params"]) == len(inner.state) == 120


def threaded(loader: Any) -> Iterator[Any]:
    """Yield a loader's batches, which a thread takes ahead of the loop."""
    batches: queue.Queue[Any] = queue.Queue(2)

    def fetch() -> None:
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    while (batch := batches.get()) is not None:
        yield batch
    fetching.join()


def test_batches_that_another_thread_takes_end_no_step(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A boundary was passed in that thread, while the loop was within a step: random states were put back under it."""

    def train(model: Any, loader: Any, optimizer: Any) -> None:
        for _ in range(8):
            for x, target in threaded(loader):
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()
        record = entry.optimized(model)
        assert record is None or record.session.steps <= 2

    assert_trains_the_same(train)
    assert capsys.readouterr().err.count("another thread than the one that trains it") == 1


class ScalesGradients(Faster):
    """Faster, and its gradients are wrong."""

    def faulty(self, call: Any, x: Tensor) -> Any:
        return Longer.apply(super().faulty(call, x)) if torch.is_grad_enabled() else super().faulty(call, x)


@pytest.mark.parametrize("way", ["within", "after a break"])
def test_an_evaluation_in_inference_mode_hides_no_wrong_gradient(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The step was closed by the evaluation's first request, in a mode where no replay has gradients."""
    play_clock(monkeypatch.setattr)
    monkeypatch.setattr(strategies, "REGISTRY", [ScalesGradients])
    torch.manual_seed(0)
    x = torch.randn(64, 10)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model: Any = Slow(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out: Any = DataLoader(data, batch_size=32)
    loader: Any = DataLoader(data, batch_size=16, shuffle=True)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    model, held_out, optimizer = accel.optimize(model, held_out, optimizer, budget=60)

    @torch.inference_mode()
    def evaluate() -> None:
        for batch, _ in held_out:
            model(batch)

    for _ in range(60):
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
            if way == "after a break":
                break
            evaluate()
        evaluate()
    report = accel.explain(model)
    assert report.plan == {}
    assert report.rows[0].status != "kept"


class Gaussian(nn.Module):
    """Returns a distribution, as models in reinforcement learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.mean(x), 1.0)


def test_a_model_whose_outputs_cannot_be_looked_at_is_left_as_it_is(only_quick: None) -> None:
    """Nothing was compared, and that passed for the same."""
    model = Gaussian()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, budget=60, allow="reordered")
    for _ in range(20):
        for x, _ in loader:
            optimizer.zero_grad()
            (-model(x).log_prob(torch.zeros(2)).mean()).backward()
            optimizer.step()
    (row,) = accel.explain(model).rows
    assert (row.status, "the model returns no tensors" in row.why) == ("not tried", True)
    assert not Quick.on


def test_a_generator_that_the_loop_asks_for_its_next_batch_is_followed(only_quick: None) -> None:
    model, loader, optimizer = make()

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    model, endless, optimizer = accel.optimize(model, batches(), optimizer, budget=60)
    for _ in range(200):
        x, target = next(endless)
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()
    report = accel.explain(model)
    assert report.steps >= 190
    assert report.plan == {"quick": None}


def test_a_closure_goes_on_with_what_follows_it() -> None:
    heard: list[str] = []

    def closure() -> float:
        heard.append("closure")
        return 0.5

    for given in ((None, closure), {}), ((None,), {"closure": closure}):
        arguments = followed_by(lambda: heard.append("after"), *given)
        assert arguments is not None
        args, kwargs = arguments
        wrapped = kwargs["closure"] if kwargs else args[1]
        assert wrapped() == 0.5 and wrapped.__name__ == "closure"
    assert heard == ["closure", "after"] * 2
    assert followed_by(lambda: None, (None,), {}) is None
    assert followed_by(lambda: None, (None, None), {"closure": None}) is None


def test_an_optimizer_is_given_the_module_that_the_loop_passes() -> None:
    model = nn.Linear(2, 2)  # as one that measures it, and wants its parameters
    assert followed_by(lambda: None, (None, model), {}) is None
    assert followed_by(lambda: None, (None,), {"closure": model}) is None
    assert followed_by(lambda: None, (None, functools.partial(model, torch.ones(1, 2))), {}) is not None


def test_a_loop_in_inference_mode_is_followed(only_quick: None) -> None:
    """Without an optimizer each batch is a step: it has no gradients to be missed."""
    model, loader, _ = make()
    model, loader = accel.optimize(model, loader, budget=60)
    with torch.inference_mode():
        for _ in range(6):
            for x, _ in loader:
                model(x)
    assert accel.explain(model).steps > 0
