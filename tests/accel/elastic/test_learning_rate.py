"""LearningRateScaler: the step runs at other values, bit for bit, and nobody else sees them."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel import amp
from accel.elastic.learning_rate import LearningRateScaler
from accel.elastic.scaling_rules import AdaScale, BatchScale, Linear, Multipliers, Rule, Sqrt
from accel.errors import InvalidArgument
from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD

Make = Callable[[list[nn.Parameter]], Optimizer]

MAKERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "SGD tensor lr": lambda p: torch.optim.SGD(p, torch.tensor(0.1)),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "Adam foreach amsgrad": lambda p: torch.optim.Adam(p, 0.1, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "AdamW tensor lr fused": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), fused=True),
    "Adam tensor betas": lambda p: torch.optim.Adam(
        p, torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
    "FusedSGD": lambda p: FusedSGD(p, 0.1, momentum=0.9),
    "FusedAdam": lambda p: FusedAdam(p, 0.1),
    "FusedAdamW": lambda p: FusedAdamW(p, 0.1),
    "FusedLAMB": lambda p: FusedLAMB(p, 0.1),
    "FusedLARS": lambda p: FusedLARS(p, 0.1),
}
# Scales of the steps: none, small, beyond 1 / (1 − β), beyond the noise, back again.
BATCHES = [BatchScale(scale * 64, 64, noise=5000.0) for scale in (1, 1.5, 4, 32, 100, 2, 1)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((3, 2), (5,), ())]


def gradients(params: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw)


def by_hand(optimizer: Optimizer, by: Multipliers) -> Callable[[], None]:
    """Set the multiplied values, as a user would, and return what sets the old ones again."""
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * by.lr
        if "betas" in group:
            betas = [1 - by.averages * (1 - beta) for beta in group["betas"]]
            if by.averages != 1:
                group["betas"] = tuple(b.clamp(min=0) if isinstance(b, Tensor) else max(0.0, b) for b in betas)
        if isinstance(optimizer, torch.optim.RMSprop) and by.averages != 1:
            group["alpha"] = max(0.0, 1 - by.averages * (1 - group["alpha"]))
        if "eps" in group:
            group["eps"] = group["eps"] * by.eps

    def put_back() -> None:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update({name: old[name] for name in ("lr", "betas", "eps", "alpha") if name in old})

    return put_back


def snapshot(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def assert_same_objects(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    for now, old in zip(snapshot(optimizer), before, strict=True):
        assert now.keys() == old.keys()
        assert all(now[name] is old[name] for name in ("lr", "betas", "eps", "alpha", "momentum") if name in old)


# What the step computes


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rule", [Sqrt(), Linear(), AdaScale()], ids=repr)
def test_twenty_steps_equal_those_with_values_set_by_hand(name: str, rule: Any) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, other = MAKERS[name](ours), MAKERS[name](theirs)
    scaler = LearningRateScaler(optimizer, rule)
    before = snapshot(optimizer)
    values = copy.deepcopy(before)
    for step in range(20):
        batch = BATCHES[step % len(BATCHES)]
        scaler.update(batch)
        for p in (ours, theirs):
            gradients(p, step)
        optimizer.step()
        put_back = by_hand(other, rule.multipliers(batch))
        other.step()
        put_back()
        assert_same_objects(optimizer, before)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert repr(values) == repr(before)
    assert repr(optimizer.state_dict()) == repr(other.state_dict())
    assert not any(torch.equal(a, b) for a, b in zip(ours, parameters(), strict=True))
    assert scaler.steps == 20


def test_schedulers_see_the_base_rate() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params, 0.1)
    plain = torch.optim.Adam(parameters(), 0.1)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, 0.5, total_steps=12) for each in (optimizer, plain)]
    scaler = LearningRateScaler(optimizer)
    for step in range(10):
        scaler.update(BATCHES[step % len(BATCHES)])
        gradients(params, step)
        optimizer.step()
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert snapshot(optimizer) == snapshot(plain)  # momentum is cycled too: betas


# Who else sees it


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise RuntimeError("broken")


@pytest.mark.parametrize("restored_by", ["state", "update", "close"])
def test_after_a_step_that_raises_the_groups_are_restored(restored_by: str) -> None:
    params = parameters()
    optimizer = Broken(params, 0.1)
    scaler = LearningRateScaler(optimizer)
    scaler.update(BatchScale(256, 64, gain=3.0))
    gradients(params, 0)
    before = snapshot(optimizer)
    for _ in range(2):  # the next step begins with the user's values, too
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step()
    if restored_by == "state":
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    elif restored_by == "update":
        scaler.update(BatchScale(256, 64, gain=2.0))
    else:
        scaler.close()
    assert_same_objects(optimizer, before)


def test_a_closure_that_raises() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params, 0.1)
    scaler = LearningRateScaler(optimizer)
    scaler.update(BatchScale(256, 64))
    before = snapshot(optimizer)

    def closure(fails: bool) -> float:
        gradients(params, 0)
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
        if fails:
            raise KeyboardInterrupt
        return 3.0

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lambda: closure(True))
    assert scaler.steps == 0
    assert optimizer.step(lambda: closure(False)) == 3.0
    assert_same_objects(optimizer, before)
    assert scaler.steps == 1


def test_skipped_steps_of_a_grad_scaler_do_not_count() -> None:
    for name in ("SGD", "AdamW fused"):
        ours, theirs = parameters(), parameters()
        optimizer, other = MAKERS[name](ours), MAKERS[name](theirs)
        scaler = LearningRateScaler(optimizer, Linear())
        scaler.update(BatchScale(128, 64))
        other.param_groups[0]["lr"] *= 2.0
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        before = snapshot(optimizer)
        for step in range(3):
            for grad_scaler, params, each in zip(scalers, (ours, theirs), (optimizer, other), strict=True):
                loss = sum((p * (step + 1.0)).sum() for p in params)
                grad_scaler.scale(loss).backward()  # type: ignore[union-attr]
                if step == 1:
                    params[0].grad.fill_(math.inf)  # type: ignore[union-attr]
                grad_scaler.step(each)
                grad_scaler.update()
                each.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert_same_objects(optimizer, before)
        # A fused step is always called; it leaves out the update on the device.
        assert scaler.steps == (3 if "fused" in name else 2)


def test_master_weights_of_mixed_precision() -> None:
    steps: list[list[Tensor]] = []
    for scaled in (True, False):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(4, 3)
        optimizer: Optimizer = torch.optim.SGD(model.parameters(), 0.1 if scaled else 0.4, momentum=0.9)
        scaler = LearningRateScaler(optimizer, Linear())  # its hook runs before that of the masters
        if scaled:
            scaler.update(BatchScale(256, 64))
        model, optimizer = amp.decorate(model, optimizer, level="O2", dtype=torch.bfloat16)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_what_a_step_writes_to_its_rate_is_dropped() -> None:
    class Writing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0] |= {"seen": self.param_groups[0]["lr"], "lr": -1.0}

    optimizer = Writing(parameters(), 0.5)
    scaler = LearningRateScaler(optimizer, Linear())
    scaler.update(BatchScale(256, 64))
    optimizer.step()
    assert (optimizer.param_groups[0]["seen"], optimizer.param_groups[0]["lr"]) == (2.0, 0.5)


def test_a_class_that_calls_its_base_counts_once() -> None:
    torch.optim.SGD(parameters(), 0.1)  # from now on SGD.step runs hooks, too

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    w = nn.Parameter(torch.zeros(1))
    optimizer = Own([w], 1.0)
    scaler = LearningRateScaler(optimizer)
    w.grad = torch.ones(1)
    optimizer.step()
    scaler.update(BatchScale(256, 64, gain=3.0))
    optimizer.step()
    assert (w.item(), scaler.steps, scaler.progress) == (-4.0, 2, 4.0)


def test_copies_and_pickles_of_the_optimizer_are_plain() -> None:
    optimizer = torch.optim.SGD(parameters(), 0.1)
    scaler = LearningRateScaler(optimizer)
    scaler.update(BatchScale(256, 64, gain=3.0))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.SGD
        other.step()
    assert scaler.steps == 0


# Several optimizers, endings, refusals


def test_close_ends_it() -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], 1.0)
    scaler = LearningRateScaler(optimizer)
    scaler.update(BatchScale(256, 64, gain=3.0))
    scaler.close()
    w.grad = torch.ones(1)
    optimizer.step()
    assert (w.item(), scaler.steps) == (-1.0, 0)


def test_lbfgs_and_what_is_no_optimizer_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"can't follow the batch size with LBFGS.*; use SGD or Adam"):
        LearningRateScaler(torch.optim.LBFGS(parameters()))
    with pytest.raises(InvalidArgument, match=r"must be a torch.optim.Optimizer, got int"):
        LearningRateScaler(3)  # type: ignore[arg-type]


class Wrapper(Optimizer):
    """Has an optimizer and none of its hooks, as Accelerate's has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapper_without_hooks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="got a Wrapper, which wraps one; give the optimizer inside it"):
        LearningRateScaler(Wrapper(torch.optim.SGD(parameters(), 0.1)))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_rule_that_returns_nonsense_is_refused_and_changes_nothing(bad: float) -> None:
    factors: Iterator[float] = iter([2.0, bad])
    scaler = LearningRateScaler(torch.optim.SGD(parameters(), 0.1), lambda batch: next(factors))
    scaler.update(BatchScale(128, 64, gain=1.5))
    with pytest.raises(InvalidArgument, match="must return positive numbers, got Multipliers"):
        scaler.update(BatchScale(256, 64, gain=2.5))
    assert (scaler.multipliers, scaler.gain) == (Multipliers(2.0), 1.5)


