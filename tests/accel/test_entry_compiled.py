"""Models that the loop has compiled, and those of torch's own modules: the public calls leave them compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.compile import compiled_draws
from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.torch_compile import TorchCompile
from tests.accel.loops import (
    Quick,
    advance,
    advance_until,
    assert_same,
    everything,
    make_loader,
    training,
)


class Counting:
    """A backend for torch.compile that runs the graph as it is and counts."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


class Small(nn.Sequential):
    """With a forward of its own: torch doesn't compile, in place, what its own files hold."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


def _compiled_run(way: str, optimized: bool, steps: int = 0) -> tuple[int, dict[str, Tensor]]:
    """Train a compiled model, for `steps` steps or until `quick` has been switched on and off again."""
    backend = Counting()
    plain: Any = Small()
    model: Any = torch.compile(plain, backend=backend) if way == "wrapper" else plain
    if way == "in place":
        model.compile(backend=backend)
    found = dict(vars(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = make_loader(shuffle=False, drop_last=True)
    if optimized:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    loop = training(model, loader, optimizer)
    advance(loop, 5)
    if way == "in place, later":
        model.compile(backend=backend)
        found = {**vars(plain), "_compiled_call_impl": model._compiled_call_impl}
    if steps:
        advance(loop, steps - 5)
        return steps, everything(plain, optimizer)

    done = 5 + advance_until(loop, lambda: Quick.on)
    runs = backend.runs
    measured = advance_until(loop, lambda: not Quick.on)
    done += measured
    assert backend.runs - runs >= measured  # compiled under the strategy
    assert runs >= done - measured - 6  # and before it
    assert type(model).__name__ == ("OptimizedModule" if way == "wrapper" else "Small")
    accel.undo(model)
    assert vars(plain) == found
    runs = backend.runs
    done += len(advance(loop, 3))
    assert backend.runs == runs + 3
    return done, everything(plain, optimizer)


@pytest.mark.parametrize("way", ["wrapper", "in place", "in place, later"])
def test_a_compiled_model_stays_compiled(only_quick: None, way: str) -> None:
    torch.compiler.reset()
    steps, accelerated = _compiled_run(way, True)
    torch.compiler.reset()
    assert_same(accelerated, _compiled_run(way, False, steps)[1])
    torch.compiler.reset()


@pytest.mark.parametrize("compiles", ["step", "call of step", "backward", "whole step", "model later"])
def test_what_the_loop_compiles_is_compiled_once(compiles: str, recwarn: pytest.WarningsRecorder) -> None:
    """None of accel's own Python is traced with it: no more graphs, no recompilation as the session's mode changes."""

    def graphs(optimized: bool, steps: int = 0) -> tuple[list[str], int]:
        torch.compiler.reset()
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.append(graph.print_readable(print_output=False))
            return graph.forward

        compiled: Any = partial(torch.compile, backend=backend)
        model: Any = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader: Any = make_loader(shuffle=False, drop_last=True)
        if optimized:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, disable=("torch_compile",), budget=60)
        called = compiled(model) if compiles == "model later" else model
        step = {"step": compiled(optimizer.step), "call of step": compiled(lambda: optimizer.step())}.get(
            compiles, optimizer.step
        )

        def differentiate(x: Tensor) -> None:
            called(x).square().mean().backward()

        if compiles == "backward":
            differentiate = compiled(differentiate)

        def train(x: Tensor) -> None:
            optimizer.zero_grad()
            differentiate(x)
            step()

        if compiles == "whole step":
            train = compiled(train)
        done = 0
        while done < steps or (optimized and accel.explain(model).state == "searching"):
            for x, _ in loader:
                train(x)
                done += 1
        if optimized:
            row = next(row for row in accel.explain(model).rows if row.name == "fused_optimizer")
            assert ("has compiled the step of AdamW" in row.why) is ("step" in compiles), row
            accel.undo(model)
        torch.compiler.reset()
        return seen, done

    own, steps = graphs(optimized=True)
    plain, _ = graphs(optimized=False, steps=steps)
    assert len(own) == len(plain)
    assert not [str(each.message) for each in recwarn if "Dynamo" in str(each.message)]


def test_a_program_made_of_a_watched_model_does_not_change_with_what_is_around_its_calls() -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Watching:
        calls = 0

        def around(self, call: Any, args: Any, kwargs: Any) -> Any:
            self.calls += 1
            return call(*args, **kwargs)

    model = Small()
    gate = Gate(model, ["one"])
    compiled: Any = torch.compile(model, backend=backend)
    for watcher in (Watching(), Watching(), None):
        gate.watch(watcher)
        for change in (lambda: None, lambda: gate.add("one", lambda call: call, lambda: None), gate.close):
            change()
            compiled(torch.ones(4, 6))
            gate.watch(watcher)
    assert len(graphs) <= 2  # the gate's call, and the module's own where nothing is around it
    torch.compiler.reset()


def test_a_model_of_torch_s_own_modules_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves frames of its own files as they are; for an `nn.Sequential` that is the whole model."""
    torch.compiler.reset()
    backend = Counting()
    monkeypatch.setattr(compiled_draws, "compile_fx", lambda graph, inputs, **_: backend(graph, inputs))
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    gate = Gate(model, ["torch_compile"])
    run = Run(model, make_loader(), [], gate, Fetching())
    strategy = TorchCompile()

    strategy.enable(run, None)
    assert torch.equal(model(torch.ones(2, 6)), gate.plain(torch.ones(2, 6)))
    assert backend.runs == 1
    strategy.disable(run)
    model(torch.ones(2, 6))
    assert backend.runs == 1
    torch.compiler.reset()
