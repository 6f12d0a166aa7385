"""Functions of the user's own: cast within a decorated model, untouched elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
