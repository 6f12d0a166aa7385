"""The strategy on a stand-in for CUDA's graphs: trials, guard and kept graphs leave the plain loop's bits."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.graphs import ModelCalls, capture, model_graph, release
from accel.guard import rounding
from accel.run import Run
from accel.run.gate import Gate, make_room
from accel.search.actions import Action, Result
from accel.strategies import REGISTRY, cuda_graphs
from accel.strategies.autocast_bf16 import AutocastBf16
from accel.strategies.base import NothingHelps
from accel.strategies.cuda_graphs import CudaGraphs, DeviceMemory
from accel.strategies.torch_compile import TorchCompile
from tests.accel import loops
from tests.accel.graphs.tape import TapeRecorder
from tests.accel.simulation import Machine, candidate, simulate


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ModelCalls]:
    """What the strategy has made; its graphs are tapes."""
    made: list[ModelCalls] = []

    def new_calls(model: nn.Module, **options: Any) -> ModelCalls:
        made.append(ModelCalls(model, recorder=lambda device: TapeRecorder(), **options))
        return made[-1]

    monkeypatch.setattr("accel.graphs.ModelCalls", new_calls)
    monkeypatch.setattr(CudaGraphs, "refusal", lambda strategy, run: "")
    return made


def run_of(model: nn.Module, *, world_size: int = 1) -> Run:
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)
    gate = Gate(model, [strategy.name for strategy in REGISTRY])
    return Run(model, loader, [], gate, SimpleNamespace(), world_size=world_size)  # type: ignore[arg-type]


def train(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


def watched(run: Run, strategy: CudaGraphs, rows: int = 4) -> None:
    """Call the model until the strategy waits no more."""
    x = torch.randn(rows, 6)
    run.observed.note_call((x,), {}, run.device)
    for number in range(4):
        assert bool(strategy.waits(run)) == (number < 3)
        train(run.model, x)
    assert not run.gate.wrapped


def test_where_it_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 2)
    assert CudaGraphs().refusal(run_of(model)) == "it needs a CUDA device; the model is on the CPU"
    monkeypatch.setattr(Run, "cuda", True)
    assert CudaGraphs().refusal(run_of(model)) == ""
    assert "before wrapping it" in CudaGraphs().refusal(run_of(model, world_size=2))
    capture(model)
    assert CudaGraphs().refusal(run_of(model)) == "the model is captured already"
    release(model)
    varying = run_of(model)
    for rows in (1, 2, 3):
        varying.observed.note_call((torch.randn(rows, 6),), {}, torch.device("cpu"))
    assert "inputs vary" in CudaGraphs().refusal(varying)
    model.compile(backend="eager")
    assert "compiled already" in CudaGraphs().refusal(run_of(model))


def test_it_watches_captures_and_leaves_no_trace(calls: list[ModelCalls]) -> None:
    run, strategy = run_of(nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))), CudaGraphs()
    watched(run, strategy)
    for on in (True, False, True):
        (strategy.enable if on else lambda run, _: strategy.disable(run))(run, None)
        for _ in range(2):
            train(run.model, torch.randn(4, 6))
        train(run.model, torch.randn(3, 6))
        with torch.no_grad():
            run.model(torch.randn(4, 6))
    assert (calls[0].captures, calls[0].replays) == (1, 4)
    strategy.disable(run)
    strategy.close(run)
    assert not run.gate.wrapped
    assert not calls[0]._graphs


def test_graphs_are_given_up_where_a_call_has_no_room(calls: list[ModelCalls]) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    strategy.enable(run, None)
    for _ in range(2):
        train(run.model, torch.randn(4, 6))
    assert calls[0]._graphs
    make_room(run.gate)
    assert not calls[0]._graphs
    train(run.model, torch.randn(4, 6))  # it goes on


def test_another_strategy_inside_has_a_graph_of_its_own(calls: list[ModelCalls]) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    strategy.enable(run, None)
    x = torch.randn(4, 6)
    plain = run.model(x)
    plain.sum().backward()
    for _ in range(2):
        run.gate.add("channels_last", lambda call: lambda *args: 2 * call(*args))
        for _ in range(4):
            doubled = run.model(x)
            doubled.sum().backward()
        assert torch.equal(doubled, 2 * plain)
        run.gate.remove("channels_last")
        again = run.model(x)
        again.sum().backward()
        assert torch.equal(again, plain)


@pytest.mark.parametrize("kind", ["hooks", "waits", "penalty"])
def test_what_can_not_be_captured_is_said(calls: list[ModelCalls], kind: str) -> None:
    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if x.sum().item() > 1e9 else 1)

    run, strategy = run_of(Waiting(6, 2) if kind == "waits" else nn.Linear(6, 2)), CudaGraphs()
    if kind == "hooks":
        run.model.register_forward_hook(lambda *args: None)
    x = torch.randn(4, 6, requires_grad=True)
    run.observed.note_call((x,), {}, run.device)
    for _ in range(4):
        if strategy.waits(run):
            torch.autograd.grad(run.model(x).square().sum(), x, create_graph=kind == "penalty")
    assert strategy.waits(run) == ""
    if kind == "waits":
        strategy.enable(run, None)
        run.model(x)
        assert strategy.failure(run).startswith("it could not be captured")
    else:
        with pytest.raises(NothingHelps, match={"hooks": "has hooks", "penalty": "differentiated again"}[kind]):
            strategy.enable(run, None)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of a stand-in for a CUDA device: a step needs 4 bytes above what is always allocated."""
    numbers = {"available": 8, "of_a_step": 4}
    monkeypatch.setattr(Run, "cuda", True)
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: DeviceMemory(**numbers))
    monkeypatch.setattr(cuda_graphs, "idle_in_graphs", lambda device: 0)
    return numbers


