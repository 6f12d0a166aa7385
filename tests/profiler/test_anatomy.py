"""Shares add up, stalls and starts of epochs are told apart, and a wait is called what it is wherever it comes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.profiler.conclusion import verdict
from accel.profiler.diagnose import anatomy
from accel.profiler.diagnose.anatomy import of, typical
from accel.profiler.evidence import Evidence, LineTime, LoaderFacts, TraceSummary
from accel.profiler.gather import Exchange
from accel.profiler.naming import diagnose
from accel.profiler.phases import PHASES, Measurement
from accel.profiler.session import ProfileSession


def step(number: int = 0, *, first: bool = False, **phases: float) -> Measurement:
    held = dict.fromkeys(PHASES, 0.0) | phases
    return Measurement(step=number, seconds=sum(held.values()), phases=held, first=first)


@given(
    st.lists(
        st.builds(
            lambda values, first: step(first=first, **dict(zip(PHASES, values, strict=True))),
            st.lists(st.floats(0, 10), min_size=len(PHASES), max_size=len(PHASES)),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_shares_add_up_and_parts_stay_within(steps: list[Measurement]) -> None:
    found = of(steps)

    total = sum(m.seconds for m in steps)
    assert sum(found.shares.values()) == pytest.approx(1.0 if total > 0 else 0.0)
    assert -1e-9 <= found.epoch_start <= found.shares["data"] + 1e-9
    around = found.shares["outside"] + found.shares["evaluation"]
    assert found.each + found.stalls == pytest.approx(around, abs=1e-9)


def test_stalls_are_told_from_what_each_step_has() -> None:
    steps = [step(n, forward=8.0, outside=42.0 if n % 20 == 10 else 2.0) for n in range(100)]

    found = of(steps)

    assert found.each == pytest.approx(200 / 1200)
    assert found.stalls == pytest.approx(200 / 1200)
    assert found.stall_every == 20


def test_the_start_of_epochs_is_what_first_steps_wait_longer() -> None:
    steps = [step(n, first=n % 10 == 0, data=51.0 if n % 10 == 0 else 1.0, forward=9.0) for n in range(50)]

    assert of(steps).epoch_start == pytest.approx(250 / 750)


def test_an_epoch_of_one_batch_has_no_start_beside_its_ordinary_wait() -> None:
    found = of([step(n, first=True, data=5.0, forward=5.0) for n in range(30)])

    assert (found.epoch_start, found.epoch_slow) == (0.0, 0.0)
    assert found.shares["data"] == pytest.approx(0.5)


def test_no_steps() -> None:
    assert of([]).steps == 0
    assert typical([]) == {}


def test_the_typical_step_adds_up_to_the_median() -> None:
    steps = [step(n, data=1.0, forward=2.0, backward=3.0) for n in range(4)] + [step(4, data=500.0)]

    assert sum(typical(steps).values()) == pytest.approx(6.0)


STEPS, WAIT_S = 24, 0.008
# The operators of these loops take less than a fifth of a millisecond; what a trace says of them.
SMALL = TraceSummary(
    steps=2, ops=[], ops_per_step=40, small_share=0.95, matmul_share=0.5, elementwise_share=0.4, operators_ms=0.2
)


def get_batch() -> tuple[Tensor, Tensor]:
    time.sleep(WAIT_S)
    return torch.ones(4, 4), torch.zeros(4, 2)


def waiting(value: Any) -> Any:
    time.sleep(WAIT_S)
    return value


class Bench:
    """A model and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = get_batch()

    def step(self) -> None:
        x, y = self.batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.batch = get_batch()
        loss.backward()
        self.optimizer.step()


def after_the_update(bench: Bench) -> None:
    for _ in range(STEPS):
        x, y = get_batch()
        loss = nn.functional.mse_loss(bench.model(x), y)
        loss.backward()
        bench.optimizer.step()


def between_forward_and_backward(bench: Bench) -> None:
    x, y = bench.batch
    for _ in range(STEPS):
        outputs = bench.model(x)
        loss = nn.functional.mse_loss(outputs, y)
        x, y = get_batch()
        loss.backward()
        bench.optimizer.step()


