"""What is not captured of a model, or captured anew, and that it trains as the eager one all the same."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from accel.amp import decorate
from accel.graphs import CaptureError, capture
from accel.profiler.loop import callslot
from tests.accel.graphs.model_loops import batch, both, loop_of, network, step, taped

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


def test_hooks_are_called() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results: list[Any] = [step(model, optimizer, seed) for seed in range(4)]
        handle = model[3].register_forward_hook(lambda module, args, out: results.append(out.detach()))
        results += [step(model, optimizer, seed) for seed in range(4, 8)]
        handle.remove()
        return results + [step(model, optimizer, seed) for seed in range(8, 12)]

    calls = both(loop, warmup=1)
    assert calls.replays == 7
    assert calls.why_eager == ["the model or a part of it has hooks, which a graph would not call"]


def test_mixed_precision_is_captured() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        decorate(model, optimizer, dtype=torch.bfloat16, keep_fp32=["3"])
        return [step(model, optimizer, seed) for seed in range(8)]

    calls = both(loop, warmup=1)
    assert calls.replays == 7


def test_code_that_was_put_in_place_of_a_modules() -> None:
    def by_function(model: Any) -> None:
        model[3].forward = torch.tanh

    def by_class(model: Any) -> None:
        model[3].__class__ = nn.GELU
        del model[3].forward
        model[3].approximate = "none"

    assert both(loop_of(4, by_function, 4, by_class, 4), warmup=1).captures == 3


class Waiting(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Double what is large."""
        out: Tensor = self.layer(x)
        return out * 2 if out.sum().item() > 0 else out


def test_a_model_that_waits_for_the_device_stays_eager() -> None:
    calls = both(loop_of(8), Waiting)
    assert calls.captures == 0
    assert calls.why_eager[0].startswith("it could not be captured: RuntimeError: operation not permitted")


@dataclass
class Other:
    x: Tensor


class Odd(nn.Module):
    """Takes and returns an object of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        """Apply."""
        return self.layer(x.x) if isinstance(x, Other) else Other(self.layer(x))


def test_what_cant_be_described_stays_eager() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(6):
            model(Other(batch(4, seed))).sum().backward()
            out = model(batch(4, seed)).x
            out.sum().backward()
            results.append(out.detach())
        return results

    calls = both(loop, Odd)
    assert [reason.partition(" must be")[0] for reason in calls.why_eager] == ["arguments", "what a model returns"]


def test_the_model_stays_what_it_is() -> None:
    model, plain = network(), network()
    calls = taped(model, warmup=0)
    model(batch(8, 0)).sum().backward()
    assert calls.replays == 1
    assert list(model.state_dict()) == list(plain.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train(False)
        assert callslot.contents(other).get(callslot.NAME) is None
        assert other(batch(8, 0)).shape == (8, 3)
    assert calls.replays == 1


def test_strictly_it_raises() -> None:
    model = network()
    taped(model, warmup=0, strict=True)
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="can't be captured: the model or a part of it has hooks"):
        model(batch(8, 0))
    capture(model, warmup=0, strict=True)  # on a CPU it runs as it is
    with pytest.warns(RuntimeWarning, match="one CUDA device"):
        capture(network(), warmup=0, strict=True)(batch(8, 0))


def test_modes_of_torch_see_each_operator() -> None:
    model = network()
    calls = taped(model, warmup=0)
    with FlopCounterMode(display=False) as counter:
        model(batch(8, 0)).sum().backward()
    assert counter.get_total_flops() > 0
    assert calls.captures == 0
