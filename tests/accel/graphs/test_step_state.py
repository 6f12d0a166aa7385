"""What a captured step takes over from steps before: gradients, states of optimizers, a loss scale, numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import DynamicLossScale, decorate
from accel.graphs import CaptureError
from tests.accel.graphs.model_loops import batch, squares_step
from tests.accel.graphs.test_frozen import beside_a_gpu, taped_step

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


@pytest.mark.parametrize("micro", [2, 3])
def test_gradients_are_accumulated_over_calls_of_several_kinds(micro: int) -> None:
    """The first call of a step replaces gradients, the others add to them; sizes turn independently of that."""

    def outcome(captured: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def part(x: Tensor, first: bool) -> Tensor:
            if first:
                optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        run: Any = taped_step(part, modules=[model], optimizers=[optimizer], warmup=1) if captured else part
        results = []
        for seed in range(60):
            rows = (8, 5, 8, 8, 5, 3, 5)[seed % 7]
            results.append(run(batch(rows, seed), seed % micro == 0).detach())
            if seed % micro == micro - 1:
                results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
        return results, run

    (expected, _), (found, run) = outcome(False), outcome(True)
    assert all(map(torch.equal, found, expected))
    assert run.replays > 10


class Decaying(torch.optim.Optimizer):
    """Counts its steps in a tensor on the CPU, which it writes to, as Adagrad does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Divide by the number of steps."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("step", torch.tensor(0.0)).add_(1)
            p.sub_(p.grad / state["step"].numpy().item())


def test_a_counter_on_the_cpu_is_not_frozen() -> None:
    def outcome(captured: bool, **options: Any) -> tuple[list[Tensor], Any]:
        weight = nn.Parameter(torch.ones(3))
        optimizer = Decaying([weight])

        def whole() -> None:
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

        run: Any = whole
        if captured:
            run = beside_a_gpu(taped_step(whole, modules=[], optimizers=[optimizer], warmup=1, **options))
        for _ in range(6):
            run()
        return [weight.detach(), optimizer.state[weight]["step"]], run

    (expected, _), (found, run) = outcome(False), outcome(True)
    assert all(map(torch.equal, found, expected))
    assert "on the CPU" in run.why_eager[0]
    assert "'step'" in run.why_eager[0]
    with pytest.raises(CaptureError, match="on the CPU"):
        outcome(True, strict=True)


_CLEARED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "all": lambda optimizer: optimizer.state.clear(),
    "one": lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0]),
    "empty": lambda optimizer: optimizer.state.update({optimizer.param_groups[0]["params"][0]: {}}),
    "copies": lambda optimizer: optimizer.state.update(
        {p: {name: copy.deepcopy(value) for name, value in own.items()} for p, own in optimizer.state.items()}
    ),
}


@pytest.mark.parametrize("cleared", _CLEARED)
def test_a_state_that_was_cleared_begins_anew(cleared: str) -> None:
    def outcome(captured: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

        whole = squares_step(model, optimizer)
        run: Any = taped_step(whole, modules=[model], optimizers=[optimizer], warmup=1) if captured else whole
        results = []
        for seed in range(16):
            if seed in (6, 11):
                _CLEARED[cleared](optimizer)
            results.append(run(batch(8, seed)).detach())
        momenta = [own["momentum_buffer"].clone() for own in optimizer.state.values()]
        return [*results, *model.parameters(), *momenta], run

    (expected, _), (found, run) = outcome(False), outcome(True)
    assert all(map(torch.equal, found, expected))
    assert run.captures == 3


def test_the_step_of_a_loss_scale_may_be_outside() -> None:
    """It looks at the gradients, whoever has made them."""

    def outcome(captured: bool, **options: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        decorate(model, optimizer, dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=2.0**8))

        def backward(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        run: Any = taped_step(backward, modules=[model], warmup=1, **options) if captured else backward
        results = []
        for seed in range(8):
            results.append(run(batch(8, seed)).detach())
            optimizer.step()
            optimizer.zero_grad()
        return [*results, *map(torch.clone, model.parameters())], run

    (expected, _), (found, run) = outcome(False), outcome(True)
    assert all(map(torch.equal, found, expected))
    assert run.replays > 0


_SGD: dict[str, Callable[[Any], Any]] = {
    "fused": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, fused=True),
    "waits": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, foreach=False),
}


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("name", _SGD)
def test_a_loss_scale_and_momentum_that_begins_late(name: str, warmup: int) -> None:
    """Steps that overflow leave no momentum, and wait for the device; such ones once ended the capture for good."""

    def outcome(captured: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = _SGD[name](model.parameters())
        scale = DynamicLossScale(init_scale=2.0**10)
        decorate(model, optimizer, dtype=torch.float16, loss_scale=scale)

        whole = squares_step(model, optimizer)
        run: Any = taped_step(whole, modules=[model], optimizers=[optimizer], warmup=warmup) if captured else whole
        results: list[Any] = []
        for number in range(14):
            x = batch(8, number)
            results.append(run(x * torch.inf if number < 6 else x).detach().nan_to_num(7.0))
            results += [scale.value.clone(), *(value.clone() for value in model.state_dict().values())]
        return results, run

    (expected, _), (found, run) = outcome(False), outcome(True)
    assert all(map(torch.equal, found, expected))
    assert (run.replays > 4) == (name == "fused")
    assert bool(run.why_eager) == (name == "waits")


def test_a_learning_rate_that_changes_before_each_capture_is_said() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def whole(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    run = taped_step(whole, modules=[model], optimizers=[optimizer])
    for _ in range(6):
        run(batch(4, 0))  # something is captured
    assert run.captures == 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(70):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 2)
            run(batch(8, number))
    assert ["numbers of modules or optimizers differ" in str(each.message) for each in seen] == [True]


def test_calls_that_are_all_of_another_kind_are_said() -> None:
    model = nn.Linear(6, 3)
    run = taped_step(lambda x: model(x), modules=[model])
    for rows in range(1, 65):
        run(batch(rows, 0))
    with pytest.warns(RuntimeWarning, match="64 calls were of 64 kinds.* or numbers of modules or optimizers"):
        run(batch(65, 0))
