"""What more there is: by how much a step would be shorter with what the user's level leaves out. It never runs."""

from __future__ import annotations

from accel.profiler.bottleneck import Bottleneck
from accel.search import costs
from accel.search.actions import Action, Decisions
from accel.search.experiment import act
from accel.search.state import Candidate, SearchState

FORMATS = {"autocast_bf16": "bfloat16", "tf32": "TF32"}
"""Strategy → the format in which it computes, in words."""
_DEVICES = ("cuda", "cpu with AMX")
"""Kinds of device with arithmetic for them."""
_MOSTLY = 0.5
"""Share of the plain step that the model's calls must take."""
LEAST = 1.1
"""Gain that is worth a sentence."""
_MOST = 0.95
"""Share of a step that replays may seem to save at most."""


def ask_for_more(state: SearchState) -> Decisions:
    """Replay the recorded call plainly and with each of these, once the budget allows for it, and note the gain."""
    for candidate in _left_out(state):
        if not costs.affordable(state, costs.check_s(state, candidate)):
            continue
        was_out_of_turn, state.is_out_of_turn = state.is_out_of_turn, True  # what it takes is a cost of the search
        try:
            check = {candidate.name: candidate.settings()[0]}
            result = yield from act(state, Action(plan=state.plan, steps=state.pace.guard, check=check))
        finally:
            state.is_out_of_turn = was_out_of_turn
        name, finding = candidate.name, result.finding
        plain_s, with_s = (0.0, 0.0) if finding is None else finding.replays_s
        saved = min(_MOST, (plain_s - with_s) / state.plain_s)
        state.offers[name] = round(1 / (1 - saved), 2) if plain_s > 0 and not (finding and finding.problem) else 1.0
        if state.offers[name] < LEAST:
            continue
        why = f"replays of the call would make a step about {state.offers[name]:.1f}x as fast"
        state.note(f"{name} is left out by allow=; {why}")


def _left_out(state: SearchState) -> list[Candidate]:
    """Return what has not been asked, where most of the step is the model's own work in fp32."""
    if state.device not in _DEVICES or state.replay is not None or state.plain_ms <= 0:
        return []
    if state.plain_diagnosis.share(Bottleneck.COMPUTE) < _MOSTLY:
        return []
    named = (state.candidates[name] for name in FORMATS if name in state.candidates and name not in state.offers)
    return [each for each in named if each.row.status == "not allowed" and not each.refusal()]
