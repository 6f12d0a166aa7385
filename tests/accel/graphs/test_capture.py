"""A captured step trains as the eager one, bit for bit, whatever changes from call to call."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from accel.amp import DynamicLossScale, decorate
from accel.graphs import CapturedStep, CaptureError, capture
from tests.accel.graphs.tape import TapeRecorder
from tests.sampling import examples

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def taped(step: CapturedStep) -> CapturedStep:
    step._recorder = TapeRecorder()
    return step


class TensorSGD(torch.optim.Optimizer):
    """Reads its learning rate on the device, as capturable optimizers do."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


class Training:
    """A model with an optimizer, and steps of several kinds."""

    def __init__(self, lr: Any = 0.1) -> None:
        self.model = network()
        self.optimizer: torch.optim.Optimizer
        if isinstance(lr, Tensor):
            self.optimizer = TensorSGD(self.model.parameters(), lr)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, foreach=False, momentum=0.9)

    def whole(self, x: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        return loss

    def backward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = self.model(x)
        loss = nn.functional.cross_entropy(out, target)
        loss.backward()
        return {"loss": loss, "out": out}

    def state(self) -> list[Tensor]:
        buffers = [each["momentum_buffer"] for each in self.optimizer.state.values() if "momentum_buffer" in each]
        return [*map(torch.clone, self.model.state_dict().values()), *map(torch.clone, buffers), torch.get_rng_state()]


Loop = Callable[[Training, Callable[..., Any]], list[Any]]


def both(loop: Loop, kind: str = "whole", lr: Callable[[], Any] = lambda: 0.1, **options: Any) -> CapturedStep:
    """Run a loop eagerly and captured, compare all bits, and return the captured step."""
    eager = Training(lr())
    torch.manual_seed(1)
    expected = loop(eager, getattr(eager, kind)), eager.state()
    training = Training(lr())
    step = taped(capture(getattr(training, kind), **options))
    torch.manual_seed(1)
    outcome = loop(training, step), training.state()
    flat, known = (torch.utils._pytree.tree_leaves(each) for each in (outcome, expected))
    assert len(flat) == len(known)
    for one, other in zip(flat, known, strict=True):
        assert torch.equal(one, other)
    return step


def loop_of(*parts: int | Callable[[Training], object]) -> Loop:
    """Return a loop of so many steps, with changes between them."""

    def loop(training: Training, run: Callable[..., Any]) -> list[Any]:
        losses = list[Any]()
        for part in parts:
            if isinstance(part, int):
                losses += [run(*batch(8, len(losses) + number)) for number in range(part)]
            else:
                part(training)
        return losses

    return loop


def test_what_it_returns_may_be_kept_and_has_no_gradient() -> None:
    training = Training()
    step = taped(capture(training.whole, warmup=1))
    losses = [step(*batch(8, seed)) for seed in range(8)]
    assert len({float(loss) for loss in losses}) == 8
    assert not any(loss.requires_grad for loss in losses)


def test_other_sizes_have_graphs_of_their_own_and_the_oldest_goes() -> None:
    def loop(training: Training, run: Callable[..., Any]) -> list[Any]:
        return [run(*batch(rows, seed)) for seed in range(6) for rows in (8, 5, 3) for _ in range(2)]

    step = both(loop, warmup=1, most=2)
    assert step.captures > 3
    assert len(step._graphs) == 2
    recorder = step._recorder
    assert isinstance(recorder, TapeRecorder)
    assert sum(graph.resets for graph in recorder.graphs) == step.captures - 2
    step.reset()
    assert all(graph.resets == 1 for graph in recorder.graphs)


def test_one_row_is_not_spread_over_a_batch() -> None:
    step = taped(capture(lambda x: x * 2, warmup=0))
    assert torch.equal(step(torch.ones(4, 3)), torch.full((4, 3), 2.0))
    assert torch.equal(step(torch.ones(1, 3)), torch.full((1, 3), 2.0))
    assert torch.equal(step(torch.ones(3, 4).T), torch.full((4, 3), 2.0))
    assert torch.equal(step(torch.ones(4, 3).double()), torch.full((4, 3), 2.0, dtype=torch.double))
    assert step.captures == 4


def test_modes_of_the_model_and_of_torch() -> None:
    def loop(training: Training, run: Callable[..., Any]) -> list[Any]:
        outcomes = []
        for seed in range(12):
            training.model.train(seed % 2 == 0)
            with torch.autocast("cpu", torch.bfloat16, enabled=seed % 3 == 0):
                outcomes.append(run(*batch(8, seed)))
        return outcomes

    assert both(loop, warmup=0).captures >= 4


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_that_others_use(micro: int, set_to_none: bool) -> None:
    def loop(training: Training, run: Callable[..., Any]) -> list[Any]:
        outcomes = []
        for number in range(24):
            outcomes.append(run(*batch(8, number)))
            if number % micro == micro - 1:
                nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=set_to_none)
        return outcomes

    step = both(loop, "backward", warmup=2)
    assert 1 <= step.captures <= 3
    assert step.replays >= 8


