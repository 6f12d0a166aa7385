"""Models that the loop has compiled, and those of torch's own modules: the public calls leave them compiled."""

from __future__ import annotations

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
