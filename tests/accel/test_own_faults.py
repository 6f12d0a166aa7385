"""Runs that go wrong by themselves: no update is left out, nobody is blamed, and the bits are the plain loop's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from accel.guard import guard, update_guard
from accel.profiler.loop import backward
from accel.strategies.base import Exactness
from tests.accel.loops import Net, loss_of, make_loader
from tests.sampling import examples

STEPS = 24
FAULTS = (
    "input",
    "loss",
    "infinite loss",
    "penalty",
    "gradient set",
    "gradient scaled",
    "weight",
    "growth",
    "backward hook",
    "output",
)


class Counted(Net):
    """A net that counts its calls, and whose output can be made bad in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        outputs = super().forward(x)
        return outputs * math.nan if self.bad else outputs


def make(kind: type[Any] = Counted) -> tuple[Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, make_loader(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: Any, optimizer: Any, x: Tensor, target: Tensor, fault: str, way: str) -> None:
    """One step of a loop of the user's, in which a fault of the user's own happens."""
    model.bad = fault == "output"
    if fault == "input":
        x = x.clone()
        x[0, 0] = math.nan
    if fault in ("weight", "growth"):
        with torch.no_grad():
            model.head.weight.mul_(math.inf if fault == "weight" else 1e6)
    if way != "zeroed late":
        optimizer.zero_grad(set_to_none=way != "zeroed in place")
    hook = model.head.weight.register_hook(lambda g: g * math.nan) if fault == "backward hook" else None
    for part in (slice(0, 4), slice(4, 8)) if way == "accumulated" else (slice(0, 8),):
        if len(x[part]) < 2:  # BatchNorm wants two
            continue
        loss = loss_of(model(x[part]), target[part])
        loss = loss * {"loss": math.nan, "infinite loss": math.inf}.get(fault, 1.0)
        if fault == "penalty":
            loss = loss + (model.inner.weight * 0).norm() ** 0.5 * 0
            loss = loss + math.nan * model.inner.weight.sum()
        if way == "zeroed late":
            optimizer.zero_grad()
        loss.backward()
    if hook is not None:
        hook.remove()
    if fault == "gradient set":
        model.inner.weight.grad = torch.full_like(model.inner.weight, math.nan)
    if fault == "gradient scaled":
        model.inner.weight.grad.mul_(math.inf)
    if way == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if way == "bad ones left out" and not all(p.grad.isfinite().all() for p in model.parameters()):
        return
    optimizer.step()


def left(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """All that a run leaves behind, NaN as NaN."""
    state = dict(model.state_dict()) | {"random": torch.get_rng_state()}
    for number, kept in enumerate(optimizer.state.values()):
        state |= {f"{number} {name}": value for name, value in kept.items() if isinstance(value, Tensor)}
    kept = {name: str(value.nan_to_num(nan=12345.0).tolist()).encode() for name, value in state.items()}
    return kept | {"calls": str(model.calls).encode()}


def run(faults: dict[int, str], way: str, begin: Callable[[Any], None] | None, steps: int = STEPS) -> Any:
    model, loader, optimizer = make()
    if begin is not None:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    done = 0
    while done < steps:
        for x, target in loader:
            if begin is not None and done == 4:
                begin(model)
            step(model, optimizer, x, target, faults.get(done, ""), way)
            done += 1
            if done == steps:
                break
    found = left(model, optimizer)
    outcome = None
    if begin is not None:
        session = entry.MODELS[model].session
        outcome = (dict(session.switchboard.trips), dict(session.active), session.failed, accel.explain(model).steps)
        accel.undo(model)
    return found, outcome


def keep_on(model: nn.Module) -> None:
    """Keep `quick` on from here, as a finished search would."""
    session = entry.MODELS[model].session
    session.runner._next_action = lambda first=False: None  # type: ignore[method-assign]
    session.switchboard.switch({"quick": None})
    session.run.gate.watch(session.events.calls)


WAYS = ("plain", "clipped", "accumulated", "zeroed in place", "zeroed late", "bad ones left out")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch, only_quick: None) -> None:
    monkeypatch.setattr("tests.accel.loops.WAIT_S", 0.0)


# Every fault in a plain loop, and two of them in loops of every kind.
PAIRS = [
    pytest.param(fault, way, marks=[] if way == "plain" or fault in ("loss", "gradient set") else pytest.mark.slow)
    for way in WAYS
    for fault in FAULTS
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("fault", "way"), PAIRS)
def test_a_fault_of_the_run_s_own_is_left_to_it(no_waiting: None, fault: str, way: str) -> None:
    plain, _ = run({10: fault}, way, None)
    accelerated, (trips, active, failed, steps) = run({10: fault}, way, keep_on)

    assert (trips, active, failed) == ({}, {"quick": None}, "")
    assert [name for name in plain if plain[name] != accelerated[name]] == []
    assert steps >= STEPS - 3 or way == "bad ones left out"  # the loop itself steps no more


ANY_FAULTS = given(
    faults=st.dictionaries(st.integers(5, STEPS - 1), st.sampled_from(FAULTS), max_size=4), way=st.sampled_from(WAYS)
)


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@ANY_FAULTS
def test_any_faults_of_the_run_s_own_leave_the_plain_loop_s_bits(
    no_waiting: None, faults: dict[int, str], way: str
) -> None:
    assert_plain_bits(faults, way)


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@ANY_FAULTS
def test_many_faults_of_the_run_s_own_leave_the_plain_loop_s_bits(
    no_waiting: None, faults: dict[int, str], way: str
) -> None:
    assert_plain_bits(faults, way)


def assert_plain_bits(faults: dict[int, str], way: str) -> None:
    plain, _ = run(faults, way, None)
    accelerated, (trips, active, failed, _) = run(faults, way, keep_on)
    assert (trips, active, failed) == ({}, {"quick": None}, "")
    assert [name for name in plain if plain[name] != accelerated[name]] == []


def test_a_gan_that_diverges_is_not_a_strategy_s_fault(no_waiting: None) -> None:
    """Its outputs grow without bound, finite for a long time: so do those of the plain call."""
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    done = 0
    for _ in range(6):
        for x, _ in loader:
            keep_on(model) if done == 4 else None
            optimizer.zero_grad()
            (model(x).square().mean() * -1.0).backward()
            optimizer.step()
            done += 1
    session = entry.MODELS[model].session
    assert not model.head.weight.isfinite().all() or model.head.weight.abs().max() > 1e4
    assert session.switchboard.trips == {}
    assert session.active == {"quick": None}


def test_a_run_that_stays_bad_is_looked_at_less_and_less(no_waiting: None) -> None:
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    done, calls_before = 0, 0
    for _ in range(12):
        for x, target in loader:
            keep_on(model) if done == 4 else None
            calls_before = model.calls if done == 20 else calls_before
            step(model, optimizer, x, target, "weight" if done == 20 else "", "plain")
            done += 1
    # Each call that is looked at is made again; the count of the model's own calls is put back each time.
    assert model.calls == done
    session = entry.MODELS[model].session
    assert session.events.calls.watch.calls._excuse._length == 64


def test_updates_and_outputs_that_are_not_finite_prove_nothing_against_a_candidate() -> None:
    bad = torch.full((3,), math.nan)
    found = update_guard.compare([bad], [torch.ones(3)], [torch.ones(3)], Exactness.REORDERED)
    assert (found.problem, found.unsure) == ("", "the plain update itself is not finite")
    plain, other = (guard.Replayed([t], [], []) for t in (bad, torch.tensor([math.inf, 0.0, 1.0])))
    found = guard.compare(plain, other, Exactness.REORDERED)
    assert (found.problem, found.unsure) == ("", "the plain call's own output is not finite")
    assert found.merge(guard.Comparison()).unsure == ""
    assert guard.compare(guard.Replayed([torch.ones(3)], [], []), other, Exactness.REORDERED).problem


def test_a_way_past_the_calls_is_seen() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    output = layer(torch.ones(1, 2))
    assert output.grad_fn is not None
    nodes, own = {output.grad_fn._sequence_nr()}, {id(p) for p in layer.parameters()}  # type: ignore[attr-defined]
    assert not backward.leads_past([other(output.relu()).sum()], nodes, own)
    assert backward.leads_past([output.sum() + layer.weight.norm()], nodes, own)
    assert not backward.leads_past([output.sum() + other.weight.norm()], nodes, own)
    assert not backward.leads_past([torch.ones(())], nodes, own)


def test_the_mark_on_the_backward_pass_is_taken_out() -> None:
    class Ears:
        heard: ClassVar[list[str]] = []

        def backward_begins(self, roots: list[Tensor]) -> None:
            self.heard.append("begins")

        def backward_ended(self, roots: list[Tensor]) -> None:
            self.heard.append(f"ended {len(roots)}")

    plain = torch.autograd.backward
    one, other = Ears(), Ears()
    backward.listen(one)
    backward.listen(other)
    backward.forget(one)
    torch.ones(2, requires_grad=True).sum().backward()
    assert Ears.heard == ["begins", "ended 1"]
    backward.forget(other)
    assert torch.autograd.backward is plain


def test_a_forward_that_writes_to_its_input_is_not_made_again(no_waiting: None) -> None:
    class Writes(Counted):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1.0)
            return super().forward(x)

    def trained(optimized: bool) -> dict[str, bytes]:
        model, loader, optimizer = make(Writes)
        if optimized:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
        for number, (x, target) in enumerate(loader):
            keep_on(model) if optimized and number == 4 else None
            step(model, optimizer, x.clone(), target, "output" if number == 7 else "", "bad ones left out")
        return left(model, optimizer)

    assert trained(True) == trained(False)


