"""Which errors of a call under strategies may be theirs: those are met by a plain call, all others reach the loop."""

from __future__ import annotations

import signal
from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.guard.faults import may_be_of_strategies
from accel.run.gate import Call
from accel.session.plan_check import _failure
from tests.accel.guard_replays import broken, same


class Stop(Exception):
    """A class of the loop's own."""


class Model(nn.Module):
    """Counts its calls, not in a list, which would be put back, and does in each what it is given."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(2, 2), work
        self._calls: UserList[int] = UserList()

    def forward(self, x: Tensor) -> Any:
        self._calls.append(1)
        self.work(x)
        return self.layer(x)


def raises(error: Exception) -> Callable[[Any], Any]:
    def work(_: Any) -> None:
        raise error

    return work


def asserts(x: Tensor) -> None:
    assert x.dtype == torch.float64, "mine"


def by_signal(_: Any) -> None:
    signal.raise_signal(signal.SIGUSR1)


def handled(signum: int, frame: Any) -> None:
    raise RuntimeError("out of time")


OWN: dict[str, Callable[[Tensor], Any]] = {
    "a class of the loop's": raises(Stop("mine")),
    "a class of Python's": raises(RuntimeError("mine")),
    "a class of torch's": raises(torch.OutOfMemoryError("mine")),
    "an assertion": asserts,
    "a signal": by_signal,
    "a key": lambda x: {}[x.dtype],
    "a file": lambda x: open("/no/such/file"),  # noqa: SIM115
    "the end of an iterator": lambda x: next(iter(())),
    "the standard library": lambda x: signal.Signals("no such signal"),
    "an argument of torch's": lambda x: F.dropout(x, 2.0),
    "an assertion of torch's": lambda x: torch._assert(False, "mine"),
    "tensors that are not close": lambda x: torch.testing.assert_close(x, x + 1),
    "an operator of Python's": lambda x: x.grad + 1,  # type: ignore[operator]
    "an index into nothing": lambda x: x.grad[0],  # type: ignore[index]
}
EITHERS: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda x: x @ torch.ones(3, 3),
    "a view": lambda x: torch.ones(2, 3).t().view(6),
    "an operator's type": lambda x: x.bfloat16().detach().numpy(),
    "no room": lambda x: torch.empty(1 << 60),
}


@pytest.fixture
def _signal_is_handled() -> Any:
    before = signal.signal(signal.SIGUSR1, handled)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_signal_is_handled")
@pytest.mark.parametrize("as_hook", [False, True])
@pytest.mark.parametrize("name", [*OWN, *EITHERS])
def test_the_model_s_own_errors_reach_the_loop(name: str, as_hook: bool) -> None:
    work = {**OWN, **EITHERS}[name]
    model = Model((lambda x: None) if as_hook else work)
    if as_hook:
        model.layer.register_forward_hook(lambda module, given, output: work(given[0]))
    gate, watch, trips = broken(model, same)
    x = torch.ones(1, 2)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        model._call_impl(x)  # type: ignore[no-untyped-call]
    model._calls.clear()
    with pytest.raises(type(expected.value)) as caught:
        watch.call(gate.call, (x,), {})
    assert caught.value.args == expected.value.args and caught.value.__context__ is None
    assert (sum(model._calls), trips) == (1 if name in OWN else 2, [])


def in_bfloat16(call: Call) -> Call:
    return lambda x: call(x.bfloat16())


@pytest.mark.parametrize("within", ["operator", "type"])
def test_an_operator_that_fails_by_what_a_strategy_does_is_its_fault(within: str) -> None:
    """Each takes the plain input and not the strategy's, in the model's own code."""
    model = Model(lambda x: x.detach().numpy() if within == "type" else None)
    gate, watch, trips = broken(model, in_bfloat16)
    assert watch.call(gate.call, (torch.ones(1, 2),), {}).isfinite().all()
    assert len(trips) == 1 and trips[0].startswith("it raised ")


def test_an_error_within_a_check_proves_nothing_where_it_is_the_model_s_own() -> None:
    x = torch.ones(1, 2)
    for work in (*OWN.values(), *EITHERS.values()):
        if work is by_signal:
            continue
        with pytest.raises(Exception) as caught:  # noqa: PT011
            Model(work)(x)
        assert isinstance(caught.value, Exception)
        finding = _failure(caught.value)
        assert bool(finding.problem) == may_be_of_strategies(caught.value) == (work in EITHERS.values())
        assert bool(finding.unsure) != bool(finding.problem)
