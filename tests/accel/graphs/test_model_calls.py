"""A captured model trains as the eager one, bit for bit, in loops that know nothing of it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from accel.amp import decorate
from accel.graphs import CaptureError, ModelCalls, calls_of, capture, models, release
from accel.profiler.clocks import callslot
from tests.accel.graphs.tape import TapeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def taped(model: Any, **options: Any) -> ModelCalls:
    """Capture a model's calls on a tape."""
    calls = ModelCalls(model, recorder=lambda device: TapeRecorder(), **options)
    callslot.fill(model, callslot.SlotCall(calls.wrap(model._call_impl)))
    return calls


Loop = Callable[[Any, torch.optim.Optimizer], list[Any]]


def both(loop: Loop, make: Callable[[], Any] = network, **options: Any) -> ModelCalls:
    """Run a loop with the eager and with the captured model, and compare all bits."""

    def new() -> Any:
        torch.manual_seed(0)
        return make()

    def outcome(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False, momentum=0.9)
        torch.manual_seed(1)
        results = loop(model, optimizer)
        gradients = [p.grad for p in model.parameters()]
        return tree_leaves([results, gradients, list(model.state_dict().values()), torch.get_rng_state()])

    expected = outcome(new())
    model = new()
    calls = taped(model, **options)
    found = outcome(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    return calls


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int, rows: int = 8) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(batch(rows, seed)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_plain_loop() -> None:
    calls = both(lambda model, optimizer: [step(model, optimizer, seed) for seed in range(12)])
    assert (calls.captures, calls.replays, calls.why_eager) == (1, 9, [])


def test_evaluation_between_and_other_sizes() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(10):
            results.append(step(model, optimizer, seed, 8 if seed % 3 else 5))
            model.eval()
            with torch.no_grad():
                results.append(model(batch(8, seed)))
            model.train()
        return results

    calls = both(loop, warmup=1, most=2)
    assert calls.captures > 3
    assert len(calls._graphs) == 2


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


def test_hooks_are_called() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = [step(model, optimizer, seed) for seed in range(4)]
        handle = model[3].register_forward_hook(lambda module, args, out: results.append(out.detach()))
        results += [step(model, optimizer, seed) for seed in range(4, 8)]
        handle.remove()
        return results + [step(model, optimizer, seed) for seed in range(8, 12)]

    calls = both(loop, warmup=1)
    assert calls.replays == 7
    assert calls.why_eager == ["the model or a part of it has hooks, which a graph would not call"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_is_captured_but_for_a_loss_scale(dtype: torch.dtype) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        decorate(model, optimizer, dtype=dtype, keep_fp32=["3"])
        return [step(model, optimizer, seed) for seed in range(8)]

    calls = both(loop, warmup=1)
    assert calls.replays == (7 if dtype == torch.bfloat16 else 0)
    assert bool(calls.why_eager) == (dtype == torch.float16)


def test_code_that_was_put_in_place_of_a_modules() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = [step(model, optimizer, seed) for seed in range(4)]
        model[3].forward = torch.tanh
        results += [step(model, optimizer, seed) for seed in range(4, 8)]
        model[3].__class__ = nn.GELU
        del model[3].forward
        model[3].approximate = "none"
        return results + [step(model, optimizer, seed) for seed in range(8, 12)]

    assert both(loop, warmup=1).captures == 3


@dataclass
class Doubled:
    """A call that can be compared, so it has no hash."""

    layer: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * type(self.layer).forward(self.layer, x)


def test_code_without_a_hash_in_place_of_a_modules() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = [step(model, optimizer, seed) for seed in range(4)]
        model[3].forward = Doubled(model[3])
        return results + [step(model, optimizer, seed) for seed in range(4, 8)]

    assert both(loop, warmup=1).captures == 2


class Waiting(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Double what is large."""
        out: Tensor = self.layer(x)
        return out * 2 if out.sum().item() > 0 else out


def test_a_model_that_waits_for_the_device_stays_eager() -> None:
    calls = both(lambda model, optimizer: [step(model, optimizer, seed) for seed in range(8)], Waiting)
    assert calls.captures == 0
    assert calls.why_eager[0].startswith("it could not be captured: RuntimeError: operation not permitted")


@dataclass
class Other:
    x: Tensor


class Odd(nn.Module):
    """Takes and returns an object of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        """Apply."""
        return self.layer(x.x) if isinstance(x, Other) else Other(self.layer(x))


def test_what_cant_be_described_stays_eager() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(6):
            model(Other(batch(4, seed))).sum().backward()
            out = model(batch(4, seed)).x
            out.sum().backward()
            results.append(out.detach())
        return results

    calls = both(loop, Odd)
    assert [reason.partition(" must be")[0] for reason in calls.why_eager] == ["arguments", "what a model returns"]


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


def test_the_model_stays_what_it_is() -> None:
    model, plain = network(), network()
    calls = taped(model, warmup=0)
    model(batch(8, 0)).sum().backward()
    assert calls.replays == 1
    assert list(model.state_dict()) == list(plain.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train(False)
        assert callslot.contents(other).get(callslot.NAME) is None
        assert other(batch(8, 0)).shape == (8, 3)
    assert calls.replays == 1


def loops_of(model: nn.Module, calls: int) -> None:
    for seed in range(calls):
        model(batch(8, seed)).sum().backward()


def test_capture_and_release() -> None:
    model = network()
    model.compile(backend="eager")
    before = callslot.contents(model)
    assert capture(model, warmup=1) is model
    calls = calls_of(model)
    assert calls is not None
    with pytest.warns(RuntimeWarning, match=r"runs eagerly: its tensors must be on one CUDA device. Found: cpu"):
        loops_of(model, 4)
    assert calls.why_eager
    release(model)
    assert callslot.contents(model) == before
    assert calls_of(model) is None
    release(model)


def test_a_model_that_is_let_go_takes_its_graphs_with_it() -> None:
    model = network()
    calls = ModelCalls(model, warmup=0, recorder=lambda device: TapeRecorder())
    models.capture_model(model, calls)
    model(batch(8, 0)).sum().backward()
    assert calls.replays == 1
    assert calls_of(copy.deepcopy(model)) is None
    assert calls_of(pickle.loads(pickle.dumps(model))) is None
    gone = weakref.ref(model)
    del model, calls
    gc.collect()
    assert gone() is None


def test_release_under_a_later_wrapper() -> None:
    model = network()
    capture(model)
    calls = calls_of(model)
    inner = vars(model)[callslot.NAME]
    callslot.fill(model, callslot.SlotCall(lambda *args: inner(*args)))
    release(model)
    assert calls is not None
    model(batch(8, 0))
    assert not calls._uses


def test_bad_arguments() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"modules and optimizers are for a step. Found: a model"):
        capture(model, modules=[model])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"captured inside of what distributes it. Found: DataParallel"):
        capture(nn.DataParallel(model))


def test_strictly_it_raises() -> None:
    model = network()
    taped(model, warmup=0, strict=True)
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="can't be captured: the model or a part of it has hooks"):
        model(batch(8, 0))
    capture(model, warmup=0, strict=True)  # on a CPU it runs as it is
    with pytest.warns(RuntimeWarning, match="one CUDA device"):
        capture(network(), warmup=0, strict=True)(batch(8, 0))


def test_graphs_that_are_dropped_before_a_backward_pass() -> None:
    model = network()
    calls = taped(model, warmup=0)
    loss = model(batch(8, 0)).sum()
    calls.reset()
    with pytest.raises(RuntimeError, match="before its graphs are dropped"):
        loss.backward()


def test_inputs_that_never_repeat_are_said() -> None:
    model = nn.Linear(6, 2)
    calls = taped(model, warmup=2)
    for rows in range(1, 66):
        model(batch(rows, 0)).sum().backward()
    assert calls.why_eager[0].startswith("64 calls were of 64 kinds")


class Counting(nn.Module):
    """Replaces its buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        self.kept.append(self.total)
        self.total = self.total + self.layer(x).detach().mean(0)
        out: Tensor = self.layer(x) + self.total
        return out


def test_a_buffer_that_is_replaced_each_time_is_said_and_right() -> None:
    calls = both(lambda model, optimizer: [step(model, optimizer, seed) for seed in range(12)], Counting, warmup=1)
    assert calls.captures == 5
    assert calls.why_eager[0].startswith("where parameters or buffers lie differs each time")


def test_modes_of_torch_see_each_operator() -> None:
    model = network()
    calls = taped(model, warmup=0)
    with FlopCounterMode(display=False) as counter:
        model(batch(8, 0)).sum().backward()
    assert counter.get_total_flops() > 0
    assert calls.captures == 0


_EVENT = st.tuples(
    st.sampled_from([8, 4, 1]),
    st.sampled_from(["train", "eval", "no_grad"]),
    st.sampled_from(["backward", "skip", "twice", "later", "input"]),
    st.sampled_from(["step", "zero", "keep", "freeze"]),
)


@settings(max_examples=40)
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
