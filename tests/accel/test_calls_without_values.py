"""Calls and batches of a loop whose tensors have no values or shapes to look at: accel leaves them alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, default_collate

import accel
from accel import entry
from accel.dataio.batches import describe, equal
from accel.guard.watch import OutputSizes
from accel.run.context import shapes_of
from tests.accel.loops import Net, Samples, loss_of, make

X = torch.randn(8, 6)


class Unhurried(Net):
    """Takes no longer in the plain call; its dropout is off."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


def per_sample_gradients(model: nn.Module) -> Any:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x[None],)).square().sum()

    return vmap(grad(loss), (None, 0))(weights, X)["head.weight"]


def under_fake_tensors(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = model(mode.from_tensor(X))
    return torch.ones(outputs.shape)


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (X,)).module()(X)


def traced(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")  # whatever its category
        return torch.jit.trace(model, (X,))(X)


def compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(X)


def captured(model: nn.Module) -> Any:
    looked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for name in ("learn", "problem"):
            patch.setattr(OutputSizes, name, lambda *_: looked.append(_))
        outputs = model(X)
    assert not looked  # what is done with outputs would be done in each replay
    return outputs


@pytest.mark.usefixtures("only_quick")
@pytest.mark.parametrize("plain", [True, False], ids=["plain steps", "under a strategy"])
@pytest.mark.parametrize("call", [per_sample_gradients, under_fake_tensors, exported, traced, compiled, captured])
def test_a_call_whose_tensors_have_no_values_is_made_as_it_is(call: Callable[[nn.Module], Any], plain: bool) -> None:
    model, loader, optimizer = make(kind=Unhurried)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    session = entry.MODELS[model].session
    session.runner._next_action = lambda first=False: None  # type: ignore[method-assign]
    found: Any = None
    for number, (x, target) in enumerate(loader):
        if number == 4 and not plain:
            session.switchboard.switch({"quick": None})
        if number == 6:
            found = call(model)
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        if number == 6:
            with accel.disabled():
                expected = call(model)
        optimizer.step()
    assert torch.equal(found, expected)
    assert (session.switchboard.trips, session.failed) == ({}, "")


@pytest.mark.usefixtures("only_quick")
def test_a_loop_of_per_sample_gradients_calls_its_model() -> None:
    model, loader, optimizer = make(kind=Unhurried)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    for _ in range(20):
        for _ in loader:
            model.head.weight.grad = per_sample_gradients(model).mean(0)
            optimizer.step()
    session = entry.MODELS[model].session
    assert session.failed == ""
    assert session.run.observed.uncalled == ""


def nested(layout: torch.layout, *lengths: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(length, 3) for length in lengths], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_told_by_how_much_it_holds(layout: torch.layout) -> None:
    batch = nested(layout, 2, 4), torch.ones(2)
    assert describe(batch) == (2, ((2, 18), (2,)))
    assert describe({"x": batch[0]}) == (2, ((2, 18),))
    assert shapes_of(batch, {}) == ((2, 18), (2,))
    assert describe(batch) == describe((nested(layout, 2, 4), torch.ones(2)))
    assert not equal(batch, batch)


class OfAnyLength(Samples):
    """A collate function of the loop's own makes nested tensors of these."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].expand(1 + index % 3, 6), torch.tensor(index)


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x for x, _ in samples]), default_collate([y for _, y in samples])


class Padded(Unhurried):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nested.to_padded_tensor(x, 0.0).sum(1))


@pytest.mark.parametrize("allow", ["exact", "reordered"])
def test_a_loop_over_nested_tensors_trains_as_without_accel(allow: str) -> None:
    ends = []
    for optimized in (False, True):
        model, _, optimizer = make(kind=Padded)
        loader = DataLoader(OfAnyLength(), 8, collate_fn=collate)  # type: ignore[var-annotated]
        if optimized:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, allow=allow, budget=1)
        for _ in range(3):
            for x, target in loader:
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()
        if optimized:
            assert entry.MODELS[model].session.failed == ""
        ends.append(model.head.weight.detach())
    assert torch.equal(*ends)
