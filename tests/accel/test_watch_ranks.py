"""Several ranks: a call that one of them makes again talks to no other, since those make no such call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.run import ranks
from accel.run.gate import Call
from tests.accel.test_guard_alone import Parallel, state
from tests.accel.test_watch_outputs import broken


def times_nan(call: Call) -> Call:
    return lambda *args: call(*args) * float("nan")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "are_several", lambda: True)


@pytest.mark.parametrize("within", [False, True])
def test_a_call_that_is_made_again_sends_no_buffers_and_counts_for_no_step(within: bool, two_ranks: None) -> None:
    parallel = Parallel(nn.Linear(2, 2))
    gate, watch, trips = broken(nn.Sequential(parallel) if within else parallel, times_nan)
    before = state(parallel)
    outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["its output is not finite"] and outputs.isfinite().all()
    # Gradients are reduced in the backward pass of the call that is made again: there is one on each rank.
    assert parallel._told == ["of the step", "buffers", "gradients", "gradients"]
    assert state(parallel) == before
    assert not parallel._forward_pre_hooks


@pytest.mark.parametrize("reached", [False, True])
def test_after_an_error_the_others_are_told_what_they_have_not_been_told(reached: bool, two_ranks: None) -> None:
    def fails(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            if reached:
                call(*args)
            raise ValueError("the strategy's own")

        return run_call

    parallel = Parallel(nn.Linear(2, 2))
    gate, watch, trips = broken(parallel, fails)
    watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["it raised ValueError: the strategy's own"]
    assert (parallel._told.count("of the step"), parallel._told.count("buffers")) == (1, 1)


class Calls(nn.Module):
    """Counts its calls; its norm would talk to the other ranks within each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self._calls = nn.Linear(2, 2), nn.SyncBatchNorm(2), 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_model_that_talks_within_its_call_is_not_called_again(two_ranks: None) -> None:
    model = Calls()
    gate, watch, trips = broken(model, times_nan)
    outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert (model._calls, bool(outputs.isnan().all())) == (1, True)
    assert len(trips) == 1 and trips[0].startswith("its output is not finite")


def test_on_one_rank_it_is_called_again() -> None:
    model = Calls()
    gate, watch, _ = broken(model, times_nan)
    assert watch.call(gate.call, (torch.ones(1, 2),), {}).isfinite().all()
    assert model._calls == 2
