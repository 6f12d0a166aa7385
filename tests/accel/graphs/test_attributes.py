"""A call that leaves something in a model's attributes or buffers is not captured; no capture leaves anything there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.graphs import CaptureError
from tests.accel.graphs.model_loops import batch, both, both_steps, loop_of, step, taped_step

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


class Stateful(nn.Module):
    """Begins with what the call before has left, a tensor or a pair with one."""

    def __init__(self, is_pair: bool = False, starts_with: str = "none") -> None:
        super().__init__()
        self.layer, self.is_pair = nn.Linear(6, 6), is_pair
        self.hidden: Any
        if starts_with == "buffer":
            self.register_buffer("hidden", torch.zeros(6))
        elif starts_with == "zeros":
            self.hidden = (torch.zeros(6), 1) if is_pair else torch.zeros(6)
        else:
            self.hidden = None

    def state(self) -> Tensor:
        state: Tensor = self.hidden[0] if self.is_pair else self.hidden
        return state

    def forward(self, x: Tensor) -> Tensor:
        """Add the mean of the rows before."""
        before = self.hidden[0] if self.is_pair and self.hidden is not None else self.hidden
        out: Tensor = self.layer(x) + (0.0 if before is None else before)
        mean = out.detach().mean(0)
        self.hidden = (mean, 1) if self.is_pair else mean
        return out


_STATEFUL: dict[str, Callable[[], Stateful]] = {
    "from none": Stateful,
    "from zeros": lambda: Stateful(starts_with="zeros"),
    "pair": lambda: Stateful(is_pair=True),
    "pair from zeros": lambda: Stateful(is_pair=True, starts_with="zeros"),
    "buffer": lambda: Stateful(starts_with="buffer"),
}


@pytest.mark.parametrize("kind", _STATEFUL)
def test_a_state_that_each_call_replaces_is_not_frozen(kind: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [step(model, optimizer, seed) for seed in range(10)] + [model.state()]

    calls = both(loop, _STATEFUL[kind], warmup=2)
    assert calls.replays == 0
    assert "'hidden'" in calls.why_eager[0]


@pytest.mark.parametrize("kind", _STATEFUL)
def test_a_state_that_each_step_replaces_is_not_frozen(kind: str) -> None:
    assert "'hidden'" in both_steps(_STATEFUL[kind], warmup=2).why_eager[0]
    model = _STATEFUL[kind]()
    strict = taped_step(lambda x: model(x), modules=[model], warmup=2, strict=True)
    with pytest.raises(CaptureError, match=r"can't be captured: .*'hidden'"):
        [strict(batch(8, seed)) for seed in range(6)]


class Masked(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(6, 6), torch.ones(6)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.mask


def test_a_tensor_that_was_put_in_the_place_of_an_attribute_is_used() -> None:
    def replaced(model: Any) -> None:
        model.mask = torch.arange(6.0)

    calls = both(loop_of(4, replaced, 4, lambda model: model.mask.mul_(0.5), 2), Masked, warmup=1)
    assert (calls.captures, calls.why_eager) == (2, [])


class Watched(nn.Module):
    """Leaves its features for others to look at, a word that is always the same, and a phase if it turns."""

    def __init__(self, turns: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.phase, self.turns = 0, turns

    def forward(self, x: Tensor) -> Tensor:
        self.mode = "seen"
        features = self.one(x).relu()
        if self.turns:
            self.phase = 1 - self.phase
        else:
            self.features = features.detach()
        out: Tensor = self.two(features) * (1 + self.phase)
        return out


@pytest.mark.parametrize("turns", [False, True])
def test_a_model_that_leaves_something_in_each_call_stays_eager(turns: bool) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = []
        for seed in range(8):
            results.append(step(model, optimizer, seed))
            results.append(torch.tensor(model.phase) if turns else model.features.clone())
        return results

    calls = both(loop, lambda: Watched(turns), warmup=2)
    assert calls.replays == 0
    name = "phase" if turns else "features"
    assert calls.why_eager == [
        f"each call puts something else into {name!r} of a module, which no replay would do; let it return that, or "
        "write to a buffer in place (copy_)"
    ]


class Cached(nn.Module):
    """Makes a table in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(6, 6), None

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            self.table: Any = torch.arange(6.0)
        return self.layer(x) + self.table


def test_what_the_first_calls_make_is_no_obstacle() -> None:
    calls = both(loop_of(6), Cached, warmup=1)
    assert (calls.why_eager, calls.replays) == ([], 5)


class Failing(nn.Module):
    """Replaces a buffer and an attribute, counts, and then looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0
        self.register_buffer("ema", torch.zeros(6))
        self.kept = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        """Shift by the mean so far."""
        out: Tensor = self.layer(x)
        self.calls += 1
        self.ema = 0.9 * self.ema + 0.1 * out.detach().mean(0)
        self.kept = self.kept * 0.5 + self.ema
        return out - self.kept / self.calls if out.sum().item() < 1e9 else out


def test_a_capture_that_failed_leaves_the_model_as_it_was() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = [step(model, optimizer, seed) for seed in range(8)]
        return [*results, model.kept, torch.tensor(model.calls)]

    calls = both(loop, Failing, warmup=2)
    assert calls.captures == 0
    assert calls.why_eager


def test_a_capture_of_a_step_that_failed_leaves_its_models_as_they_were() -> None:
    run = both_steps(Failing, warmup=0)
    assert (run.captures, bool(run.why_eager)) == (0, True)


def test_the_object_of_a_step_is_as_it_was_after_a_capture_that_failed() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.mean, self.steps = torch.zeros(()), 0

        def step(self, x: Tensor) -> Tensor:
            self.mean, self.steps = self.mean * 0.5 + x.sum(), self.steps + 1
            return x * 2 if self.mean.item() < 1e9 else x

    trainer = Trainer()
    run = taped_step(trainer.step, modules=[], warmup=1)
    for _ in range(3):
        run(torch.ones(2))
    assert (float(trainer.mean), trainer.steps) == (3.5, 3)


def test_hooks_of_parameters_run_once() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = [step(model, optimizer, seed) for seed in range(3)]
        handle = model.layer.weight.register_hook(lambda gradient: gradient * 0.5)
        for seed in range(3, 8):
            results += [step(model, optimizer, seed), model.layer.weight.grad]
        handle.remove()
        return results + [step(model, optimizer, seed) for seed in range(8, 10)]

    calls = both(loop, Masked, warmup=0)
    assert (calls.replays, calls.why_eager) == (10, [])


def test_hooks_of_parameters_from_the_start_run_once() -> None:
    def hooked() -> nn.Module:
        model = Masked()
        model.layer.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        return model

    calls = both(loop_of(6), hooked)
    assert calls.captures == 0
    assert calls.why_eager == ["a parameter has hooks, which a graph would call once more"]
