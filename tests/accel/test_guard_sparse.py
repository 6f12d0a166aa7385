"""Gradients of `nn.Embedding(sparse=True)` are compared by what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard
from accel.guard.guard import Comparison
from accel.strategies.base import Exactness

CPU = torch.device("cpu")
EACH = pytest.mark.parametrize("exactness", Exactness)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.words(x))


def checked(wrap: Callable[[Words], Any], exactness: Exactness) -> Comparison:
    torch.manual_seed(0)
    model = Words()
    x = torch.tensor([1, 1, 2, 7])
    recording = guard.record(model, CPU, (x,), {})
    outputs = model(x)
    recording.listen(outputs)
    outputs.square().mean().backward()
    plain = guard.replay(model, model, recording)
    return guard.compare(plain, guard.replay(model, wrap(model), recording), exactness)


@EACH
def test_the_plain_call_passes(exactness: Exactness) -> None:
    finding = checked(lambda model: model, exactness)
    assert (finding.problem, finding.unsure) == ("", "")


@EACH
def test_a_long_gradient_is_found(exactness: Exactness) -> None:
    def long(model: Words) -> Any:
        def run(x: Tensor) -> Any:
            found = model.words(x)
            return model.head(found * 2 - found.detach())

        return run

    assert "its gradient" in checked(long, exactness).problem


@EACH
def test_a_gradient_of_other_rows_is_found(exactness: Exactness) -> None:
    def elsewhere(model: Words) -> Any:
        def run(x: Tensor) -> Any:
            found, other = model.words(x), model.words(x + 1)
            return model.head(found.detach() + (other - other.detach()))

        return run

    assert "gradient for words.weight" in checked(elsewhere, exactness).problem


@EACH
def test_a_dense_gradient_in_place_of_a_sparse_one_is_found(exactness: Exactness) -> None:
    """An optimizer treats the two otherwise: a sparse one leaves the other rows' states as they are."""

    def dense(model: Words) -> Any:
        return lambda x: model.head(nn.functional.embedding(x, model.words.weight))

    assert "gradient for words.weight" in checked(dense, exactness).problem