def scheduled(training: Training, run: Callable[..., Any]) -> list[Any]:
    scheduler = StepLR(training.optimizer, 5, 0.5)
    losses = []
    for seed in range(20):
        losses.append(run(*batch(8, seed)))
        scheduler.step()
    return losses


def test_a_learning_rate_that_is_a_number_takes_a_graph_for_each_value() -> None:
    assert both(scheduled, warmup=1).captures >= 3


def test_a_learning_rate_that_is_a_tensor_follows_its_scheduler() -> None:
    assert both(scheduled, lr=lambda: torch.tensor(0.1)).captures == 1


@pytest.mark.parametrize("passes_through", [False, True])
def test_gradients_of_others_are_left_to_them(passes_through: bool) -> None:
    """A GAN's: the other model's gradients are made outside, before the captured step, and used after it."""

    def loop(captured: bool) -> tuple[list[Tensor], Any]:
        training, other = Training(), Training()

        def own(x: Tensor, target: Tensor) -> Tensor:
            training.optimizer.zero_grad()
            out = training.model(x)
            loss = nn.functional.cross_entropy(out, target)
            if passes_through:
                loss = loss + nn.functional.cross_entropy(other.model(x + out.sum()), target)
            loss.backward()
            training.optimizer.step()
            return loss

        every = [training.model, other.model], [training.optimizer, other.optimizer]
        run = taped(capture(own, modules=every[0], optimizers=every[1], warmup=2)) if captured else own
        torch.manual_seed(1)
        losses = []
        for seed in range(14):
            other.optimizer.zero_grad()
            other.backward(*batch(8, seed))
            losses.append(run(*batch(8, 100 + seed)).detach())
            other.optimizer.step()
        return [*losses, *training.state(), *other.state()], run

    (expected, _), (outcome, _) = loop(captured=False), loop(captured=True)
    assert all(torch.equal(one, two) for one, two in zip(outcome, expected, strict=True))


@pytest.mark.parametrize("name", ["4.weight", "1.running_mean"])
def test_a_parameter_or_buffer_of_another_object_is_seen(name: str) -> None:
    def change(training: Training) -> None:
        owner, _, attribute = name.rpartition(".")
        module = training.model.get_submodule(owner)
        old = getattr(module, attribute)
        new = old.detach().clone() * 0.5
        setattr(module, attribute, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)

    assert both(loop_of(8, change, 4), warmup=1).captures in (2, 3)  # a new parameter has no gradient at first


class Pair(NamedTuple):
    x: Tensor
    rest: dict[str, Any]


def test_arguments_of_many_shapes() -> None:
    def function(pair: Pair, *more: Any, scale: float = 1.0, words: str = "a") -> dict[str, Any]:
        out = pair.x * scale + pair.rest["y"][0]
        return {"out": out if words == "a" else -out, "count": (len(more), None)}

    step = taped(capture(function, warmup=0))
    for _ in range(2):
        for scale in (1.0, 2.0, True):
            for words in ("a", "b"):
                x, y = torch.randn(3), torch.randn(3)
                result = step(Pair(x, {"y": [y]}), 1, "z", scale=scale, words=words)
                assert torch.equal(result["out"], (x * scale + y) * (1 if words == "a" else -1))
                assert result["count"] == (2, None)
    assert step.captures == 6


def test_what_it_does_not_take() -> None:
    step = taped(capture(lambda x: x, warmup=0))
    with pytest.raises(TypeError, match=r"arguments must be tensors, numbers, words, None.* Found: object"):
        step(object())
    with pytest.raises(TypeError, match="inputs must not require gradients"):
        step(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"what a step returns must be .* Found: set"):
        taped(capture(lambda x: {1}, warmup=0))(torch.ones(2))
    for wrong in (None, "step", nn.Linear):
        with pytest.raises(TypeError, match=r"capture: step must be a model or a function that makes a step. Found: "):
            capture(wrong)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"most 1 or more. Found: 3 and 0"):
        capture(lambda x: x, most=0)