class Ages(Counted):
    """Each call has another output than the one before: by a count, and by random numbers that are not torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + self.calls + random.random())


def test_calls_made_again_begin_from_one_state(no_waiting: None) -> None:
    model, loader, optimizer = make(Ages)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    for done, (x, target) in enumerate(loader):
        keep_on(model) if done == 4 else None
        step(model, optimizer, x, target, "loss" if done == 8 else "", "bad ones left out")
    session = entry.MODELS[model].session
    assert (session.switchboard.trips, session.active) == ({}, {"quick": None})


def test_a_loss_that_is_not_finite_is_no_fault_of_what_draws_in_another_order() -> None:
    """Dropout draws in the order of memory: other values in the replay under channels_last than in the plain one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Conv2d(8, 4, 3), nn.Flatten())
    loader: Any = DataLoader(TensorDataset(torch.randn(96, 3, 8, 8)), batch_size=8)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, enable=("channels_last",), budget=60)
    session = entry.MODELS[model].session
    for done, (x,) in enumerate(loader):
        if done == 4:
            session.runner._next_action = lambda first=False: None  # as a finished search would
            session.switchboard.switch({"channels_last": None})
            session.run.gate.watch(session.events.calls)
        optimizer.zero_grad()
        (model(x).square().mean() * (math.nan if done == 8 else 1.0)).backward()
        if done != 8:
            optimizer.step()
    assert (session.switchboard.trips, session.active) == ({}, {"channels_last": None})