def the_same_accumulated(bench: Bench) -> None:
    x, y = bench.batch
    for _ in range(STEPS):
        for _ in range(2):
            loss = nn.functional.mse_loss(bench.model(x), y) / 2
            x, y = get_batch()
            loss.backward()
        bench.optimizer.step()


def between_backward_and_update(bench: Bench) -> None:
    x, y = bench.batch
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(bench.model(x), y)
        loss.backward()
        x, y = get_batch()
        bench.optimizer.step()


def the_targets_after_the_forward_pass(bench: Bench) -> None:
    x, _ = bench.batch
    for _ in range(STEPS):
        outputs = bench.model(x)
        _, y = get_batch()
        loss = nn.functional.mse_loss(outputs, y)
        loss.backward()
        bench.optimizer.step()


def in_the_call_of_the_model(bench: Bench) -> None:
    for _ in range(STEPS):
        loss = bench.model(get_batch()[0]).square().mean()
        loss.backward()
        bench.optimizer.step()


def in_a_method(bench: Bench) -> None:
    for _ in range(STEPS):
        bench.step()


def handed_back_by_the_step(bench: Bench) -> None:
    def step(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        loss = nn.functional.mse_loss(bench.model(batch[0]), batch[1])
        following = get_batch()
        loss.backward()
        bench.optimizer.step()
        return following

    batch = bench.batch
    for _ in range(STEPS):
        batch = step(batch)


def a_slow_loss(bench: Bench) -> None:
    x, y = bench.batch
    for _ in range(STEPS):
        outputs = bench.model(x)
        outputs = waiting(outputs)
        loss = nn.functional.mse_loss(outputs, y)
        loss.backward()
        bench.optimizer.step()


def logging_before_the_backward_pass(bench: Bench) -> None:
    x, y = bench.batch
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(bench.model(x), y)
        waiting(loss)
        loss.backward()
        bench.optimizer.step()


def a_slow_forward_pass(bench: Bench) -> None:
    bench.model.register_forward_pre_hook(lambda module, args: waiting(None))
    logging_free(bench)


def logging_free(bench: Bench) -> None:
    x, y = bench.batch
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(bench.model(x), y)
        loss.backward()
        bench.optimizer.step()


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (after_the_update, "input.iterator"),
        (between_forward_and_backward, "input.iterator"),
        (the_same_accumulated, "input.iterator"),
        (between_backward_and_update, "input.iterator"),
        (in_the_call_of_the_model, "input.iterator"),
        (in_a_method, "input.iterator"),
        (handed_back_by_the_step, "input.iterator"),
        (the_targets_after_the_forward_pass, "host.step_code"),  # they belong to the present batch, not to the next
        (a_slow_loss, "host.step_code"),
        (logging_before_the_backward_pass, "host.step_code"),
        (a_slow_forward_pass, "host.step_code"),
    ],
    ids=lambda given: given.__name__ if callable(given) else given,
)
def test_a_wait_is_named_by_what_waits(loop: Callable[[Bench], None], cause: str) -> None:
    session = ProfileSession(confirm=False, trace_file=None, exchange=Exchange())
    bench = Bench()
    session.start()
    try:
        loop(bench)
    finally:
        session.stop()
    # Not how crowded this machine is just now, and no trace of these few steps.
    evidence = dataclasses.replace(session.evidence(), thread=None, foreign_cores=None, trace=SMALL)

    found = diagnose(evidence, min_steps=STEPS // 2)

    # A busy machine adds causes of its own; operators that take a fiftieth of the step are none.
    causes = [finding.cause for finding in found.findings]
    assert cause in causes
    assert "launch.small_ops" not in causes


def alike(**phases_ms: float) -> list[Measurement]:
    held = {name: ms / 1e3 for name, ms in phases_ms.items()}
    return [Measurement(step=n, seconds=sum(held.values()), phases=held) for n in range(40)]


@pytest.mark.parametrize(("line", "holds"), [("target = teacher(z)", False), ("u, _ = next(unlabelled)", True)])
def test_beside_a_loader_the_loss_makes_batches_only_where_the_loop_asks_for_them(line: str, holds: bool) -> None:
    row = LineTime(phase="loss", file="train.py", line=7, source=line, seconds=1.0, share=1.0, tags=["next batch"])
    seen = Evidence(steps=alike(forward=5, loss=25), lines=[row], loader=LoaderFacts(kind="DataLoader"))

    causes = [finding.cause for finding in diagnose(seen).findings]
    assert causes == (["input.iterator"] if holds else [])


def test_time_in_no_operator_is_told_only_of_one_process_on_the_host() -> None:
    """Ranks wait for each other in the backward pass, and a device runs what the host only launches."""
    seen = Evidence(steps=alike(forward=5, backward=25), trace=SMALL, loader=LoaderFacts(kind="DataLoader"))
    found = anatomy.of(seen.steps)

    assert anatomy.with_parts(found, seen).own_code == pytest.approx(
        {"forward": 4.8 / 30, "backward": 24.8 / 30}, rel=1e-3
    )
    assert anatomy.with_parts(found, dataclasses.replace(seen, world_size=2)).own_code == {}
    assert anatomy.with_parts(found, dataclasses.replace(seen, anomaly_mode=True)).own_code == {}
    on_device = dataclasses.replace(SMALL, operators_ms=None)
    assert anatomy.with_parts(found, dataclasses.replace(seen, trace=on_device)).own_code == {}


def test_own_code_is_told_of_the_phase_that_must_hold_it() -> None:
    """A sleep in the loss is none of the backward pass's, however short that is."""
    seen = Evidence(steps=alike(forward=0.3, loss=20, backward=0.38), trace=SMALL)
    found = anatomy.with_parts(anatomy.of(seen.steps), seen)

    assert found.own_code == pytest.approx({"loss": 19.8 / 20.68}, rel=1e-3)
    assert diagnose(seen).findings[0].why[1] == "19.8 of 20.7 ms of it in loss, in no operator of torch's"


def test_at_the_call_of_the_backward_pass_no_code_of_the_loops_runs() -> None:
    """What the engine waits for a core there is in no operator either; a hook's own line is Python's."""
    row = LineTime(phase="backward", file="t.py", line=3, source="loss.backward()", seconds=3.0, share=0.75)
    hook = dataclasses.replace(row, line=9, source="time.sleep(1)", seconds=1.0, share=0.25)
    seen = Evidence(steps=alike(forward=0.3, loss=20, backward=4), trace=SMALL, lines=[row])
    found = anatomy.of(seen.steps)

    assert list(anatomy.with_parts(found, seen).own_code) == ["loss"]
    hooked = anatomy.with_parts(found, dataclasses.replace(seen, lines=[row, hook])).own_code
    assert hooked["backward"] == pytest.approx(1 / 24.3)


def test_own_code_that_may_be_in_any_phase_is_told_once() -> None:
    trace = dataclasses.replace(SMALL, operators_ms=4.0)
    seen = Evidence(steps=alike(forward=10, loss=10, backward=10), trace=trace)
    found = anatomy.with_parts(anatomy.of(seen.steps), seen)

    assert not found.own_code
    assert found.own_unplaced == pytest.approx(26 / 30)
    told = verdict.build_report(seen, diagnose(seen))
    assert told.findings[0].cause == "host.step_code"
    assert told.evidence is not None
    assert "26 ms of forward, loss and backward are in no operator" in told.evidence.note
    assert not any(phase.children for phase in told.evidence.children)
    assert "26 of 30 ms of it in forward, loss and backward together" in told.findings[0].why[1]


def test_a_loop_of_small_operators_is_not_taken_for_code_of_ones_own() -> None:
    """Python and autograd take about as long again as the operators themselves."""
    busy = dataclasses.replace(SMALL, operators_ms=12.0)
    seen = Evidence(steps=alike(forward=10, backward=15), trace=busy)

    assert anatomy.with_parts(anatomy.of(seen.steps), seen).own_code == {}
    assert [finding.cause for finding in diagnose(seen).findings] == ["launch.small_ops"]
