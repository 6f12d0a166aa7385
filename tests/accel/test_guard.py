"""The guard tells right from wrong, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard, snapshot, update_guard
from accel.guard.guard import Comparison, Tolerance
from accel.profiler.experiments.update_path import Paths
from accel.strategies.base import Exactness

CPU = torch.device("cpu")


class Net(nn.Module):
    """A small net with BatchNorm, dropout and a counter, as real ones have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 5)
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.history.append(self.calls)
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return {"logits": self.head(self.drop(hidden)), "hidden": hidden}


def checked(
    wrap: Callable[[Any], Any], exactness: Exactness = Exactness.REORDERED, model: nn.Module | None = None
) -> Comparison:
    """Record one real step, then compare the plain call with a wrapped one."""
    torch.manual_seed(0)
    model = model or Net()
    x = torch.randn(16, 3, 8, 8)
    recording = guard.record(model, CPU, (x,), {})
    out = model(x)
    recording.listen(out)
    (out["logits"].square().mean() + out["hidden"].mean()).backward()
    with guard.untouched(model, CPU):
        recording.before.restore()
        plain = guard.replay(model, model, recording)
        recording.before.restore()
        candidate = guard.replay(model, wrap(model), recording)
    return guard.compare(plain, candidate, exactness)


def scale_gradient(factor: float) -> Callable[[Any], Any]:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * factor

    return lambda call: lambda *args: {k: Scale.apply(v) for k, v in call(*args).items()}


def without_bias_gradient(call: Any) -> Any:
    def run(x: Tensor) -> Any:
        bias = call.head.bias
        out = call(x)
        return {**out, "logits": out["logits"] - bias + bias.detach()}

    return run


def test_the_plain_path_passes_at_every_level() -> None:
    for exactness in Exactness:
        finding = checked(lambda call: call, exactness)
        assert finding.problem == ""
        assert finding.output_error == 0


@pytest.mark.parametrize("exactness", [Exactness.EXACT, Exactness.REORDERED, Exactness.REDUCED])
@pytest.mark.parametrize("factor", [1.05, 0.95, -1.0, 0.0])
def test_a_scaled_gradient_is_found(factor: float, exactness: Exactness) -> None:
    assert "gradient" in checked(scale_gradient(factor), exactness).problem


@pytest.mark.parametrize("exactness", [Exactness.EXACT, Exactness.REORDERED, Exactness.REDUCED])
def test_a_dropped_bias_gradient_is_found(exactness: Exactness) -> None:
    finding = checked(without_bias_gradient, exactness)

    assert "head.bias" in finding.problem


def test_a_scaled_gradient_is_found_under_real_bfloat16_noise() -> None:
    def half(call: Any) -> Any:
        def run(x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out = call(x)
            return {k: v.float() for k, v in out.items()}

        return run

    assert checked(half, Exactness.REDUCED).problem == ""
    assert "off by" in checked(half, Exactness.REORDERED).problem
    assert "times as long" in checked(lambda call: scale_gradient(1.05)(half(call)), Exactness.REDUCED).problem


def test_reordered_sums_pass_and_are_measured() -> None:
    def last(call: Any) -> Any:
        return lambda x: call(x.to(memory_format=torch.channels_last))

    finding = checked(last)

    assert finding.problem == ""
    assert 0 <= finding.output_error < 1e-4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out: {**out, "logits": out["logits"].double()}, "its output is .* torch.float64"),
        (lambda out: {**out, "logits": out["logits"][:-1]}, r"its output is \(15, 5\)"),
        (lambda out: {"logits": out["logits"]}, "it returns 1 tensors, the plain path 2"),
        (lambda out: {**out, "logits": out["logits"] * math.nan}, "not finite, unlike the plain one"),
        (lambda out: {**out, "logits": out["logits"] + 0.01}, "its output is off by"),
        (lambda out: {**out, "logits": out["logits"].detach()}, "gradient for head.weight"),
    ],
)
def test_a_changed_output_is_found(change: Callable[[dict[str, Tensor]], Any], text: str) -> None:
    import re

    assert re.search(text, checked(lambda call: lambda x: change(call(x))).problem)


def test_a_replay_leaves_no_trace() -> None:
    model = Net()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]
    history = model.history

    x = torch.randn(4, 3, 8, 8)
    torch.set_rng_state(before)
    with guard.untouched(model, CPU):
        recording = guard.record(model, CPU, (x,), {})
        guard.replay(model, model, recording)

    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert (model.calls, history) == (0, [])
    assert model.history is history
    assert all(p.grad is None for p in model.parameters())


def test_replays_see_the_same_random_numbers() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.w * torch.rand(3) * x.mean()
            return {"logits": out, "hidden": out}

    assert checked(lambda call: call, Exactness.EXACT, Noisy()).problem == ""


def test_without_an_arriving_gradient_a_fixed_one_is_sent() -> None:
    model = Net()
    recording = guard.record(model, CPU, (torch.randn(4, 3, 8, 8),), {})
    replayed = guard.replay(model, model, recording)

    assert all(
        g is not None and g.abs().sum() > 0
        for n, g in zip(replayed.names, replayed.gradients, strict=True)
        if "head" in n
    )


