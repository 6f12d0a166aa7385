"""Clipping that waits for the fused update: the loop gets what it gets without, also where it looks in between."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.trace_rules
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW

import accel
from accel import entry
from accel.strategies.fused_optimizer import FusedOptimizer
from accel.strategies.late_clip import FORGETS_CHANGES, LateClipping
from tests.accel.loops import advance, make_loader, training

pytestmark = pytest.mark.skipif(not FORGETS_CHANGES, reason="Python 3.13 and later: a class may not change each step")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: AdamW(p, 0.05, weight_decay=0.1, fused=True),
    "Adam": lambda p: Adam(p, 0.05, weight_decay=0.1, amsgrad=True, maximize=True, fused=True),
    "SGD": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True),
    "SGD without momentum": lambda p: SGD(p, 0.05, fused=True),
    "Adagrad": lambda p: Adagrad(p, 0.05, fused=True),
}
STEPS = 5


class Loop:
    """A model of two layers, its optimizer, and gradients of a norm of about 3."""

    def __init__(
        self, make: Callable[[Any], Any] = OPTIMIZERS["AdamW"], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device, dtype)
        self.parameters = list(self.model.parameters())
        self.optimizer = make(self.parameters)
        self.x, self.y = torch.randn(8, 6).to(device, dtype), torch.randn(8, 3).to(device, dtype)
        self.norms: list[Tensor] = []
        self.seen: list[Any] = []
        """What a loop looks at on its way, and gradients after each step."""

    def backward(self) -> None:
        (3 * (self.model(self.x) - self.y).square().sum()).backward()

    def clip(self, max_norm: float = 1.0, **options: Any) -> None:
        self.norms.append(clip_grad_norm_(self.parameters, max_norm, **options))

    def copies(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]

    def run(self, between: Callable[[Loop], Any] = lambda loop: None) -> Loop:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.backward()
            self.clip()
            between(self)
            self.optimizer.step()
            self.seen.append(self.copies())
        return self

    def results(self) -> list[Any]:
        state = self.optimizer.state_dict()
        moments = [each for own in state["state"].values() for each in own.values()]
        return [*(p.detach() for p in self.parameters), *moments, *self.norms, self.seen, state["param_groups"]]


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many gradients each multiplication had, while clipping can wait."""
    counts: list[int] = []
    multiply = torch._foreach_mul_

    def counted(tensors: list[Tensor], factor: Any) -> None:
        if len(tensors) > 1:  # the one is a probe of who holds it
            counts.append(len(tensors))
        multiply(tensors, factor)

    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # made once, of torch's own function
    monkeypatch.setattr(torch, "_foreach_mul_", counted)
    yield counts
    assert "grad" not in vars(nn.Parameter)


def late(loop: Loop, act: Callable[[Loop], Any]) -> Loop:
    """Act while the clippings of a loop's optimizer can wait."""
    clipping = LateClipping()
    clipping.attach([loop.optimizer])
    try:
        act(loop)
    finally:
        clipping.detach()
    return loop


def assert_same(one: Loop, other: Loop, **tolerance: float) -> None:
    torch.testing.assert_close(one.results(), other.results(), **{"rtol": 0, "atol": 0, **tolerance})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_divides_and_leaves_clipped_gradients(name: str, multiplied: list[int]) -> None:
    plain = Loop(OPTIMIZERS[name]).run()
    multiplied.clear()
    waited = late(Loop(OPTIMIZERS[name]), Loop.run)
    assert multiplied == []
    assert all(norm > 2 for norm in plain.norms)
    assert_same(plain, waited, rtol=2e-5, atol=2e-6)
    assert torch.equal(plain.norms[0], waited.norms[0])
    assert not hasattr(waited.optimizer, "grad_scale")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_nothing_waits_for_the_device(name: str, multiplied: list[int]) -> None:
    plain = Loop(OPTIMIZERS[name], device="cuda").run()
    loop = Loop(OPTIMIZERS[name], device="cuda")
    loop.backward()
    multiplied.clear()

    def run(loop: Loop) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    late(loop, run)
    assert multiplied == []
    assert_same(plain, loop, rtol=2e-5, atol=2e-6)


def _read(loop: Loop) -> None:
    loop.seen.append(loop.copies())


def _noise(loop: Loop) -> None:
    for p in loop.parameters:
        assert p.grad is not None
        p.grad += 0.1


def _replace(loop: Loop) -> None:
    loop.parameters[0].grad = torch.full((16, 6), 0.3)


def _drop(loop: Loop) -> None:
    del loop.parameters[0].grad
    assert loop.parameters[0].grad is None


def _change_the_norm(loop: Loop) -> None:
    loop.norms[-1].mul_(7)
    _read(loop)