def waiting(training: Training) -> Callable[..., Any]:
    def step(x: Tensor, target: Tensor) -> Tensor:
        loss = training.whole(x, target)
        return loss * 2 if loss.item() > 1e6 else loss

    return step


def test_a_step_that_waits_goes_on_eagerly_and_trains_the_same() -> None:
    eager, training = Training(), Training()
    torch.manual_seed(1)
    expected = [eager.whole(*batch(8, seed)) for seed in range(8)], eager.state()
    step = taped(capture(waiting(training), modules=[training.model], optimizers=[training.optimizer], warmup=2))
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning, match="runs eagerly: it could not be captured: RuntimeError: operation not perm"):
        losses = [step(*batch(8, seed)) for seed in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(losses, expected[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(training.state(), expected[1], strict=True))
    assert step.captures == 0
    assert len(step.why_eager) == 1


def test_strictly_it_raises() -> None:
    training = Training()
    step = taped(capture(waiting(training), warmup=0, strict=True))
    with pytest.raises(CaptureError, match=r"it could not be captured: RuntimeError: operation"):
        step(*batch(8, 0))


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_a_time_limit_within_a_capture_reaches_the_loop(error: type[BaseException]) -> None:
    def handle(signum: int, frame: Any) -> None:
        raise error("out of time")

    def trained(captured: bool) -> tuple[list[Any], list[Tensor]]:
        training, seen, at = Training(), list[Any](), [0]

        def step(x: Tensor, target: Tensor) -> Tensor:
            if at[0] == 3:
                at[0] = 0
                signal.raise_signal(signal.SIGUSR1)
            return training.whole(x, target)

        run: Any = step
        if captured:
            run = taped(capture(step, modules=[training.model], optimizers=[training.optimizer], warmup=3))
        torch.manual_seed(1)
        for number in range(10):
            at[0] = number
            try:
                seen.append(run(*batch(8, number)).tolist())
            except (TimeoutError, KeyboardInterrupt) as caught:
                seen.append((type(caught), caught.args))
        assert not captured or run.captures == 1
        return seen, training.state()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        (seen, state), (expected, plain) = trained(True), trained(False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == expected and (error, ("out of time",)) in seen
    assert all(map(torch.equal, state, plain))


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ((torch.ones(1, 4),), {"scale": 2}, r"args\[0\]: float32 \[8, 4\] on cpu → float32 \[1, 4\] on cpu"),
        ((torch.ones(8, 4).double(),), {"scale": 2}, r"args\[0\]: float32 \[8, 4\] on cpu → float64 \[8, 4\] on cpu"),
        ((torch.ones(8, 4),), {"scale": 3}, r"kwargs\['scale'\]: 2 → 3"),
        ((torch.ones(8, 4), 1), {}, r"args: tuple of 1 → tuple of 2"),
    ],
)
def test_arguments_of_another_form_are_refused_where_it_is_fixed(args: Any, kwargs: Any, where: str) -> None:
    """torch would broadcast one row over the graph's eight, without a word."""
    step = taped(capture(lambda x, scale=1: x * scale, warmup=1, fixed=True))
    for _ in range(3):
        step(torch.ones(8, 4), scale=2)
    with pytest.raises(ValueError, match=rf"must be of the form of the first call's. Found at {where}"):
        step(*args, **kwargs)
    assert torch.equal(step(torch.ones(8, 4), scale=2), torch.full((8, 4), 2.0))


def test_inputs_that_never_repeat_are_said() -> None:
    step = taped(capture(lambda x: x + 1, warmup=0, most=2))
    for rows in range(1, 8):
        step(torch.ones(rows))
    differ = r"as at args\[0\]: float32 \[1\] on cpu → float32 \[8\] on cpu"
    with pytest.warns(RuntimeWarning, match=rf"8 graphs were captured, and 2 are kept.*{differ}.*Buckets"):
        step(torch.ones(8))


def test_without_a_gpu_it_runs_as_it_is() -> None:
    training, eager = Training(), Training()
    step = capture(training.whole)
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning, match="must be on one CUDA device. Found: the CPU"):
        losses = [step(*batch(8, seed)) for seed in range(6)]
    torch.manual_seed(1)
    assert [eager.whole(*batch(8, seed)) for seed in range(6)] == losses
    assert not losses[-1].requires_grad
    assert step.why_eager


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_state_that_was_saved_within_the_run_and_loaded_is_used(part: str) -> None:
    """That of a model is loaded in place, that of an optimizer is not."""
    kept: list[Any] = []

    def save(training: Training) -> None:
        kept.append(copy.deepcopy(getattr(training, part).state_dict()))

    def load(training: Training) -> None:
        getattr(training, part).load_state_dict(kept.pop())

    both(loop_of(8, save, 4, load, 6), warmup=1)