def test_without_room_for_graphs_none_are_captured(calls: list[ModelCalls], memory: dict[str, int]) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    memory["available"] = 7
    with pytest.raises(NothingHelps, match="there is no room for graphs beside a step of the loop's own"):
        strategy.enable(run, None)
    assert not run.gate.wrapped
    memory["available"] = 8
    strategy.enable(run, None)
    train(run.model, torch.randn(4, 6))
    assert calls[0].captures == 1


def test_copies_of_the_guards_are_no_part_of_what_stays(calls: list[ModelCalls], memory: dict[str, int]) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    memory.update(available=6, of_a_step=2)  # 2 of a copy: a step does not need less for that
    with pytest.raises(NothingHelps, match="no room"):
        strategy.enable(run, None)


def test_graphs_outlast_the_blocks_of_a_trial_where_there_is_room(
    calls: list[ModelCalls], memory: dict[str, int]
) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    for on in (False, True, True, False, False, True):
        if on:
            strategy.enable(run, None)
        else:
            strategy.disable(run)
        train(run.model, torch.randn(4, 6))
        if calls[0].captures:  # the graphs' own 4; an eager step has 4 beside them
            memory.update(available=4)
    assert (calls[0].captures, calls[0].has_graphs) == (1, True)
    strategy.enable(run, None)
    memory.update(available=3)
    strategy.disable(run)
    assert not calls[0].has_graphs


def test_graphs_go_when_they_are_of_no_use_any_more(calls: list[ModelCalls]) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    strategy.enable(run, None)
    x = torch.randn(4, 6)
    loss = run.model(x).sum()
    calls[0].why_eager.append("a reason of another kind of calls")
    strategy.disable(run)  # in the middle of a step, as when an output is not finite
    loss.backward()
    strategy.disable(run)
    assert not calls[0].has_graphs


def test_switching_what_is_inside_off_and_on_takes_no_new_graph(calls: list[ModelCalls]) -> None:
    run, strategy = run_of(nn.Linear(6, 2)), CudaGraphs()
    watched(run, strategy)
    strategy.enable(run, None)
    for _ in range(3):
        for name in ("channels_last", "autocast_bf16"):
            run.gate.remove(name)
        AUTOCAST.enable(run, None)
        run.gate.add("channels_last", doubled)
        for _ in range(3):
            train(run.model, torch.randn(4, 6))
        AUTOCAST.disable(run)
        AUTOCAST.enable(run, None)  # in another order: the wrappers lie as before
        train(run.model, torch.randn(4, 6))
    assert calls[0].captures == 1


AUTOCAST = AutocastBf16()


def doubled(call: Any) -> Any:
    return lambda *args: 2 * call(*args)


def test_a_compiled_model_is_the_same_after_each_switch() -> None:
    """Else each switch of it would take a graph, and the guard would compare none."""
    run, strategy = (
        run_of(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))),
        TorchCompile(),
    )
    seen: dict[str, list[Any]] = {"blocks": [], "whole model": []}
    for setting in ("blocks", "whole model", "blocks", "whole model"):
        strategy.enable(run, setting)
        seen[setting].append(run.gate.within("cuda_graphs"))
        strategy.disable(run)
    strategy.close(run)
    assert seen["blocks"][0] == seen["blocks"][1] != seen["whole model"][0] == seen["whole model"][1]


