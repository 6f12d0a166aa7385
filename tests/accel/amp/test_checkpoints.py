"""Checkpoints: float32 names and values, nothing lost between levels, a resumed run like one that never stopped."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import DynamicLossScale, decorate, master_params
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import OPTIMIZERS, batches, cnn, loss_of, mlp


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, target in data:
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()


def made(name: str, level: str = "O2", dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[Any, Any]:
    model = cnn(seed)
    scale = DynamicLossScale(initial=64.0, interval=2) if dtype == torch.float16 else None
    return decorate(model, OPTIMIZERS[name](model.parameters()), level=level, dtype=dtype, loss_scale=scale)


def reloaded(state: Any) -> Any:
    """Return what a file of the state holds, read without executing code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_stops_and_goes_on_is_bitwise_one_that_does_not(name: str, dtype: torch.dtype) -> None:
    data = batches(8, 3, 8, 8)
    model, optimizer = made(name, dtype=dtype)
    train(model, optimizer, data)

    first, first_optimizer = made(name, dtype=dtype)
    train(first, first_optimizer, data[:4])
    saved = reloaded((first.state_dict(), first_optimizer.state_dict()))
    for order in (0, 1):
        second, second_optimizer = made(name, dtype=dtype, seed=1)
        parts = [(second, saved[0]), (second_optimizer, saved[1])]
        for what, state in parts if order else reversed(parts):
            what.load_state_dict(copy.deepcopy(state))
        train(second, second_optimizer, data[4:])
        assert all(map(torch.equal, second.parameters(), model.parameters()))
        assert all(map(torch.equal, master_params(second_optimizer), master_params(optimizer)))
        ours, theirs = second_optimizer.state_dict(), optimizer.state_dict()
        assert ours.get("loss_scale") == theirs.get("loss_scale")
        for key, own in theirs["state"].items():
            for entry, value in own.items():
                if isinstance(value, Tensor):
                    assert torch.equal(ours["state"][key][entry], value), (key, entry)