def test_options_of_a_group_that_have_no_hash() -> None:
    def change(training: Training) -> None:
        training.optimizer.param_groups[0] |= {"notes": {"a": [1]}, "pair": (torch.tensor(1.0), [2])}

    assert both(loop_of(change, 8), warmup=1).captures == 1


@pytest.mark.parametrize("change", [lambda model: model[1].eval(), lambda model: model[0].requires_grad_(False)])
def test_a_part_of_the_model_that_is_frozen(change: Callable[[Any], Any]) -> None:
    def undo(training: Training) -> None:
        training.model.train().requires_grad_(True)

    both(loop_of(6, lambda training: change(training.model), 6, undo, 6), warmup=1)


_EVENT = st.tuples(
    st.sampled_from([8, 4, 1]), st.booleans(), st.sampled_from(["none", "zero", "keep"]), st.sampled_from([1.0, 0.5])
)


@settings(max_examples=examples(25))
@given(st.lists(_EVENT, min_size=4, max_size=14), st.integers(0, 2))
def test_any_order_of_changes(events: list[tuple[int, bool, str, float]], warmup: int) -> None:
    def loop(training: Training, run: Callable[..., Any]) -> list[Any]:
        outcomes = []
        for seed, (rows, trains, clear, factor) in enumerate(events):
            training.model.train(trains and rows > 1)
            outcomes.append(run(*batch(rows, seed)))
            if clear != "keep":
                training.optimizer.param_groups[0]["lr"] = 0.1 * factor
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=clear == "none")
        return outcomes

    both(loop, "backward", warmup=warmup, most=3)


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_loss_scale_learns_of_overflows_in_replays() -> None:
    """The scale, what it has counted and the skipped updates are the device's: replays go on with them."""

    def outcome(captured: bool) -> tuple[list[Any], int]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scale = DynamicLossScale(init_scale=2.0**10, growth_interval=5)
        decorate(model, optimizer, dtype=torch.float16, loss_scale=scale)

        step = whole_step(model, optimizer)
        run: Any = taped(capture(step)) if captured else step
        seen: list[Any] = []
        torch.manual_seed(1)
        for number in range(30):
            x, target = batch(8, number)
            run(x * torch.inf if number in (2, 9, 10, 20) else x, target)
            seen.append((scale.state_dict(), *map(torch.clone, model.state_dict().values())))
        return seen, run.replays if captured else 0

    expected, _ = outcome(False)
    seen, replays = outcome(True)
    assert replays >= 20
    assert len({each[0]["scale"] for each in expected}) == 3
    for one, other in zip(seen, expected, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(one[1:], other[1:], strict=True))


class _Sends(TensorSGD):
    """Reads all its numbers on the device, and sends them when it is asked to."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.rate = torch.tensor(lr)

    def refresh(self) -> None:
        self.rate.fill_(self.param_groups[0]["lr"])

    def frozen_options(self, group: dict[str, Any]) -> tuple[Any, ...] | None:
        return ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not torch.utils._python_dispatch._get_current_dispatch_mode():
            self.refresh()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.rate * parameter.grad)


def test_numbers_that_are_sent_take_no_graphs_of_their_own() -> None:
    def outcome(captured: bool) -> tuple[list[Tensor], Any]:
        model = network()
        optimizer = _Sends(model.parameters(), 0.1)

        step = whole_step(model, optimizer)
        run: Any = taped(capture(step)) if captured else step
        torch.manual_seed(1)
        for number in range(16):
            optimizer.param_groups[0]["lr"] = (0.1, 0.02, 0.3)[number % 3]  # as a cyclic schedule does
            run(*batch(8, number))
        return list(map(torch.clone, model.state_dict().values())), run

    expected, _ = outcome(False)
    seen, run = outcome(True)
    assert (run.captures, run.why_eager) == (1, [])
    assert run.replays >= 10
    for one, other in zip(seen, expected, strict=True):
        assert torch.equal(one, other)
