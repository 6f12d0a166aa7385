"""A captured model trains as the eager one, bit for bit, in loops that know nothing of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.accel.graphs.model_loops import batch, both, loop_of, network, step, taped
from tests.sampling import examples

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


def test_a_plain_loop() -> None:
    calls = both(loop_of(12))
    assert (calls.captures, calls.replays, calls.why_eager) == (1, 9, [])


def test_a_model_that_is_called_again_before_its_backward_pass() -> None:
    """As in siamese networks and GANs: the second call would overwrite the first one's activations."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(8):
            optimizer.zero_grad()
            one, two, three = (model(batch(8, 3 * seed + n)) for n in range(3))
            loss = (one - two).square().mean() + (two * three).mean()
            loss.backward()
            optimizer.step()
            results += [one.detach(), two.detach(), loss.detach()]
        return results

    calls = both(loop, warmup=2)
    assert calls.replays >= 7


def test_a_graph_without_a_backward_pass_is_free_once_it_is_forgotten() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = [step(model, optimizer, seed) for seed in range(4)]
        skipped = model(batch(8, 50))  # a loss that is not finite, say
        results.append(step(model, optimizer, 4))
        results.append(skipped.detach().clone())
        del skipped
        return results + [step(model, optimizer, seed) for seed in range(5, 8)]

    assert both(loop, warmup=2).replays == 6


def test_losses_that_share_a_call() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(8):
            optimizer.zero_grad()
            out = model(batch(8, seed))
            out[:, 0].mean().backward(retain_graph=True)
            out[:, 1].square().mean().backward()
            optimizer.step()
            results.append(out.detach())
        return results

    assert both(loop, warmup=2).replays == 6


def test_a_backward_pass_that_comes_too_late_raises() -> None:
    model = network()
    taped(model, warmup=0)
    loss = model(batch(8, 0)).mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = model(batch(8, 0)).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    loss = model(batch(8, 0)).mean()
    loss.backward(retain_graph=True)
    model(batch(8, 1)).mean().backward()
    loss.backward()
    loss = model(batch(8, 0)).mean()
    with pytest.raises(RuntimeError, match=r"can't be differentiated again. Found: create_graph=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_gradients_that_are_differentiated_again() -> None:
    """The gradient penalty of a Wasserstein GAN."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(6):
            optimizer.zero_grad()
            x = batch(8, seed).requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (gradient.norm(dim=1) - 1).square().mean().backward()
            optimizer.step()
            results.append(gradient.detach())
        return results

    calls = both(loop)
    assert (calls.captures, calls.why_eager) == (0, ["its gradients are differentiated again (create_graph=True)"])


def test_weights_that_were_written_to_before_the_backward_pass() -> None:
    model = network()
    taped(model, warmup=0)
    loss = model(batch(8, 0)).mean()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_and_outputs_may_be_kept() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(8):
            out = model(batch(8, seed))
            results.append(torch.autograd.grad(out.square().mean(), list(model.parameters())))
            results.append(out.detach())
        return results

    both(loop, warmup=1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_clipping_and_clearing(set_to_none: bool) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for number in range(18):
            loss = model(batch(8, number)).square().mean()
            loss.backward()
            results.append(loss.detach())
            if number % 3 == 2:
                results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False))
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return results

    assert both(loop).captures == 1


class Heads(nn.Module):
    """Returns a dict: two heads, the logarithm of one that may be zero, and a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return them."""
        y = self.body(x).relu()
        return {"one": self.one(y), "two": self.two(y), "log": y.log(), "rows": torch.tensor(len(x)), "name": "heads"}


@pytest.mark.parametrize("order", ["1", "12", "2", "3", "11112222", "111331"])
def test_outputs_that_the_loss_leaves_out(order: str) -> None:
    """They get no gradient, nor does what leads to them alone; 0 · inf would be NaN."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(12):
            optimizer.zero_grad()
            out = model(batch(8, seed))
            use = order[seed % len(order)]
            loss = {"1": out["one"], "2": out["two"], "3": out["one"] + out["two"]}[use].square().mean() * 1e-3
            loss.backward()
            results += [loss.detach(), out["rows"], [p.grad for p in model.parameters()]]
            optimizer.step()
        return results

    def finite() -> Heads:
        model = Heads()
        if len(set(order)) > 1:  # which outputs are used changes after the capture: gradients of zero stand in
            with torch.no_grad():
                model.body.bias.fill_(20.0)
        return model

    assert both(loop, finite, warmup=3).replays == 9


class Two(nn.Module):
    """Takes nested arguments, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, pair: dict[str, Tensor], *, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Multiply and add."""
        return self.layer(pair["x"]) * scale + pair["y"], None


def test_gradients_of_inputs() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(8):
            x, y = batch(4, seed).requires_grad_(), batch(4, seed + 50)
            before = (x * 2).exp()
            out, _ = model({"x": before, "y": y}, scale=2.0 if seed % 2 else 1.0)
            out.sum().backward()
            results.append(x.grad)
        return results

    assert both(loop, Two, warmup=1).captures == 2


def test_parts_that_are_frozen_and_modes_of_parts() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(24):
            model[1].train(seed // 6 % 2 == 0)
            model[0].requires_grad_(seed // 12 == 0)
            results.append(step(model, optimizer, seed))
        return results

    assert both(loop, warmup=1).captures == 4


def test_autocast_has_graphs_of_its_own() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=seed % 2 == 0):
                model[0](batch(8, seed))  # a cast weight is in autocast's cache
                loss = model(batch(8, seed)).float().square().mean()
            loss.backward()
            optimizer.step()
            results.append(loss.detach())
        return results

    assert both(loop, warmup=1).captures == 2


class Output(OrderedDict[str, Tensor]):
    """As those of transformers: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


def test_outputs_of_a_dicts_subclass() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Output:
            return Output(logits=self.layer(x))

    model = Model()
    taped(model, warmup=0)
    out = model(batch(4, 0))
    assert type(out) is Output
    assert torch.equal(out.logits, model.layer(batch(4, 0)))


_EVENT = st.tuples(
    st.sampled_from([8, 4, 1]),
    st.sampled_from(["train", "eval", "no_grad"]),
    st.sampled_from(["backward", "skip", "twice", "later", "input"]),
    st.sampled_from(["step", "zero", "keep", "freeze"]),
)


@settings(max_examples=examples(40))
@given(st.lists(_EVENT, min_size=4, max_size=16), st.integers(0, 2), st.integers(1, 4))
def test_any_order_of_events(events: list[tuple[int, str, str, str]], warmup: int, most: int) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = []
        waiting: list[Tensor] = []
        for seed, (rows, mode, backward, after) in enumerate(events):
            model.train(mode == "train" and rows > 1)
            x = batch(rows, seed).requires_grad_(backward == "input")
            with torch.set_grad_enabled(mode != "no_grad"):
                out = model(x)
            results.append(out.detach())
            if out.requires_grad and backward == "later":
                waiting.append(out)
            elif out.requires_grad and backward != "skip":
                out.square().mean().backward(retain_graph=backward == "twice")
                if backward == "twice":
                    out.sum().backward()
            results.append(x.grad)
            if after in ("step", "zero"):
                while waiting:
                    waiting.pop(0).sum().backward()
            if after == "step":
                optimizer.step()
                optimizer.zero_grad()
            elif after == "zero":
                optimizer.zero_grad(set_to_none=False)
            elif after == "freeze" and not waiting:
                model[0].requires_grad_(not model[0].weight.requires_grad)
        return results

    both(loop, warmup=warmup, most=most)
