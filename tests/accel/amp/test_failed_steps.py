"""Steps that raise, at O2: torch tells no hook of it, and masters stand in the optimizer's groups at that moment."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import DynamicLossScale, decorate, master_params, undecorate
from tests.accel.amp.amp_models import batches, cnn, loss_of


class Failing:
    """Raises where it is told to, within its step, before that has updated anything."""

    fails = False
    noting: Any = None

    def _init_group(self, *args: Any) -> Any:
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        if self.noting is not None:
            self.noting()
        return super()._init_group(*args)  # type: ignore[misc]


class FailingSGD(Failing, torch.optim.SGD):
    pass


class FailingAdamW(Failing, torch.optim.AdamW):
    pass


SCALES = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, 2.0**10),
}
MAKERS: dict[str, Any] = {
    "SGD": lambda params: FailingSGD(params, 0.1, momentum=0.9),
    "AdamW fused": lambda params: FailingAdamW(params, 0.01, fused=True),
}
CASES = [(name, scale) for name in MAKERS for scale in SCALES]


def made(name: str, scale: str) -> tuple[Any, Any]:
    model, (dtype, number) = cnn(), SCALES[scale]
    given = None if number is None else DynamicLossScale(initial=number)
    return decorate(model, MAKERS[name](model.parameters()), dtype=dtype, loss_scale=given)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss_of(model(batch[0]), batch[1]).backward()


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def outcome(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [*(m.detach().clone() for m in master_params(optimizer)), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_a_batch_whose_step_fails_may_be_left_out(name: str, scale: str, set_to_none: bool) -> None:
    """Its gradients once stayed on the model, where those of the next batch were added."""
    outcomes = []
    for fails in (False, True):
        model, optimizer = made(name, scale)
        data = batches(4, 3, 8, 8)
        train(model, optimizer, data[:2])
        if fails:
            model.eval()  # as if the batch had not been: its statistics stay out of those of batch normalisation
            optimizer.zero_grad()
            backward(model, data[0])
            model.train()
            optimizer.fails = True
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        for batch in data[2:]:
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, batch)
            optimizer.step()
        outcomes.append(outcome(model, optimizer))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_a_step_that_fails_may_be_tried_again(name: str, scale: str, clips: bool) -> None:
    """After running out of memory, say. The second try once updated no 16-bit weight, or was refused."""
    outcomes = []
    for fails in (False, True):
        model, optimizer = made(name, scale)
        data = batches(4, 3, 8, 8)
        train(model, optimizer, data[:2])
        optimizer.zero_grad()
        backward(model, data[2])
        if clips:
            nn.utils.clip_grad_norm_(master_params(optimizer), 0.1)
        if fails:
            optimizer.fails = True
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.step()
        train(model, optimizer, data[3:])
        outcomes.append(outcome(model, optimizer))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_after_a_step_that_failed_is_that_of_before(name: str) -> None:
    """Ctrl-C, and then the emergency checkpoint: it once had rounded weights, and a state without masters."""
    model, optimizer = made(name, "bfloat16")
    data = batches(5, 3, 8, 8)
    train(model, optimizer, data[:2])
    backward(model, data[2])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    after = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert all(torch.equal(value, after[0][key]) for key, value in before[0].items())
    assert after[1]["param_groups"] == before[1]["param_groups"]
    for key, own in before[1]["state"].items():
        assert own.keys() == after[1]["state"][key].keys()
        assert all(torch.equal(value, after[1]["state"][key][entry]) for entry, value in own.items())


def test_a_checkpoint_within_a_step_does_not_disturb_it() -> None:
    """A handler of a signal may save there, and go on."""

    class Saves(torch.optim.SGD):
        saved: Any = None

        def step(self, closure: Any = None) -> Any:
            self.saved = copy.deepcopy((model.state_dict(), self.state_dict()))
            return super().step(closure)

    outcomes = []
    for kind in (torch.optim.SGD, Saves):
        model: Any = cnn()
        model, optimizer = decorate(model, kind(model.parameters(), 0.1, momentum=0.9), dtype=torch.bfloat16)
        before = [m.clone() for m in master_params(optimizer)]
        train(model, optimizer, batches(1, 3, 8, 8))
        outcomes.append(outcome(model, optimizer))
    assert all(map(torch.equal, *outcomes))
    saved = dict(zip(dict(model.named_parameters()), before, strict=True))
    assert all(torch.equal(optimizer.saved[0][name], value) for name, value in saved.items())
    assert len(optimizer.saved[1]["state"]) == 4  # the masters of two layers; batch normalisation has none


def test_a_state_that_was_taken_before_a_step_keeps_its_masters() -> None:
    """As one has it that a thread writes to a file while training goes on."""
    model, optimizer = made("SGD", "bfloat16")
    train(model, optimizer, batches(1, 3, 8, 8))
    state = optimizer.state_dict()["state"]
    names = {key: set(own) for key, own in state.items()}
    seen: list[Any] = []
    optimizer.noting = lambda: seen.append({key: set(own) for key, own in state.items()})
    train(model, optimizer, batches(1, 3, 8, 8))
    assert seen == [names] == [{key: set(own) for key, own in state.items()}]
    assert all(own is state[number] for number, own in enumerate(map(optimizer.state.get, model.parameters())))


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_mixed_precision_comes_off_after_a_step_that_failed(name: str, scale: str) -> None:
    model, optimizer = made(name, scale)
    data = batches(3, 3, 8, 8)
    train(model, optimizer, data[:2])
    masters = [m.detach().clone() for m in master_params(optimizer)]
    backward(model, data[2])
    optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    model.zero_grad()
    undecorate(model)
    assert all(map(torch.equal, masters, model.parameters()))
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert not hasattr(optimizer, "found_inf")
    train(model, optimizer, data)


def test_a_step_that_overflows_and_fails_is_left_out() -> None:
    model, optimizer = made("SGD", "float16")
    data = batches(3, 3, 8, 8)
    train(model, optimizer, data[:1])
    before = [m.detach().clone() for m in master_params(optimizer)]
    optimizer.zero_grad()
    (loss_of(model(data[1][0]), data[1][1]) * torch.inf).backward()
    optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.zero_grad()
    assert all(map(torch.equal, before, master_params(optimizer)))
    train(model, optimizer, data[2:])
    assert all(bool(m.isfinite().all()) for m in master_params(optimizer))
    assert optimizer.state_dict()["loss_scale"]["scale"] == 2.0**9