def test_gradients_of_inputs_are_compared_too() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    recording = guard.record(model, CPU, (x,), {})
    good = guard.replay(model, model, recording)
    cut = guard.replay(model, lambda x: model(x.detach()) + 0 * x.sum(), recording)

    assert "input 0" in good.names
    assert "input 0" in guard.compare(good, cut, Exactness.REORDERED).problem


def test_tolerances_follow_exactness_and_dtype() -> None:
    exact, reordered, reduced = (Tolerance.of(e, torch.float32) for e in list(Exactness)[:3])

    assert (exact.output, exact.gradient, exact.scale) == (0, 0, 0)
    assert reordered.output < reduced.output < 0.1
    assert reordered.gradient < reduced.gradient <= 0.5
    assert reordered.scale < reduced.scale < 0.05
    assert Tolerance.of(Exactness.REORDERED, torch.float64).output < reordered.output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_dtype_makes_a_level_wider_than_the_one_below_it(dtype: torch.dtype) -> None:
    exact, reordered, reduced, float8 = (Tolerance.of(e, dtype) for e in list(Exactness)[:4])
    for name in ("output", "gradient", "scale"):
        limits = [getattr(tolerance, name) for tolerance in (exact, reordered, reduced, float8)]
        assert limits == sorted(limits)
        assert limits[-1] <= 0.5
    assert reduced.output <= 2**-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_sixteen_bits_another_order_passes_and_a_wrong_scale_does_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).to(dtype)
    x = torch.randn(64, 256).to(dtype)
    recording = guard.record(model, CPU, (x,), {})
    order = torch.randperm(256)

    def reordered(call: nn.Sequential) -> Callable[[Tensor], Tensor]:
        first, last = call[0], call[2]
        return lambda x: last(torch.tanh(nn.functional.linear(x[:, order], first.weight[:, order], first.bias)))

    plain = guard.replay(model, model, recording)
    assert not guard.compare(plain, guard.replay(model, reordered(model), recording), Exactness.REORDERED).problem
    scaled = guard.replay(model, lambda x: 1.5 * model(x), recording)
    assert "its output is off" in guard.compare(plain, scaled, Exactness.REORDERED).problem


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_the_update_of_a_fused_path_agrees_and_a_wrong_one_does_not(kind: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 3, 8, 8))["logits"].square().mean().backward()
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    state = [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]

    start, plain = update_guard.start_of(optimizer), update_guard.updated(optimizer)
    optimizer.param_groups[0]["fused"] = True
    fused = update_guard.updated(optimizer)
    optimizer.param_groups[0]["lr"] *= 1.05
    wrong = update_guard.updated(optimizer)

    assert update_guard.compare(plain, fused, start, Exactness.REORDERED).problem == ""
    assert "its update is off by" in update_guard.compare(plain, wrong, start, Exactness.REORDERED).problem
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    now = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True))


def test_a_shadow_step_runs_no_hooks() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    model(torch.ones(1, 2)).sum().backward()
    update_guard.updated(optimizer)

    assert calls == []


def test_generators_that_a_replay_does_not_draw_from_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may draw from them meanwhile, and must not draw the same numbers again."""
    written: list[str] = []
    real = snapshot.streams()
    watched = [each._replace(write=lambda state, name=each.name: written.append(name)) for each in real]
    monkeypatch.setattr(snapshot, "streams", lambda: watched)
    model = nn.Linear(2, 2)
    with guard.untouched(model, torch.device("cpu")):
        model(torch.ones(1, 2))
    assert not written
    with guard.untouched(model, torch.device("cpu")):
        torch.rand(1)

    assert written == ["torch"]


def test_frozen_parameters_are_left_out_of_an_update_that_no_path_makes() -> None:
    """With a gradient they would be the first to have no momentum, which SGD's fused path does not bear."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(6, 3)).square().sum().backward()
    optimizer.step()
    start, plain = update_guard.start_of(optimizer), update_guard.updated(optimizer)
    paths = Paths()
    paths.switch([optimizer], fused=True)
    fused = update_guard.updated(optimizer)
    paths.restore()
    finding = update_guard.compare(plain, fused, start, Exactness.REORDERED)
    assert (finding.problem, finding.unsure) == ("", "")
    assert [torch.equal(before, after) for before, after in zip(start, plain, strict=True)] == [True] * 2 + [False] * 2


class Shifts(Net):
    """A net that writes to its input."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x.sub_(x.mean())
        return super().forward(x)


def test_a_model_that_writes_to_its_arguments_is_not_compared() -> None:
    finding = checked(lambda call: call, model=Shifts())
    assert not finding.problem and "writes to its arguments" in finding.unsure
    plain, candidate = guard.Replayed([], [], []), guard.Replayed([], [], [], writes=True)
    written = guard.compare(plain, candidate, Exactness.REORDERED)
    assert written.problem == "it writes to its arguments, unlike the plain path"


@pytest.mark.parametrize("takes", [lambda batch: batch.pop("y"), lambda batch: batch.update(y=batch["y"] + 1)])
def test_a_call_that_takes_or_exchanges_entries_has_written_to_its_arguments(takes: Callable[[Any], Any]) -> None:
    model = nn.Linear(2, 2)
    recording = guard.record(model, CPU, ({"x": torch.ones(1, 2), "y": torch.ones(2)},), {})
    assert guard.replay(model, lambda batch: (model(batch["x"]), takes(batch))[0], recording).writes
    assert not guard.replay(model, lambda batch: model(batch["x"]), recording).writes
