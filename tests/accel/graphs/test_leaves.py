"""A call is recorded on leaves of its own, which what the loop still holds of earlier steps has no part in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.graphs.model_graph import Leaves, ModelGraph
from accel.graphs.obstacles import NotCapturable
from tests.accel.graphs.model_loops import Tied, batch, both, network

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


class Recurrent(nn.Module):
    """torch's recurrent layers list their weights once more."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 5, batch_first=True), nn.GRU(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(self.lstm(x[:, None])[0])[0]
        return out


class Frozen(nn.Sequential):
    """Half of it is not trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        self[0].requires_grad_(False)


@pytest.mark.parametrize("make", [network, Tied, Recurrent, Frozen])
def test_it_trains_as_the_eager_model_while_the_last_loss_is_kept(make: Any) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses, loss = [], None
        for seed in range(8):
            optimizer.zero_grad()
            loss = model(batch(8, seed)).square().mean()  # the loss before is alive until here
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    calls = both(loop, make, strict=True)
    assert calls.replays > 2


@pytest.mark.parametrize("make", [network, Tied, Recurrent])
def test_no_parameter_of_the_loop_is_in_what_was_recorded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[Tensor] = []
    made = ModelGraph.__init__

    def note(self: ModelGraph, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        outputs.extend(self._outputs)

    monkeypatch.setattr(ModelGraph, "__init__", note)
    models: list[nn.Module] = []

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        models.append(model)
        for seed in range(5):
            model(batch(8, seed)).sum().backward()
        return []

    both(loop, make, strict=True)
    reached, waiting = set(), [output.grad_fn for output in outputs]
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions]
    leaves = {id(node.variable) for node in reached if hasattr(node, "variable")}
    assert leaves
    assert leaves.isdisjoint(id(parameter) for model in models for parameter in model.parameters())


def test_after_the_block_all_is_as_it_was() -> None:
    class Own(nn.Parameter):
        pass

    model = Recurrent()
    model.own = Own(torch.ones(2))
    model.lstm.weight_ih_l0.mark = "kept"  # type: ignore[attr-defined]
    before = {name: id(p) for name, p in model.named_parameters()}
    weights, refs = model.lstm._flat_weights, model.lstm._flat_weight_refs
    leaves = Leaves(model.modules())
    with leaves.in_place():
        assert leaves.of(model.own) is model.own  # of a class of its own
        assert id(model.own) == before["own"]
        assert model.lstm.weight_ih_l0 is model.lstm._flat_weights[0]
        assert not model.lstm._weights_have_changed()  # else torch puts them together anew, within the capture
        assert model.lstm.weight_ih_l0.mark == "kept"
        assert model.lstm.weight_ih_l0.data_ptr() == weights[0].data_ptr()
        assert id(model.lstm.weight_ih_l0) != before["lstm.weight_ih_l0"]
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.lstm._flat_weights is weights
    assert model.lstm._flat_weight_refs is refs
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0
    assert not model.lstm._weights_have_changed()


def _other_memory(layer: Any) -> None:
    layer.weight.data = layer.weight.data * 2


def _kept_in_a_tuple(layer: Any) -> None:
    layer.regularised = (layer.weight,)


def _kept_in_a_list(layer: Any) -> None:
    layer.known.append(layer.weight)


def _tied(layer: Any) -> None:
    layer.other.weight = layer.weight


@pytest.mark.parametrize("change", [_other_memory, _kept_in_a_tuple, _kept_in_a_list, _tied])
def test_a_call_that_replaces_a_parameter_or_leaves_it_somewhere_is_refused(change: Any) -> None:
    layer: Any = nn.Linear(3, 3)
    layer.other, layer.known = nn.Linear(3, 3), []
    bias = layer.bias
    with pytest.raises(NotCapturable, match="a parameter"), Leaves(layer.modules()).in_place():
        change(layer)
    assert layer.bias is bias


class Past(Tied):
    """A weight that the call reads past its module too."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.kept[0]


class Normalised(nn.Linear):
    """Writes other numbers in place of its weight's in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


class Regularised(nn.Linear):
    """Leaves its weight for the loss."""

    def forward(self, x: Tensor) -> Tensor:
        self.regularised = (self.weight,)
        return super().forward(x)


@pytest.mark.parametrize("make", [lambda: Normalised(6, 3), lambda: Regularised(6, 3), Past])
def test_such_models_stay_eager(make: Any) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for seed in range(8):
            optimizer.zero_grad()
            loss = model(batch(8, seed)).square().mean()
            for each in getattr(model, "regularised", ()):
                loss = loss + each.square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    calls = both(loop, make)
    assert (calls.captures, len(calls.why_eager)) == (0, 1)
