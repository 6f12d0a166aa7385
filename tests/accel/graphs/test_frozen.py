"""What a graph would freeze without a word: it is part of the graph's key, or the graph is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accel.graphs import CapturedStep, CaptureError
from accel.graphs.obstacles import NotCapturable, without_draws
from accel.graphs.owners import Owners
from accel.optim import FusedAdamW
from tests.accel.graphs.model_loops import Tied, batch, both, both_steps, loop_of, step, taped_step
from tests.accel.graphs.tape import TapeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


def test_a_weight_in_two_places_has_its_gradient_once() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(6):
            results += [step(model, optimizer, seed), model.first.weight.grad.clone()]
        return results

    assert both(loop, Tied, warmup=2).replays == 4


class Tempered(nn.Module):
    """Has a number of its own, and a default that its class has."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.tau: float | None = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the temperature."""
        out: Tensor = self.norm(self.layer(x)) * self.gain
        return out if self.tau is None else out / self.tau


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda model: setattr(model, "tau", 0.25),
    "none": lambda model: setattr(model, "tau", None),
    "of the class": lambda model: setattr(model, "gain", 2.0),
    "momentum": lambda model: setattr(model.norm, "momentum", 0.5),
    "tensor": lambda model: setattr(model, "tau", torch.full((6,), 0.5)),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_number_of_a_module_has_graphs_of_its_own(change: str) -> None:
    assert both(loop_of(4, _CHANGES[change], 4), Tempered, warmup=1).captures == 2


def test_a_rate_of_dropout_that_changes_is_followed_by_a_captured_step() -> None:
    def rate(model: Any, number: int) -> None:
        model[1].p = 0.5 if number < 4 else 0.125

    assert both_steps(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), change=rate, warmup=1).captures == 2


class Skipping(nn.Module):
    """Leaves a layer out by chance, which the host draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.one, self.two, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        """Take one layer or both."""
        x = self.one(x)
        return self.two(x) if self.draw() < 0.5 else x


_DRAWS: dict[str, Callable[[], float]] = {"random": random.random, "numpy.random": np.random.rand}


@pytest.mark.parametrize("source", _DRAWS)
def test_chance_on_the_host_is_not_frozen(source: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        random.seed(3)
        np.random.seed(3)
        return [step(model, optimizer, seed) for seed in range(12)]

    calls = both(loop, lambda: Skipping(_DRAWS[source]), warmup=2)
    assert calls.captures == 0
    assert f"it draws random numbers on the host ({source})" in calls.why_eager[0]


def test_torchs_generator_of_the_cpu_is_the_hosts_beside_a_gpu() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(NotCapturable, match="torch, on the CPU"), without_draws(torch.device("cuda")):
        torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with without_draws(torch.device("cpu")):
        torch.rand(2)
    assert not torch.equal(torch.get_rng_state(), before)


def beside_a_gpu(step: CapturedStep) -> CapturedStep:
    """Let a step believe that it runs on a GPU, with all that lies on the CPU on the host."""
    assert isinstance(step._recorder, TapeRecorder)
    step._recorder.device = torch.device("cuda", 0)
    return step


def test_inputs_on_the_host_are_said_and_run_eagerly() -> None:
    run = beside_a_gpu(taped_step(lambda x: x * 2, warmup=0))
    with pytest.warns(RuntimeWarning, match=r"its inputs must be on cuda:0.*move them before the call"):
        results = [run(torch.full((2,), float(number))) for number in range(3)]
    assert [float(result[0]) for result in results] == [0.0, 2.0, 4.0]
    assert run.captures == 0
    with pytest.raises(CaptureError, match="its inputs must be on cuda:0"):
        beside_a_gpu(taped_step(lambda x: x * 2, warmup=0, strict=True))(torch.ones(2))


def test_a_learning_rate_that_lies_on_the_host_is_a_number() -> None:
    weight, rate = nn.Parameter(torch.ones(2)), torch.tensor(0.1)
    optimizer = torch.optim.SGD([weight], rate, foreach=False)
    owners = Owners([], [optimizer])
    before = {kind: owners.numbers(kind) for kind in ("cpu", "cuda")}
    rate.fill_(0.2)
    assert owners.numbers("cpu") == before["cpu"]
    assert owners.numbers("cuda") != before["cuda"]


def test_autocast_of_the_device_counts_without_inputs() -> None:
    layer = nn.Linear(6, 6)
    run = taped_step(lambda: layer(torch.ones(2, 6)), modules=[layer], warmup=0)
    assert run().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert run().dtype == torch.bfloat16


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("name", ["SGD", "Adam fused", "FusedAdamW"])
def test_state_that_the_first_step_makes_is_not_made_anew_in_each_replay(name: str, warmup: int) -> None:
    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=False),
        "Adam fused": lambda params: torch.optim.Adam(params, torch.tensor(0.1), fused=True),
        "FusedAdamW": lambda params: FusedAdamW(params, 0.1),
    }

    assert both_steps(lambda: nn.Linear(6, 3), makes[name], warmup=warmup).replays >= 7


class Replacing(torch.optim.Optimizer):
    """Keeps a counter in Python, and a sum that it puts in the place of the one before."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Divide by the number of steps, or take the sum."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + (self.kind == "counter")
            if self.kind == "sum":
                state["sum"] = state.get("sum", 0) + p.grad
            p.sub_(p.grad / state["step"] if self.kind == "counter" else 0.1 * state["sum"])


@pytest.mark.parametrize("kind", ["counter", "sum"])
def test_state_that_is_replaced_is_refused(kind: str) -> None:
    run = both_steps(lambda: nn.Linear(6, 3), lambda params: Replacing(params, kind), warmup=1)
    assert "an optimizer's state must be written to in place" in run.why_eager[0]


class Shifting(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.sub_(x.mean()))


def test_what_a_model_writes_to_its_input_is_not_lost() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        losses = []
        for seed in range(6):
            x = batch(8, seed)
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    calls = both(loop, Shifting, warmup=2)
    assert calls.captures == 0
    assert calls.why_eager[0].startswith("it writes to its inputs")


def test_what_a_step_writes_to_its_input_is_not_lost() -> None:
    run = taped_step(lambda x: x.add_(1).sum(), warmup=1)
    for seed in range(4):
        x = batch(8, seed)
        assert torch.equal(run(x), x.sum())
        assert torch.equal(x, batch(8, seed) + 1)
    assert run.why_eager[0].startswith("it writes to its inputs")
    with pytest.raises(CaptureError, match="can't be captured: it writes to its inputs"):
        taped_step(lambda x: x.add_(1).sum(), warmup=0, strict=True)(batch(8, 0))
