"""The strategy on a stand-in for CUDA's graphs: trials, guard and kept graphs leave the plain loop's bits."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.graphs import ModelCalls, capture, model_graph, release
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies import REGISTRY
from accel.strategies.base import NothingHelps
from accel.strategies.cuda_graphs import CudaGraphs
from tests.accel import loops
from tests.accel.graphs.tape import TapeRecorder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ModelCalls]:
    """What the strategy has made; its graphs are tapes."""
    made: list[ModelCalls] = []

    def new_calls(strategy: CudaGraphs, run: Run) -> ModelCalls:
        made.append(ModelCalls(run.model, warmup=3, say=lambda reason: None, recorder=lambda device: TapeRecorder()))
        return made[-1]

    monkeypatch.setattr(CudaGraphs, "_new_calls", new_calls)
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


@pytest.mark.parametrize("fault", ["stale inputs", "stale gradients", "no dropout"])
def test_a_wrong_graph_is_caught_before_a_real_step(
    calls: list[ModelCalls], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    row, model, optimizer = tried()
    assert row.status == "undone"
    assert row.why.startswith("wrong"), row.why
    loops.assert_same(loops.everything(model, optimizer), plain_run())