def test_a_strategy_that_trips_in_the_guards_steps_is_in_no_trial_after_it() -> None:
    """Its plan with the candidate was made before; it is compared anew without what has tripped."""

    class TripsInGuard(Machine):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            if action.check is not None and {"first", "second"} <= action.check.keys():
                result.trips["first"] = "its output is not finite"
            return result

    machine = TripsInGuard(speed={"first": 2.0, "second": 1.5})
    controller = simulate([candidate("first"), candidate("second")], machine)
    tripped = next(n for n, action in enumerate(machine.actions) if {"first", "second"} <= (action.check or {}).keys())
    assert not [action for action in machine.actions[tripped + 1 :] if "first" in action.plan]
    assert next(action.check for action in machine.actions[tripped + 1 :] if action.check) == {"second": None}
    assert controller.plan == {"second": None}


STEPS = 600  # a strategy that waits is looked at again once the search is over


class Noisy(nn.Module):
    """A model with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def tried(kind: type[nn.Module] = Noisy) -> tuple[Any, Any, Any]:
    """Train until the strategy has been tried; return its row, the model and the optimizer."""
    model, loader, optimizer = loops.make(kind=kind)
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, enable=("cuda_graphs",), disable=tuple(others()), budget=100.0, cache=False
    )
    loops.advance(loops.training(model, loader, optimizer), STEPS)
    row = next(row for row in accel.explain(model).rows if row.name == "cuda_graphs")
    accel.undo(model)
    return row, model, optimizer


def others() -> list[str]:
    return [strategy.name for strategy in REGISTRY if strategy is not CudaGraphs]


@functools.cache
def plain_run() -> dict[str, Tensor]:
    return loops.plain_run_of(Noisy, STEPS)


def test_a_run_that_tries_it_has_the_plain_loops_bits(calls: list[ModelCalls]) -> None:
    row, model, optimizer = tried()
    assert calls[0].replays > 4, row
    assert row.status in ("undone", "kept")
    assert row.output_error == 0.0  # compared, and right
    assert row.gradient_error == 0.0
    loops.assert_same(loops.everything(model, optimizer), plain_run())


def inject(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "stale inputs":
        monkeypatch.setattr(model_graph.ModelGraph, "_take", lambda graph, inputs: None)
    elif fault == "stale gradients":
        monkeypatch.setattr(model_graph.BackwardGraph, "_take", lambda graph, gradients: None)
    else:
        record = TapeRecorder.record

        def without_dropout(recorder: TapeRecorder, run: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.Dropout, "forward", lambda layer, x: x)
                return record(recorder, run)

        monkeypatch.setattr(TapeRecorder, "record", without_dropout)


FAULTS = ["stale inputs", "stale gradients", "no dropout"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_graph_is_caught_before_a_real_step(
    calls: list[ModelCalls], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(fault, monkeypatch)
    row, model, optimizer = tried()
    assert row.status == "undone"
    assert row.why.startswith("wrong"), row.why
    loops.assert_same(loops.everything(model, optimizer), plain_run())


class Capturing(Noisy):
    """Draws once more while it is captured, as a library's model does that takes another path then."""

    def forward(self, x: Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing() and self.training:
            torch.rand(())
        return super().forward(x)


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say within a capture that there is one, as CUDA does."""
    record = TapeRecorder.record

    def recorded(recorder: TapeRecorder, run: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            return record(recorder, run)

    monkeypatch.setattr(TapeRecorder, "record", recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_graph_that_draws_other_numbers_is_refused(calls: list[ModelCalls], tells: None) -> None:
    row, model, optimizer = tried(Capturing)
    assert row.status == "undone"
    assert row.why.startswith("wrong"), row.why
    loops.assert_same(loops.everything(model, optimizer), loops.plain_run_of(Capturing, STEPS))


def test_both_steps_of_a_comparison_without_tf32_take_one_capture(
    calls: list[ModelCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs captured for it are of no use in the trial: they were captured anew in each of its steps."""
    held: list[bool] = []
    close = CudaGraphs.close

    def closed(strategy: CudaGraphs, run: Run) -> None:
        held.append(strategy._calls is not None and strategy._calls.has_graphs)
        close(strategy, run)

    monkeypatch.setattr(CudaGraphs, "close", closed)
    monkeypatch.setattr(rounding, "without_tf32", lambda *args, **options: contextlib.nullcontext(object()))
    row, model, optimizer = tried()
    assert row.output_error == 0.0
    assert any(held)  # given back
    assert calls[0].captures == 2  # for the comparison and for the trial
    loops.assert_same(loops.everything(model, optimizer), plain_run())
