"""What more there is: a sentence on what a wider `allow` would give, from replays, and never a change of precision."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import accel
from accel import strategies
from accel.profiler.bottleneck import Bottleneck
from accel.report.optimize_document import summary
from accel.run import Run
from accel.search import outlook
from accel.search.actions import Action, Result
from accel.strategies import Exactness
from accel.strategies.autocast_bf16 import AutocastBf16
from tests.accel.loops import advance, make, training
from tests.accel.run_reports import full
from tests.accel.simulation import PLAIN_S, Machine, candidate, simulate

NOT_ALLOWED = ("not allowed", "it needs allow='reduced'")


class Replays(Machine):
    """Of a step of 20 ms the call takes 18; replays under a format take a part of that."""

    parts: ClassVar = {"autocast_bf16": 0.125, "tf32": 0.2}

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        for name in action.check or {}:
            if result.finding is not None and name in self.parts:
                result.finding.replays_s = 0.9 * PLAIN_S, 0.9 * PLAIN_S * self.parts[name]
                result.aside_s += 6 * PLAIN_S
        return result


def left_out(*names: str) -> list[Any]:
    options: dict[str, Any] = {"exactness": Exactness.REDUCED, "treats": frozenset({Bottleneck.COMPUTE})}
    return [candidate(name, ruled_out=NOT_ALLOWED, **options) for name in names]


def test_replays_tell_what_a_wider_level_would_give() -> None:
    machine = Replays(data_share=0.02)
    state = simulate([*left_out("autocast_bf16", "tf32", "amp_o2"), candidate("good")], machine, device="cuda")
    assert state.offers == {"autocast_bf16": 4.71, "tf32": 3.57}  # 1 / (1 - 0.9 * 0.875)
    assert not any({"autocast_bf16", "tf32"} & set(action.plan) for action in machine.actions)
    assert not any("amp_o2" in (action.check or {}) for action in machine.actions)
    assert state.rows["tf32"].status == "not allowed"


class ColdReplays(Replays):
    """Both replays take four times as long as in the loop, which once made an offer of 20x."""

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if result.finding is not None:
            plain_s, with_s = result.finding.replays_s
            result.finding.replays_s = 4 * plain_s, 4 * with_s
        return result


def test_what_replays_take_beyond_a_step_is_no_gain() -> None:
    state = simulate(left_out("tf32"), ColdReplays(data_share=0.02), device="cuda")
    assert state.offers == {"tf32": 5.0}  # as of the call alone


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu"}, {"device": "cuda", "replay": {}}, {"device": "cuda", "budget": "0.01s"}],
    ids=["no arithmetic for it", "a replayed plan", "no budget"],
)
def test_nobody_is_asked_where_it_says_nothing_or_is_too_dear(options: dict[str, Any]) -> None:
    machine = Replays(data_share=0.02)
    state = simulate(left_out("autocast_bf16"), machine, **options)
    assert not state.offers and not any(action.check for action in machine.actions)


def test_a_step_that_is_not_the_models_work_has_no_offer() -> None:
    assert not simulate(left_out("autocast_bf16"), Replays(data_share=0.7), device="cuda").offers


def test_it_is_asked_once_the_run_is_long_enough_and_only_once() -> None:
    machine = Replays(data_share=0.02)
    state = simulate(left_out("tf32"), machine, device="cuda", budget="3%", steps=4000, until_settled=False)
    asked = [action for action in machine.actions if action.check]
    assert state.offers and len(asked) == 1 and machine.actions.index(asked[0]) > 1
    assert state.cost_s == pytest.approx(6 * PLAIN_S)


def test_what_trips_in_a_replay_is_no_verdict() -> None:
    machine = Replays(data_share=0.02, trips_at={"tf32": 0})

    class Trips(Replays):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            if "tf32" in (action.check or {}):
                result.trips["tf32"] = "it could not be switched on"
            return result

    machine = Trips(data_share=0.02)
    state = simulate(left_out("tf32"), machine, device="cuda")
    assert state.rows["tf32"].status == "not allowed" and not state.candidates["tf32"].has_failed()


def test_the_summary_says_it_in_one_sentence() -> None:
    report = full(model="Net", offers={"bfloat16": 4.71, "TF32": 3.4})
    sentence = "allow='reduced' would make a step about 4.7x as fast (bfloat16), 3.4x (TF32)"
    assert summary(report, "whole").count(sentence) == 1
    assert str(report).count(sentence) == 1
    assert "allow='reduced' would" not in summary(full(model="Net"), "whole")


def _is_said_at_the_end(model: torch.nn.Module, state: Any) -> None:
    """Where the summary came too early for it."""
    journal = accel.entry.MODELS[model].journal  # type: ignore[attr-defined]
    assert journal._concluded is not None
    state.offers["autocast_bf16"] = 4.7
    sentence = "allow='reduced' would make a step about 4.7x as fast (bfloat16)"
    for early, late in (({}, sentence), (state.offers, "")):
        journal._concluded.offers = early
        assert journal._ending(journal.report()) == late


def test_a_real_run_is_asked_and_trains_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "device_kind", property(lambda self: "cpu with AMX"))
    monkeypatch.setattr(outlook, "_MOSTLY", 0.0)  # the model is a small one
    monkeypatch.setattr(strategies, "REGISTRY", [AutocastBf16])

    def weights(follow: bool) -> list[torch.Tensor]:
        model, loader, optimizer = make()
        if follow:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60, cache=False)
        advance(training(model, loader, optimizer), 60)
        if follow:
            state = accel.entry.MODELS[model].journal._controller  # type: ignore[attr-defined]
            assert set(state.offers) == {"autocast_bf16"} and state.offers["autocast_bf16"] > 0
            assert state.rows["autocast_bf16"].status == "not allowed"
            _is_said_at_the_end(model, state)
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, weights(False), weights(True)))