@pytest.mark.parametrize("rule", [lambda batch: batch.scale / 2, lambda batch: Multipliers(batch.scale / 2)])
def test_a_rule_may_be_a_function(rule: Rule) -> None:
    scaler = LearningRateScaler(torch.optim.SGD(parameters(), 0.1), rule)
    scaler.update(BatchScale(256, 64))
    assert scaler.multipliers == Multipliers(2.0)


class Outer(Optimizer):
    """Hands its step on, as Lookahead and SAM do."""

    def __init__(self, inner: Optimizer, shares_groups: bool) -> None:
        self.inner = inner
        super().__init__([{**group} for group in inner.param_groups], {})
        if shares_groups:
            self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_that_hands_its_step_on_is_warned_of() -> None:
    params = parameters()
    inner = torch.optim.SGD(params, 0.1)
    with pytest.warns(UserWarning, match="Outer steps another optimizer, which has groups of its own"):
        LearningRateScaler(Outer(inner, False), Linear())
    outer = Outer(inner, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = LearningRateScaler(outer, Linear())
    scaler.update(BatchScale(256, 64))
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    outer.step()
    assert torch.allclose(params[0], before - 0.4)


def test_capturing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(parameters(), 0.1)
    scaler = LearningRateScaler(optimizer, Linear())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scaler.update(BatchScale(256, 64))
    with pytest.raises(RuntimeError, match="can't be captured as a CUDA graph or compiled"):
        optimizer.step()


# State


@pytest.mark.parametrize(
    "batch",
    [None, BatchScale(256, 64, 9.0, (3.0, 12.0), 2.0, 1.5)],
)
def test_state_goes_on(batch: Any) -> None:
    one, other = (LearningRateScaler(torch.optim.SGD(parameters(), 0.1)) for _ in range(2))
    if batch is not None:
        one.update(batch)
    one._optimizer.step()
    other.update(BatchScale(640, 64, gain=8.0))
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert (other.multipliers, other.gain, other.progress) == (one.multipliers, one.gain, one.progress)
    with pytest.raises(InvalidArgument, match="must have version 1, got None"):
        other.load_state_dict({})


def test_a_batch_for_each_group_is_refused_and_changes_nothing() -> None:
    scaler = LearningRateScaler(torch.optim.SGD(parameters(), 0.1), Linear())
    scaler.update(BatchScale(128, 64))
    with pytest.raises(InvalidArgument, match="one BatchScale for all parameter groups, got a list; give optimizers"):
        scaler.update([BatchScale(256, 64)] * 2)  # type: ignore[arg-type]
    state = scaler.state_dict()
    with pytest.raises(InvalidArgument, match="must have one batch for all parameter groups, got 2"):
        scaler.load_state_dict({**state, "batches": state["batches"] * 2})
    assert scaler.state_dict() == state and scaler.multipliers == Multipliers(2.0)