def test_a_state_dict_is_float32_under_the_usual_names() -> None:
    model, optimizer = made("Adam")
    train(model, optimizer, batches(2, 3, 8, 8))
    state = model.state_dict()
    assert list(state) == list(cnn().state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    masters = dict(zip(dict(model.named_parameters()), master_params(optimizer), strict=True))
    assert all(torch.equal(state[name], master) for name, master in masters.items())
    assert any(not torch.equal(state[name], p.float()) for name, p in model.named_parameters())
    part = model[5].state_dict()
    assert torch.equal(part["weight"], masters["5.weight"])


@pytest.mark.parametrize("there", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("here", ["O0", "O1", "O2", "O3"])
def test_between_levels_nothing_is_lost(here: str, there: str) -> None:
    model, optimizer = made("SGD", here, torch.bfloat16)
    train(model, optimizer, batches(2, 3, 8, 8))
    saved = reloaded(model.state_dict())
    other, _ = made("SGD", there, torch.bfloat16, seed=1)
    other.load_state_dict(saved)
    again = other.state_dict()
    for name, value in saved.items():
        expected = value.bfloat16().float() if there == "O3" and value.is_floating_point() else value
        assert torch.equal(again[name], expected), name


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("there", ["O1", "O2", "O3"])
@pytest.mark.parametrize("here", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_s_state_is_that_of_the_level_it_is_loaded_at(
    name: str, here: str, there: str, dtype: torch.dtype
) -> None:
    """Master weights of O2 once stayed at O1 and O3, where they were taken for those of 16-bit weights."""
    model, optimizer = made(name, here, dtype)
    data = batches(4, 3, 8, 8)
    train(model, optimizer, data[:2])
    saved = reloaded((model.state_dict(), optimizer.state_dict()))
    for order in (0, 1):
        other, others = made(name, there, dtype, seed=1)
        parts = [(other, saved[0]), (others, saved[1])]
        for what, state in parts if order else reversed(parts):
            what.load_state_dict(copy.deepcopy(state))
        again = others.state_dict()["state"]
        for key, own in saved[1]["state"].items():
            for entry, value in own.items():
                if entry != "master" and isinstance(value, Tensor):
                    taken = again[key][entry]
                    rounded = value.to(taken.dtype) if there == "O3" else value.float()
                    assert torch.equal(taken.float(), rounded.float()), (key, entry)
        assert any("master" in own for own in again.values()) == (there == "O2")
        if "O3" not in (here, there):
            after = other.state_dict()
            assert all(torch.equal(after[name], value) for name, value in saved[0].items())
        train(other, others, data[2:])
        assert any("master" in own for own in others.state_dict()["state"].values()) == (there == "O2")


def test_a_float32_run_goes_on_at_o2_with_its_state() -> None:
    data = batches(4, 3, 8, 8)
    plain = cnn()
    optimizer = torch.optim.Adam(plain.parameters(), 0.01)
    train(plain, optimizer, data[:2])
    model, decorated = made("Adam", seed=1)
    model.load_state_dict(reloaded(plain.state_dict()))
    decorated.load_state_dict(reloaded(optimizer.state_dict()))
    before = [p.detach().clone() for p in plain.parameters()]
    assert all(map(torch.equal, master_params(decorated), before))
    weight = next(iter(model.parameters()))
    assert decorated.state[weight]["exp_avg"].dtype == torch.float32
    train(model, decorated, data[2:])
    train(plain, optimizer, data[2:])
    for own, other in zip(master_params(decorated), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0.1, atol=0.02)


def test_an_optimizer_with_state_can_be_decorated() -> None:
    data = batches(3, 3, 8, 8)
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, optimizer, data[:2])
    step = optimizer.state[model[0].weight]["step"].item()
    model, optimizer = decorate(model, optimizer, dtype=torch.bfloat16)
    train(model, optimizer, data[2:])
    assert optimizer.state[model[0].weight]["step"].item() == step + 1


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model, optimizer = made("Adam")
    train(model, optimizer, batches(2, 3, 8, 8))
    before = [m.clone() for m in master_params(optimizer)]
    other = torch.optim.Adam([nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())
    assert all(map(torch.equal, before, master_params(optimizer)))
    train(model, optimizer, batches(1, 3, 8, 8))


@pytest.mark.parametrize("state", [{}, {"scale": "x", "good_steps": 0, "overflows_left": 1}, None])
def test_a_scale_s_state_is_checked(state: Any) -> None:
    scale = DynamicLossScale()
    with pytest.raises(InvalidArgument, match="a loss scale's state has three numbers"):
        scale.load_state_dict(state)
    assert float(scale.value) == 2.0**16


def test_a_model_that_is_cast_afterwards_is_refused() -> None:
    model, optimizer = made("SGD")
    (x, target), *_ = batches(1, 3, 8, 8)
    loss_of(model(x), target).backward()
    model.float()
    with pytest.raises(InvalidArgument, match=r"weights must stay 16-bit. Found: a parameter of torch.float32"):
        optimizer.step()


def average(into: nn.Module, model: nn.Module) -> None:
    """Update a moving average as many training scripts do."""
    latest = model.state_dict()
    for name, value in into.state_dict().items():
        if value.is_floating_point():
            value.mul_(0.9).add_(latest[name], alpha=0.1)


def test_a_moving_average_in_a_copy_is_said_to_change_nothing() -> None:
    model, _ = made("SGD")
    mean = copy.deepcopy(model)
    average(mean, model)
    with pytest.warns(RuntimeWarning, match=r"was written to, which changes nothing.* before decorate"):
        average(mean, model)
    average(mean, model)  # once


def test_a_moving_average_that_was_made_before_is_float32() -> None:
    model = cnn()
    mean, expected = copy.deepcopy(model), copy.deepcopy(model)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    for x, target in batches(3, 3, 8, 8):
        train(model, optimizer, [(x, target)])
        average(mean, model)
        masters = master_params(optimizer)
        for value, master in zip(expected.parameters(), masters, strict=True):
            value.data.mul_(0.9).add_(master, alpha=0.1)
    assert all(map(torch.equal, mean.parameters(), expected.parameters()))


def test_a_state_that_is_changed_and_loaded_is_no_reason_to_warn() -> None:
    """Ranks average their models so, for instance."""
    model = decorate(cnn(), dtype=torch.bfloat16)
    for _ in range(2):
        state = model.state_dict()
        for value in state.values():
            value.mul_(2)
        model.load_state_dict(state)
    assert model.state_dict()["0.bias"].dtype == torch.float32


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("there", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "FusedAdamW"])
def test_a_state_with_masters_of_weights_that_were_never_updated_is_taken(name: str, there: str, steps: int) -> None:
    """Frozen weights, or a run that was saved before its first step: torch's Adam once missed its counter there."""
    data = batches(steps + 2, 3, 8, 8)
    model, optimizer = made(name, dtype=torch.bfloat16)
    model[0].requires_grad_(False)
    train(model, optimizer, data[:steps])
    saved = reloaded((model.state_dict(), optimizer.state_dict()))
    other, others = made(name, there, torch.bfloat16, seed=1)
    other.load_state_dict(saved[0])
    others.load_state_dict(saved[1])
    model[0].requires_grad_(True)
    train(model, optimizer, data[steps:])
    train(other, others, data[steps:])
    for own, mine in zip(master_params(others), master_params(optimizer), strict=True):
        assert torch.equal(own, mine) if there == "O2" else own.dtype == torch.float32


class Nested(torch.optim.SGD):
    """Keeps its moments in a list and in a dict, as Shampoo and SOAP do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            own = self.state[p]
            own.setdefault("sides", [torch.zeros_like(p, dtype=torch.float32), None])
            own.setdefault("more", {"count": torch.zeros((), dtype=torch.int64)})
            own["sides"][0].add_(p.grad.float())
            own["more"]["count"] += 1
        return super().step(closure)


def test_nested_state_is_a_copy_of_what_is_loaded() -> None:
    """It was once handed on as it was: on the device of the file, and the same tensors as in the loaded state."""
    runs: list[Any] = []
    for seed in (0, 1):
        model = mlp(seed)
        runs.append(decorate(model, Nested(model.parameters(), 0.1), dtype=torch.bfloat16))
    (model, optimizer), (other, others) = runs
    train(model, optimizer, batches(2, 8))
    saved = optimizer.state_dict()
    others.load_state_dict(saved)
    for mine, own in zip(saved["state"].values(), others.state_dict()["state"].values(), strict=True):
        assert torch.equal(own["sides"][0], mine["sides"][0]) and own["sides"][1] is None
        assert torch.equal(own["more"]["count"], mine["more"]["count"])
    before = copy.deepcopy(saved)
    train(other, others, batches(1, 8))
    for mine, then in zip(saved["state"].values(), before["state"].values(), strict=True):
        assert torch.equal(mine["sides"][0], then["sides"][0])
        assert torch.equal(mine["more"]["count"], then["more"]["count"])


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_state_is_taken_in_inference_mode(level: str) -> None:
    model = decorate(cnn(), level=level, dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(2):
            state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
