"""Subnormal numbers are 0 in all of torch's threads while the strategy is on, which is tried once there are some."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.search.state import Candidate
from accel.strategies import flush_denormal
from accel.strategies.base import NothingHelps
from accel.strategies.flush_denormal import BySubnormals, FlushDenormal, flushes, subnormal_share
from tests.accel.memory import FakeMemory
from tests.accel.simulation import FAST, Machine, candidate, simulate

applies = pytest.mark.skipif(bool(flush_denormal._refusal()), reason=f"here {flush_denormal._refusal()}")
TINY = torch.finfo(torch.float32).tiny


def run_of(device: str = "cpu", *optimizers: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(device=torch.device(device), optimizers=list(optimizers))


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def halved() -> Tensor:
    """Return the bits of subnormal numbers that all threads have computed."""
    return (torch.full((32768 * 8,), TINY) * 0.5).view(torch.int32)


@applies
def test_all_threads_flush_while_it_is_on(threads: int) -> None:
    strategy = FlushDenormal()
    assert halved().all()  # whose threads were there before
    for _ in range(2):
        strategy.enable(run_of(), None)
        assert not halved().any() and flushes()
        strategy.disable(run_of())
        assert halved().all() and not flushes()


@applies
def test_threads_that_begin_later_flush_too(threads: int) -> None:
    strategy = FlushDenormal()
    strategy.enable(run_of(), None)
    torch.set_num_threads(threads + 1)
    assert not halved().any()
    strategy.disable(run_of())
    assert halved().all()


@applies
def test_it_stays_on_for_the_model_that_keeps_it() -> None:
    first, second = FlushDenormal(), FlushDenormal()
    first.enable(run_of(), None)
    assert first.refusal(run_of()) == ""
    assert second.refusal(run_of()) == "it is on already, for another model of this process"
    second.enable(run_of(), None)
    first.disable(run_of())
    assert not halved().any()
    second.disable(run_of())
    assert halved().all()


@applies
def test_threads_that_do_not_follow_are_a_reason_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = FlushDenormal()
    monkeypatch.setattr(flush_denormal, "_all_threads_flush", lambda: False)
    with pytest.raises(NothingHelps, match="threads could not be made"):
        strategy.enable(run_of(), None)
    strategy.disable(run_of())
    assert halved().all() and not flushes()


@applies
def test_what_the_user_has_set_stays() -> None:
    torch.set_flush_denormal(True)
    try:
        assert FlushDenormal().refusal(run_of()) == "torch.set_flush_denormal(True) is set already"
    finally:
        torch.set_flush_denormal(False)
    assert FlushDenormal().refusal(run_of()) == ""


def test_where_it_can_not_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FlushDenormal().refusal(run_of("cuda")) == "the model's numbers are not the CPU's but those of cuda"
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: False)
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        assert FlushDenormal().refusal(run_of()) == "the CPU can't treat subnormal numbers as 0"
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1"))
    assert "alone" in FlushDenormal().refusal(run_of())


# -- how it is judged --------------------------------------------------------------------------------------------------


def optimizer_of(*states: Any) -> torch.optim.Optimizer:
    """Return an optimizer with these values in its state."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {str(number): value for number, value in enumerate(states)}
    optimizer.state["of no parameter"] = 1  # type: ignore[index, assignment]
    return optimizer


def with_subnormals(rows: int, subnormal: int, dtype: torch.dtype = torch.float32) -> Tensor:
    state = torch.ones(rows, 50, dtype=dtype)
    state[:subnormal] = torch.finfo(dtype).tiny / 4
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "subnormal", "share"), [(1000, 250, 0.25), (1000, 0, 0.0), (10, 10, 1.0)])
def test_the_share_of_subnormal_numbers(rows: int, subnormal: int, share: float, dtype: torch.dtype) -> None:
    state = with_subnormals(rows, subnormal, dtype)
    assert subnormal_share([optimizer_of(state)]) == pytest.approx(share, abs=0.01)
    assert subnormal_share([optimizer_of(-state)]) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    "state",
    [
        None,
        3,
        torch.empty(0),
        torch.zeros(100),
        torch.full((5,), 7),
        torch.full((20, 20), TINY / 4).t()[::2],
        torch.full((4, 4), TINY / 4).to_sparse(),
        torch.full((4, 4), torch.finfo(torch.float16).tiny / 4, dtype=torch.float16),
        torch.full((4,), TINY / 4, device="meta"),
    ],
)
def test_what_can_not_be_looked_at_has_none(state: Any) -> None:
    assert subnormal_share([optimizer_of(state), optimizer_of()]) == 0.0
    assert subnormal_share([]) == 0.0


def test_moments_of_rows_without_gradients_become_subnormal() -> None:
    """The case that it is for: an embedding under Adam, most of whose rows do not occur."""
    table = nn.Embedding(1000, 8)
    optimizer = torch.optim.Adam(table.parameters())
    share = []
    for step in range(900):
        optimizer.zero_grad()
        table(torch.arange(1000 if step == 0 else 10)).sum().backward()
        optimizer.step()
        share.append(subnormal_share([optimizer]) if step in (500, 899) else 0.0)
    assert share[500] == 0.0 and share[899] > 0.3


@dataclass
class Decaying(Machine):
    """Its steps are slow from one on; where subnormal numbers are in a state, until they are flushed for once."""

    begins: int = 1000
    in_state: bool = False
    has_flushed: bool = False

    @property
    def are_there(self) -> bool:
        return self.step >= self.begins and not (self.in_state and self.has_flushed)

    def seconds(self, plan: dict[str, Any]) -> float:
        self.has_flushed = self.has_flushed or (self.step >= self.begins and "flush" in plan)
        return super().seconds(plan) * (1.5 if self.are_there and "flush" not in plan else 1.0)

    def flush(self) -> Candidate:
        share = lambda: 0.5 if self.in_state and self.are_there else 0.0  # noqa: E731
        return candidate("flush", kind=BySubnormals, may_grow=True, share_now=share)


@pytest.mark.parametrize("in_state", [False, True])
@pytest.mark.parametrize("begins", [0, 300, 1000])
def test_it_is_kept_once_there_are_such_numbers(begins: int, in_state: bool) -> None:
    machine = Decaying(noise=0.02, speed={"good": 1.3}, begins=begins, in_state=in_state)
    flush = machine.flush()
    state = simulate([flush, candidate("good")], machine, until_settled=False, steps=3000, pace=FAST)
    assert list(state.plan) == ["good", "flush"]
    assert state.rows["flush"].gain == pytest.approx(1.5, rel=0.04)
    assert ("before it, when 50% of the state was" in state.rows["flush"].why) == in_state
    assert state.closing is not None and state.closing.gain == pytest.approx(1.5 * 1.3, rel=0.05)
    assert "flush" in machine.actions[-1].plan and flush.times_reopened == (begins > 0)


def test_where_there_are_none_its_verdict_stands_but_is_not_remembered() -> None:
    machine, memory = Decaying(noise=0.02, begins=10**6), FakeMemory()
    flush = machine.flush()
    state = simulate([flush], machine, until_settled=False, steps=3000, pace=FAST, memory=memory)
    assert state.plan == {} and flush.times_reopened == 0
    assert state.rows["flush"].status == "undone"
    assert memory.search is None or "flush" not in memory.search.lost