BETWEEN: dict[str, Callable[[Loop], Any]] = {
    "it reads them": _read,
    "it adds noise": _noise,
    "it sets one": _replace,
    "it drops one": _drop,
    "it drops all": lambda loop: loop.optimizer.zero_grad(),
    "another backward pass": Loop.backward,
    "it clips again": Loop.clip,
    "it clips by value": lambda loop: nn.utils.clip_grad_value_(loop.parameters, 0.01),
    "it changes the norm, then reads": _change_the_norm,
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_a_loop_that_looks_in_between_gets_the_same_bits(between: Any, multiplied: list[int]) -> None:
    plain = Loop().run(between)
    if between is not Loop.clip:  # the second of which waits
        assert_same(plain, late(Loop(), lambda loop: loop.run(between)))
    else:
        assert_same(plain, late(Loop(), lambda loop: loop.run(between)), rtol=2e-5, atol=2e-6)
    assert multiplied


def test_hooks_of_the_loop_see_clipped_gradients(multiplied: list[int]) -> None:
    def hooked(loop: Loop) -> None:
        loop.optimizer.register_step_pre_hook(lambda *_: _read(loop))
        loop.run()

    plain, before, after = Loop(), Loop(), Loop()
    hooked(plain)
    before.optimizer.register_step_pre_hook(lambda *_: _read(before))
    assert_same(plain, late(before, Loop.run))
    assert_same(plain, late(after, hooked))
    assert multiplied


def _in_a_list(loop: Loop) -> Any:
    return [p.grad for p in loop.parameters]


def _as_views(loop: Loop) -> Any:
    return [p.grad.view(-1) for p in loop.parameters if p.grad is not None]


def _detached(loop: Loop) -> Any:
    return [p.grad.detach() for p in loop.parameters if p.grad is not None]


@pytest.mark.parametrize("hold", [_in_a_list, _as_views, _detached])
def test_gradients_that_somebody_else_holds_are_clipped_at_once(hold: Any, multiplied: list[int]) -> None:
    def run(loop: Loop) -> None:
        loop.backward()
        held = hold(loop)
        loop.clip()
        loop.seen.append([each.clone() for each in held])

    plain = Loop()
    run(plain)
    assert_same(plain, late(Loop(), run))
    assert multiplied == [4, 4]


def _of_a_part(loop: Loop) -> None:
    clip_grad_norm_(loop.parameters[:2], 1.0)


def _one_twice(loop: Loop) -> None:
    clip_grad_norm_([*loop.parameters, loop.parameters[0]], 1.0)


CALLS: dict[str, tuple[torch.dtype, Callable[[Loop], Any]]] = {
    "some of the parameters": (torch.float32, _of_a_part),
    "one of them twice": (torch.float32, _one_twice),
    "a norm of zero": (torch.float32, lambda loop: loop.clip(0.0)),
    "a negative norm": (torch.float32, lambda loop: loop.clip(-1.0)),
    "float64": (torch.float64, Loop.clip),
}


@pytest.mark.parametrize(("dtype", "clip"), CALLS.values(), ids=CALLS)
def test_what_the_update_cannot_do_is_done_at_once(dtype: Any, clip: Any, multiplied: list[int]) -> None:
    def run(loop: Loop) -> None:
        loop.backward()
        multiplied.clear()
        clip(loop)
        assert multiplied
        loop.optimizer.step()

    plain = Loop(dtype=dtype)
    run(plain)
    assert_same(plain, late(Loop(dtype=dtype), run))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite_does_what_it_does(bad: float, norm_type: float) -> None:
    def run(loop: Loop) -> None:
        loop.backward()
        assert loop.parameters[0].grad is not None
        loop.parameters[0].grad[0, 0] = bad
        loop.clip(norm_type=norm_type)
        loop.optimizer.step()
        loop.seen.append(loop.copies())

    plain = Loop()
    run(plain)
    torch.testing.assert_close(plain.results(), late(Loop(), run).results(), equal_nan=True)


def test_a_step_that_raises_leaves_no_scale_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    def run(loop: Loop) -> None:
        loop.backward()
        loop.clip()
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["torch.optim.adam"], "adam", fails)  # AdamW's, too
            with pytest.raises(RuntimeError, match="no memory"):
                loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()
        loop.seen.append(loop.copies())

    plain = Loop()
    run(plain)
    assert_same(plain, late(Loop(), run))


def test_a_closure_that_clips_is_clipped() -> None:
    def run(loop: Loop) -> None:
        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            loop.backward()
            loop.clip()
            return loop.norms[-1]

        for _ in range(STEPS):
            loop.optimizer.step(closure)

    plain = Loop()
    run(plain)
    assert_same(plain, late(Loop(), run))


def test_a_compiled_step_takes_torchs_own_function() -> None:
    def run(loop: Loop) -> None:
        loop.backward()
        clip = torch.compile(lambda: clip_grad_norm_(loop.parameters, 1.0), backend="eager", fullgraph=True)
        loop.norms.append(clip())
        loop.optimizer.step()

    plain = Loop()
    run(plain)
    assert_same(plain, late(Loop(), run))


@pytest.mark.parametrize(("ranks", "at_once"), [(1, []), (2, [4])])
def test_with_several_ranks_it_stays_off_since_one_may_look_alone(
    ranks: int, at_once: list[int], multiplied: list[int]
) -> None:
    loop = Loop(lambda p: AdamW(p, 0.05))
    strategy, run = FusedOptimizer(), SimpleNamespace(optimizers=[loop.optimizer], world_size=ranks)
    strategy.enable(run, "fused")  # type: ignore[arg-type]
    loop.backward()
    loop.clip()
    loop.optimizer.step()
    strategy.disable(run)  # type: ignore[arg-type]
    assert multiplied == at_once


def test_the_strategy_switches_it_on_and_off(multiplied: list[int]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer: Any = AdamW(model.parameters(), 0.01)
    plan = accel.Plan(
        fingerprint=accel.search.plan.fingerprint(model), model="Sequential", strategies={"fused_optimizer": "fused"}
    )
    own = torch.nn.utils.clip_grad._clip_grads_with_norm_
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, plan=plan)
    advance(training(model, loader, optimizer), 60)
    assert entry.MODELS[model].session.active == {"fused_optimizer": "fused"}
    model(torch.randn(4, 6)).sum().backward()
    multiplied.clear()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert multiplied == []
    assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.1, rel=1e-4)
    accel.undo(model)
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is own
