"""A loop that changes weights, states or options between two steps: updates go on as the formula says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from tests import optimizer_changes
from tests.kernels.optimizer_oracle import update_ref
from tests.optimizer_changes import turned, weights

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (FusedSGD, {"lr": 0.05}),
    "SGD, momentum": (FusedSGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "max_grad_norm": 1.0}),
    "Adam": (FusedAdam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (FusedAdamW, {"lr": 0.01}),
    "LAMB": (FusedLAMB, {"lr": 0.01}),
    "LARS": (FusedLARS, {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.02}),
    "LARS, no momentum": (FusedLARS, {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.01, "trust_coefficient": 0.2}),
}


def _a_state_turned_and_loaded(params: list[nn.Parameter], optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state |= {name: turned(value) for name, value in state.items()}
    optimizer.load_state_dict(saved)


def _frozen_or_not(params: list[nn.Parameter], optimizer: Any) -> None:
    params[0].requires_grad_(not params[0].requires_grad)


CHANGES = optimizer_changes.CHANGES | {
    "a state turned and loaded": _a_state_turned_and_loaded,
    "other weights": weights(lambda data: torch.linspace(-1, 1, data.numel(), dtype=data.dtype).view(data.shape)),
    "float32": weights(Tensor.float),
    "frozen or not": _frozen_or_not,
}


def trained(kind: str, dtype: torch.dtype, changes: list[str], *, by_formula: bool) -> list[Tensor]:
    """Return the weights after two steps before and after each change; gradients have orders of their own."""
    torch.manual_seed(0)
    optimizer_of, options = KINDS[kind]
    shapes = torch.randn(4, 6), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3)
    params = [nn.Parameter(x.to(dtype)) for x in shapes]
    optimizer = optimizer_of(params[:], **options)
    if by_formula:
        optimizer._updater = lambda batches, scaling: update_ref(optimizer_of.kind, batches, scaling)
    for number, change in enumerate([None, *changes]):
        if change is not None:
            CHANGES[change](params, optimizer)
        for step in range(2):
            for p in params:
                grad = torch.randn(p.shape).to(p.dtype)
                p.grad = (turned(grad) if (number + step) % 3 == 0 else grad) if p.requires_grad else None
            optimizer.step()
    return [p.detach() for p in params]


def assert_as_the_formula(kind: str, dtype: torch.dtype, changes: list[str]) -> None:
    ours, exact = (trained(kind, dtype, changes, by_formula=by_formula) for by_formula in (False, True))
    for actual, expected in zip(ours, exact, strict=True):
        # Moments were float32 in some steps; a 16-bit weight may be rounded to either neighbour.
        bound = 2 * torch.finfo(expected.dtype).eps if expected.element_size() == 2 else 2e-5
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_change_an_update_is_that_of_the_formula(kind: str, change: str, dtype: torch.dtype) -> None:
    """Master weights kept the order that a parameter had had before, and updates took both as they lay in memory."""
    assert_as_the_formula(kind, dtype, [change])


@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.lists(st.sampled_from(list(CHANGES)), min_size=2, max_size=4),
)
def test_after_several_changes_too(kind: str, dtype: torch.dtype, changes: list[str]) -> None:
    assert_as_the_formula(kind, dtype, changes)


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", ["weights turned", "states turned", "states turned in place", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "LARS, no momentum"])
def test_kernels_too(kind: str, change: str, interpreted: None) -> None:
    for dtype in (torch.float32, torch.float16):
        assert_as_the_formula(kind, dtype, [change])


@pytest.mark.parametrize("shape", [(2, 6), (16, 6), (6, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_shape_are_refused_beside_what_is_of_the_old(
    kind: str, shape: tuple[int, int], path: str
) -> None:
    """An update walked on beyond the end of the state."""
    optimizer_of, options = KINDS[kind]
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 6))]
    optimizer = optimizer_of([{"params": [p]} for p in params], **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params[1].data = torch.ones(shape)
    before = params[0].clone()
    with pytest.raises(ValueError, match=rf"their parameter's shape, \[{shape[0]}, {shape[1]}\]. Found: \[4, 6\]"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_other_16_bit_weights_in_a_parameters_place_are_what_goes_on() -> None:
    """The master weights of those before wrote over them, as though nothing had been put there."""
    param = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = FusedSGD([param], lr=0.5)
    for expected in (0.5, 2.5):
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert param.tolist() == [expected] * 4
        param.data = torch.full_like(param, 3.0)
