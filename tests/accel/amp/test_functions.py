"""Functions of the user's own: cast within a decorated model, untouched elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel.amp import decorate, float_function, half_function, promote_function, register_function
from accel.errors import InvalidArgument

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


class Calls(nn.Module):
    """Calls a function on its input, and on a float32 tensor."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.noted: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.noted = self.function(y, {"more": [torch.ones(1), torch.ones(1, dtype=torch.int64)]})
        return y


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("kind", "expected"), [(half_function, HALF), (float_function, SINGLE), (promote_function, SINGLE)]
)
def test_arguments_are_cast_within_a_decorated_model(kind: Any, expected: torch.dtype, level: str) -> None:
    seen: list[Any] = []

    @kind
    def function(y: Tensor, more: Any) -> None:
        """Note what it is given."""
        product = torch.ones(2, 2, dtype=y.dtype) @ torch.ones(2, 2, dtype=y.dtype)
        seen.append((y.dtype, more["more"][0].dtype, more["more"][1].dtype, product.dtype))

    model = decorate(Calls(function), level=level, dtype=HALF)
    model(torch.randn(2, 4))
    assert seen == [(expected, expected, torch.int64, expected)]
    seen.clear()
    function(torch.ones(1, dtype=DOUBLE), {"more": [torch.ones(1), torch.ones(1, dtype=torch.int64)]})
    assert seen[0][:2] == (DOUBLE, SINGLE)
    assert function.__doc__ == "Note what it is given."


def test_a_function_of_a_module_is_registered_by_name() -> None:
    owner: Any = SimpleNamespace(double=lambda x: x * 2)
    for kind, dtype in ((half_function, HALF), (float_function, SINGLE), (promote_function, SINGLE)):
        register_function(owner, "double", kind)  # the last one holds
        model = decorate(Calls(lambda y, more: owner.double(more["more"][0])), dtype=HALF)
        model(torch.randn(2, 4))
        assert model.noted.dtype == dtype
    with pytest.raises(InvalidArgument, match="must have a function 'triple'"):
        register_function(owner, "triple", half_function)


class Checkpointed(nn.Module):
    """A part, with a function of the user's own in it, whose activations may be computed again in the backward pass."""

    def __init__(self, kind: Any, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function, self.use_reentrant = kind(self.noted), use_reentrant
        self.seen: list[torch.dtype] = []

    def noted(self, y: Tensor) -> Tensor:
        self.seen.append(y.dtype)
        return (y.softmax(-1) * y.log_softmax(-1)).mul(y)

    def part(self, x: Tensor) -> Tensor:
        y = self.second(x)
        return y + self.function(y).to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            return self.part(x)
        again: Tensor = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        return again


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("kind", "dtype"), [(float_function, SINGLE), (half_function, HALF)])
def test_checkpointing_computes_again_what_it_was(
    kind: Any, dtype: torch.dtype, level: str, use_reentrant: bool
) -> None:
    """Within the backward pass, when the model's call has ended, arguments once were not cast."""
    gradients = []
    for checkpointing in (None, use_reentrant):
        model = decorate(Checkpointed(kind, checkpointing), level=level, dtype=HALF)
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert model.seen == [dtype] * (1 if checkpointing is None else 2)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_call_outside_before_the_backward_pass_changes_nothing_of_checkpointing(
    has_gradients: bool, use_reentrant: bool
) -> None:
    """As of an ordinary teacher with 16-bit weights: the part was then computed again without casts."""
    gradients = []
    for checkpointing in (None, use_reentrant):
        model = decorate(Checkpointed(float_function, checkpointing), dtype=HALF)
        output = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
        with torch.set_grad_enabled(has_gradients):
            model.function(torch.ones(2, 8, dtype=HALF, requires_grad=True))
        output.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert model.seen == [SINGLE, HALF, SINGLE][: 2 if checkpointing is None else 3]
    assert all(map(torch.equal, *gradients))


def test_an_ordinary_model_s_own_checkpointing_is_left_alone() -> None:
    """Of the same function, with arguments of the same dtype, after a decorated model's calls."""
    model = decorate(Checkpointed(float_function, None), dtype=HALF)
    model(torch.randn(4, 8))
    x = torch.ones(2, 8, dtype=HALF, requires_grad=True)
    checkpoint(model.function, x, use_reentrant=False).sum().backward()
    assert model.seen == [SINGLE, HALF, HALF]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_checkpointing_outside_of_a_model_is_left_alone(level: str) -> None:
    seen: list[torch.dtype] = []

    @half_function
    def function(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.exp()

    decorate(Calls(lambda y, more: function(y)), level=level, dtype=HALF)(torch.randn(2, 4))
    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [HALF, SINGLE, SINGLE]
