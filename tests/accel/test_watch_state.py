"""A call that is made again begins from the state that it found: random numbers, attributes, also in a recursion."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accel.guard import watch as watching
from accel.run.context import Observed
from accel.run.gate import Call
from accel.session.plan_check import PlanCheck
from accel.session.replays import Replays
from accel.session.step_watch import StepWatch
from tests.accel.guard_replays import broken, gives_nan


class Stateful(nn.Module):
    """A recurrent model that keeps its own state, as an attribute, in a tuple, or as a buffer that is replaced."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(2, 2)
        self.state: Any = None
        if kind == "buffer":
            del self.state
            self.register_buffer("state", torch.zeros(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        before = self.state[0] if isinstance(self.state, tuple) else self.state
        h = torch.tanh(self.layer(x) + (0.0 if before is None else before))
        self.state = (h.detach(),) if self.kind == "tuple" else h.detach()
        return h


@pytest.mark.parametrize("kind", ["tensor", "tuple", "buffer"])
def test_a_state_that_a_bad_call_has_replaced_is_put_back(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Stateful(kind), torch.ones(1, 2)
    gate, watch, trips = broken(model, gives_nan)
    kept = model.state
    expected = gate.plain(x)
    model.state = kept
    outputs = watch.call(gate.call, (x,), {})
    assert trips == ["its output is not finite"]
    assert torch.equal(outputs, expected)


class Tree(nn.Module):
    """Calls itself for the child, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        self.count += 1
        below = self(x, depth - 1) if depth else 0.0
        return self.layer(x) + below + self.count  # type: ignore[no-any-return]


def test_the_outermost_call_of_a_recursion_is_made_again_plainly_with_its_own_buffers() -> None:
    def spoils_the_outermost(call: Call) -> Call:
        return lambda x, depth=0: call(x, depth) * (float("nan") if depth == 2 else 1.0)

    class Watcher:
        def around(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return watch.call(call, args, kwargs)

    torch.manual_seed(0)
    model, x = Tree(), torch.ones(1, 2)
    gate, watch, trips = broken(model, spoils_the_outermost)
    gate.remove("broken")
    expected = model(x, 2)
    model.count.zero_()
    gate.add("broken", spoils_the_outermost)
    gate.watch(Watcher())
    outputs = model(x, 2)
    gate.close()
    assert trips == ["its output is not finite"]
    assert (torch.equal(outputs, expected), model.count.item()) == (True, 3)


def test_a_call_made_again_draws_the_same_numbers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count stands for the state of a GPU's generator."""
    gpu, drawn = torch.device("cuda", 0), [7]
    monkeypatch.setattr(watching, "devices_of", lambda *arguments: [gpu])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor(drawn[0]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: drawn.__setitem__(0, int(state)))

    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            drawn[0] += 1
            return super().forward(x) + drawn[0]

    gate, watch, trips = broken(Draws(2, 2), gives_nan)
    watch.call(gate.call, (torch.ones(1, 2),), {})
    assert (trips, drawn) == (["its output is not finite"], [8])


class Gathers(nn.Module):
    """Draws by Python and numpy, and gathers what it has seen in containers and in a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.bank: deque[Tensor] = deque(maxlen=3)
        self.seen: dict[str, list[float]] = {"means": []}
        self.latest: list[float] = []
        self.mean = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.bank.append(x.mean())
        self.seen["means"].append(float(x.mean()))
        self.latest = [*self.latest[-2:], random.random()]
        self.mean.mul_(0.5).add_(x.detach().mean())
        return self.layer(x) + random.random() + np.random.rand() + len(self.bank) + self.mean  # type: ignore[no-any-return]

    def gathered(self) -> tuple[Any, ...]:
        return len(self.bank), {**self.seen}, self.latest, self.mean.tolist(), random.getstate(), np.random.rand()


def runner_of(gate: Any, watch: watching.Watch) -> Any:
    """What checks the steps of a model, with this watch, once a plain call of it has been recorded."""
    run = SimpleNamespace(model=gate.model, device=torch.device("cpu"), gate=gate, optimizers=[], observed=Observed())
    replays = Replays(run, SimpleNamespace(active={}, trip=print, close=list), SimpleNamespace())  # type: ignore[arg-type]
    runner = StepWatch(replays)
    runner.calls = watch
    check = check_of(runner)
    check.recorded((torch.ones(1, 2),), {})
    check.close()
    return runner


def check_of(watch: StepWatch) -> PlanCheck:
    return PlanCheck(watch._replays, watch, time.perf_counter)


@pytest.mark.parametrize("spoils", [gives_nan, lambda call: lambda x: (call(x), 1 / 0)])
def test_a_call_made_again_changes_containers_and_draws_as_if_it_was_made_once(spoils: Any) -> None:
    torch.manual_seed(0)
    model, x = Gathers(), torch.ones(1, 2)
    gate, watch, trips = broken(model, spoils)
    runner_of(gate, watch)

    def afresh() -> None:
        random.seed(0)
        np.random.seed(0)
        model.bank.clear()
        model.seen["means"].clear()
        model.latest = [0.5]
        model.mean.zero_()

    afresh()
    expected, gathered = gate.plain(x), model.gathered()
    means = list(gathered[1]["means"])
    afresh()
    outputs, now = watch.call(gate.call, (x,), {}), model.gathered()
    assert len(trips) == 1
    assert torch.equal(outputs, expected)
    assert list(now[1]["means"]) == means
    assert (now[0], *now[2:]) == (gathered[0], *gathered[2:])


class Pops(nn.Module):
    """Takes its input out of the batch, and then fails."""

    def forward(self, batch: Any) -> Tensor:
        x = batch.pop("x") if isinstance(batch, dict) else vars(batch).pop("x")
        raise ValueError(f"mine: {tuple(x.shape)}")


@dataclass
class Passed:
    x: Tensor


@pytest.mark.parametrize("is_dict", [True, False])
def test_the_users_own_error_is_the_one_that_is_raised(is_dict: bool) -> None:
    """The call is not made again with what is left of the batch."""
    gate, watch, trips = broken(Pops(), lambda call: lambda batch: call(batch))
    batch: Any = {"x": torch.ones(1, 2)} if is_dict else Passed(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"mine: \(1, 2\)") as caught:
        watch.call(gate.call, (batch,), {})
    assert caught.value.__context__ is None
    assert trips == []
    assert not (batch if is_dict else vars(batch))  # as the call has left it


class Linked:
    """A node of a tree, which knows what it is a part of."""


@dataclass
class Node(Linked):
    x: Tensor
    parent: Any = None


def test_arguments_that_cannot_be_looked_through_are_passed_on() -> None:
    class Roots(nn.Linear):
        def forward(self, node: Any) -> Any:
            return super().forward(node.parent.x)

    node = Node(torch.ones(1, 2), Node(torch.ones(1, 2)))
    node.parent.parent = node
    gate, watch, _ = broken(Roots(2, 2), lambda call: lambda node: call(node))
    runner = runner_of(broken(nn.Linear(2, 2), gives_nan)[0], watch)
    runner._run.gate = gate
    check = check_of(runner)
    assert check.recorded((node,), {}).shape == (1, 2)
    assert check.take_finding() is not None
    assert runner.learn((node,), {}, torch.ones(1))
    assert watch.call(gate.call, (node,), {}).shape == (1, 2)


def test_a_model_on_the_meta_device_is_called_as_ever() -> None:
    gate, _, _ = broken(nn.Linear(2, 2, device="meta"), gives_nan)
    run = SimpleNamespace(model=gate.model, device=torch.device("meta"), gate=gate, observed=Observed())
    replays = Replays(run, SimpleNamespace(active={}, trip=print, close=list), SimpleNamespace())  # type: ignore[arg-type]
    runner: Any = StepWatch(replays)
    x = torch.ones(1, 2, device="meta")
    assert runner.learn((x,), {}, gate.plain(x))
    assert run.observed.input_dtypes == {"torch.float32"} and not run.observed.autocast
    run.device = torch.device("cpu")  # its weights have been filled
    gate.model.to_empty(device="cpu")
    check_of(runner).expect({"one": None})
    assert runner.calls._device.type == "cpu"
    assert runner.call(lambda x: x, (torch.ones(1, 2),), {}).tolist() == [[1.0, 1.0]]


def test_that_the_loop_differentiates_gradients_again_is_seen_whenever_a_call_is_looked_at() -> None:
    """As the penalty of a GAN that comes in every sixteenth step."""
    x = torch.ones(1, 2, requires_grad=True)

    def penalised(outputs: Tensor) -> None:
        torch.autograd.grad(outputs.square().sum(), x, create_graph=True)

    gate, watch, _ = broken(nn.Linear(2, 2), lambda call: lambda x: call(x))
    runner = runner_of(gate, watch)
    observed = runner._run.observed
    penalised(runner.call(gate.call, (x,), {}))
    assert "create_graph" in observed.needs_graphs
    observed.needs_graphs = ""
    penalised(check_of(runner).recorded((x,), {}))
    assert "create_graph" in observed.needs_graphs


@pytest.mark.parametrize("raises", [True, False])
def test_a_call_that_has_written_to_its_arguments_is_not_made_again(raises: bool) -> None:
    class Logs(nn.Linear):
        def forward(self, x: Tensor, log: list[str]) -> Tensor:
            log.append("called")
            return super().forward(x)

    def spoils(call: Any) -> Any:
        def run_call(*args: Any) -> Any:
            outputs = call(*args)
            if raises:
                raise ValueError("the strategy's own")
            return outputs * float("nan")

        return run_call

    gate, watch, trips = broken(Logs(2, 2), spoils)
    log: list[str] = []
    expected: Any = pytest.raises(ValueError, match="own") if raises else contextlib.nullcontext()
    with expected:
        assert watch.call(gate.call, (torch.ones(1, 2), log), {}).isnan().all()
    assert log == ["called"]
    assert len(trips) == 1 and "can't be made again" in trips[0]


class Replaces(nn.Module):
    """Puts another codebook in the place of the one before, as a moving average of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(2, 2), nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.code = nn.Parameter(0.5 * self.code + 0.5 * x.detach().mean(0), requires_grad=False)
        return self.layer(x + self.code)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_parameter_that_a_bad_call_has_replaced_is_put_back(is_recorded: bool) -> None:
    torch.manual_seed(0)
    model, x = Replaces(), torch.ones(1, 2)
    gate, watch, trips = broken(model, gives_nan)
    if is_recorded:
        runner_of(gate, watch)
    kept = model.code
    expected, after = gate.plain(x), model.code
    model.code = kept
    outputs = watch.call(gate.call, (x,), {})
    assert len(trips) == 1
    assert torch.equal(outputs, expected)
    assert torch.equal(model.code, after)
