"""Loops whose steps are not told by a loader, or whose model is not called by its own call."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel.profiler import naming
from accel.profiler.evidence import Evidence
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock

FORWARD_S = 0.003
played = PlayedClock()
"""What the recorder of the test reads, and forward passes take time by."""

Form = tuple[list[nn.Parameter], Callable[[Tensor], Tensor]]


@pytest.fixture(autouse=True)
def _forward_takes_time(clock: PlayedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "played", clock)


class Methodical(nn.Module):
    """A module whose loss is a method, called in place of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 2))

    def loss(self, x: Tensor) -> Tensor:
        played.sleep(FORWARD_S)
        return (x @ self.weight).square().mean()


def by_method() -> Form:
    model = Methodical()
    return list(model.parameters()), model.loss


def by_parameter() -> Form:
    weight = nn.Parameter(torch.randn(8, 2))

    def loss(x: Tensor) -> Tensor:
        played.sleep(FORWARD_S)
        return (x @ weight).square().mean()

    return [weight], loss


def by_compiled_function() -> Form:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    @torch.compile(backend="eager", fullgraph=True)
    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def slow(x: Tensor) -> Tensor:
        played.sleep(FORWARD_S)
        return loss(x)

    return list(model.parameters()), slow


FORMS = pytest.mark.parametrize("form", [by_method, by_parameter, by_compiled_function])


def own_batches(count: int) -> list[Tensor]:
    return [torch.randn(4, 8) for _ in range(count)]


def _first(rows: list[tuple[Tensor]]) -> Tensor:
    return rows[0][0][None]


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(4 * count, 8)), batch_size=4, collate_fn=_first)


def check(recorder: Recorder, seen: list[Measurement]) -> None:
    """The forward pass is where it belongs, and nothing is the loop's own code."""
    for measured in seen[3:]:
        assert min(measured.phases[phase] for phase in ("forward", "backward", "optimizer")) > 0
        assert measured.phases["forward"] >= FORWARD_S
        assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    for phase in ("host", "outside"):
        assert statistics.median(m.phases[phase] for m in seen[3:]) < FORWARD_S
    evidence = Evidence(steps=seen[3:], loader=recorder.loader_facts())
    assert not [f for f in naming.diagnose(evidence).findings if f.cause in ("host.step_code", "outside.step")]


@pytest.mark.sample(2)
@FORMS
@pytest.mark.parametrize("batches", [own_batches, loader])
def test_a_model_that_is_not_called_itself(
    recorder: Recorder, seen: list[Measurement], form: Callable[[], Form], batches: Callable[[int], Any]
) -> None:
    parameters, loss = form()
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for x in batches(40):
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()

    # Without a loader the last step is still open when the loop ends.
    assert recorder.delivery.steps == len(seen) == (40 if batches is loader else 39)
    assert recorder.updates >= 12
    check(recorder, seen)


def test_accumulation_in_a_model_that_is_not_called_itself(recorder: Recorder, seen: list[Measurement]) -> None:
    parameters, loss = by_method()
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for number, x in enumerate(own_batches(80)):
        loss(x).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    assert recorder.delivery.steps == 39
    check(recorder, seen)
    assert min(m.phases["forward"] for m in seen[3:]) >= 2 * FORWARD_S


def test_a_model_that_is_evaluated_by_its_call_but_trained_by_a_method(
    recorder: Recorder, seen: list[Measurement]
) -> None:
    class Both(Methodical):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in loader(40):
        optimizer.zero_grad()
        model.loss(x).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)

    assert recorder.delivery.steps == 40
    check(recorder, seen)
    assert all(m.phases["evaluation"] > 0 for m in seen[3:])


def test_the_sampler_sees_the_forward_pass_as_such(recorder: Recorder) -> None:
    parameters, loss = by_method()
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    for batches in (own_batches(8), loader(8)):
        for x in batches:
            phase = recorder.clock.code
            loss(x).backward()
            optimizer.step()
        assert phase == "forward"


@pytest.mark.parametrize(("critic", "generator", "steps"), [(1, 1, 40), (5, 1, 200)])
def test_two_optimizers_with_an_own_iterator(
    recorder: Recorder, seen: list[Measurement], critic: int, generator: int, steps: int
) -> None:
    """A step ends when the optimizer that stepped first steps again; updates of the other belong to it."""
    g, d = nn.Linear(8, 8), nn.Linear(8, 1)
    of_d, of_g = torch.optim.SGD(d.parameters(), lr=0.01), torch.optim.SGD(g.parameters(), lr=0.01)
    for x in own_batches(40):
        for _ in range(critic):
            of_d.zero_grad()
            d(g(x).detach()).mean().backward()
            of_d.step()
        for _ in range(generator):
            of_g.zero_grad()
            (-d(g(x)).mean()).backward()
            of_g.step()

    assert recorder.delivery.steps == len(seen) == steps
    assert all(min(m.phases[p] for p in ("forward", "backward", "optimizer")) > 0 for m in seen[3:])


def test_optimizers_that_step_together_are_one_step(recorder: Recorder, seen: list[Measurement]) -> None:
    model = nn.Linear(8, 2)
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in model.parameters()]
    for x in own_batches(40):
        model(x).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    assert recorder.delivery.steps == 39


@pytest.mark.parametrize("take", [list, lambda batches: [next(iter(batches))]], ids=["all", "one"])
def test_a_loop_over_batches_taken_from_a_loader_before_has_steps_of_its_own(
    recorder: Recorder, seen: list[Measurement], take: Callable[[Any], list[Any]]
) -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cached = take(loader(4))
    for number in range(100):
        model(cached[number % len(cached)]).sum().backward()
        optimizer.step()

    assert len(seen) == pytest.approx(48, abs=2)
    assert recorder.loader_facts().kind == "own iterator"
    assert all(measured.phases["forward"] > 0 and measured.phases["backward"] > 0 for measured in seen[1:])


def test_a_loader_that_goes_on_after_many_updates_still_ends_the_steps(
    recorder: Recorder, seen: list[Measurement]
) -> None:
    """As in a loop that makes several updates with each batch."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in loader(8):
        for _ in range(20):
            model(x).sum().backward()
            optimizer.step()

    assert len(seen) == 8
    assert recorder.loader_facts().kind == "DataLoader"
