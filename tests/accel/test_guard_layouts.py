"""The guard compares how values lie in memory, what a call leaves in its arguments, and gradients by their dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.guard import comparison, guard
from accel.guard.guard import Comparison, Replayed
from accel.run.layouts import in_order, is_kept, order
from accel.strategies.base import Exactness
from tests.accel.guard_replays import replayed_both_ways
from tests.sampling import examples

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def compared(model: nn.Module, wrap: Callable[[Any], Any], *args: Any) -> Comparison:
    """Record one call, then compare the plain one with a wrapped one."""
    recording = guard.record(model, CPU, args, {})
    model(*args)
    return replayed_both_ways(model, wrap, recording)


def in_channels_last(call: Any) -> Any:
    return lambda x: call(x.to(memory_format=torch.channels_last))


class Features(nn.Module):
    """A convolution whose features are kept as an attribute, in a list or nowhere, and returned flat or as a mean."""

    def __init__(self, keeps: str, is_flat: bool) -> None:
        super().__init__()
        self.layer, self.keeps, self.is_flat = nn.Conv2d(3, 4, 3), keeps, is_flat
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.keeps:
            self.features = [h] if self.keeps == "list" else h
        return h.flatten(2) if self.is_flat else h.mean((2, 3))


@pytest.mark.parametrize(
    ("keeps", "is_flat", "needs_gradient", "problem"),
    [
        ("", False, False, ""),
        ("attribute", False, False, "what it keeps in features has other strides than in the plain path"),
        ("list", False, False, "what it keeps in features has other strides than in the plain path"),
        ("", True, False, "its output has the strides"),
        ("", False, True, "its gradient for input 0 is not contiguous, unlike the plain one"),
    ],
)
def test_what_the_loop_could_no_longer_view_is_a_problem(
    keeps: str, is_flat: bool, needs_gradient: bool, problem: str
) -> None:
    x = torch.randn(2, 3, 6, 5).requires_grad_(needs_gradient)
    found = compared(Features(keeps, is_flat), in_channels_last, x).problem
    assert found.startswith(problem) and bool(found) == bool(problem)


class Writes(nn.Module):
    """Writes what it has computed into the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Tensor], log: list[Tensor]) -> Tensor:
        batch["x"] = batch["x"] - batch["x"].mean()
        outputs: Tensor = self.layer(batch["x"])
        log.append(outputs.detach())
        return outputs


@pytest.mark.parametrize(
    ("wrap", "problem"),
    [
        (lambda call: call, ""),
        (lambda call: lambda batch, log: call(dict(batch), log), "it puts other entries into its arguments"),
        (lambda call: lambda batch, log: call(batch, []), "it puts other entries into its arguments"),
        (
            lambda call: lambda batch, log: (call(batch, log), batch.update(x=batch["x"] * 1.1))[0],
            "what it puts into its arguments is off by",
        ),
    ],
)
def test_what_a_call_puts_into_its_arguments_is_compared(wrap: Callable[[Any], Any], problem: str) -> None:
    found = compared(Writes(), wrap, {"x": torch.randn(4, 2)}, []).problem
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_replays_put_nothing_into_the_lists_that_the_loop_has_passed() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor, log: Any = None) -> Tensor:
            log.append(len(x))
            return super().forward(x)

    log: list[int] = []
    assert compared(Counts(2, 2), lambda call: call, torch.randn(4, 2), log).problem == ""
    assert log == [4]


@pytest.mark.parametrize("wide_first", [True, False])
@pytest.mark.parametrize("wrong", [torch.float32, torch.bfloat16])
def test_each_gradient_has_the_tolerance_of_its_dtype(wrong: torch.dtype, wide_first: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16] if wide_first else [torch.bfloat16, torch.float32]
    torch.manual_seed(0)
    plain = [torch.randn(50).to(dtype) for dtype in dtypes]

    def spoilt(gradient: Tensor) -> Tensor:
        noise = torch.randn(50)
        noise -= noise @ gradient.float() / gradient.float().square().sum() * gradient.float()
        return gradient + (0.2 * noise).to(gradient.dtype)  # 4e-2 is allowed in float32, a half in bfloat16

    other = [spoilt(each) if each.dtype == wrong else each for each in plain]
    replayed, candidate = (Replayed([], gradients, ["a", "b"]) for gradients in (plain, other))
    sizes = comparison._compare_gradients(replayed, candidate, Exactness.REORDERED)
    assert bool(sizes.problem) == (wrong == torch.float32)


@settings(max_examples=examples(60), deadline=None)
@given(SHAPES, st.randoms())
def test_any_tensor_can_be_laid_out_in_any_order(shape: list[int], chance: Any) -> None:
    def shuffled() -> list[int]:
        return chance.sample(range(len(shape)), len(shape))  # type: ignore[no-any-return]

    values = torch.arange(torch.Size(shape).numel()).view(shape)
    turned = shuffled()
    tensor = values.permute(turned).contiguous().permute(sorted(range(len(shape)), key=turned.__getitem__))
    places = [place for place in shuffled() if shape[place] > 1]
    laid_out = in_order(tensor, places)
    assert torch.equal(laid_out, values)
    assert list(order(laid_out)) == places
    assert in_order(laid_out, places) is laid_out
    assert is_kept(tensor, laid_out) == (order(tensor) == order(laid_out))
    if len(shape) > 2:
        assert in_order(tensor).is_contiguous()


def test_what_has_no_strides_is_left_alone() -> None:
    sparse = torch.eye(3).to_sparse()
    assert in_order(sparse) is sparse
    assert is_kept(sparse, sparse)
    expanded = torch.ones(3, 1, 2).expand(3, 4, 2)
    assert in_order(expanded) is expanded
    assert is_kept(expanded, expanded.clone())
