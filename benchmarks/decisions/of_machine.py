"""Faults of what is said of the machine: its crowd, the profiler's verdict, the loader's engine, gradients' scheme."""

from __future__ import annotations

from typing import Any

from accel.profiler.trial import TrialConfig
from benchmarks.decisions.fault import Fault, is_now, property_becomes, result_becomes, returns

_METER = ("tests/profiler/test_host.py",)
_SHARED = ("tests/accel/test_shared_host.py",)
_CROWD = ("tests/accel/test_crowded_machine.py",)
_NAMING = ("tests/profiler/test_naming.py", "tests/profiler/test_consistency.py")
_JUDGING = ("tests/profiler/test_judging.py",)
_TUNER = ("tests/dataio/test_rounds.py", "tests/dataio/test_tuner.py", "tests/dataio/test_tuner_machines.py")
_SCHEMES = ("tests/comm/test_search_trials.py",)


def _smallest_first(findings: list[Any]) -> list[Any]:
    return findings[::-1]


def _whatever_the_steps(right: Any) -> Any:
    return lambda evidence, *, min_steps=0: right(evidence, min_steps=0)


def _slowest(rounds: Any, best: Any) -> Any:
    left = rounds._left
    return max(left, key=lambda tried: tried.score) if rounds.done and left else best


def _each_for_itself(right: Any) -> Any:
    return lambda self, own, decision: decision([own] * self.size)


FAULTS = [
    # Crowd meter
    Fault(
        "stuck_crowded",
        "crowd meter",
        "always sees busy cores",
        "accel.profiler.host:CrowdMeter.cores",
        returns(64.0),
        _METER,
    ),
    Fault(
        "stuck_quiet",
        "crowd meter",
        "never sees busy cores",
        "accel.profiler.host:CrowdMeter.cores",
        returns(0.0),
        _METER,
    ),
    Fault(
        "counts_its_own",
        "crowd meter",
        "takes this run's own work for that of others",
        "accel.profiler.host:_tree_seconds",
        returns(0.0),
        _METER,
    ),
    Fault(
        "search_sees_no_crowd",
        "crowd meter",
        "measures under neighbours what depends on them",
        "accel.search.outlook:is_crowded",
        returns(False),
        _CROWD,
    ),
    Fault(
        "search_sees_a_crowd",
        "crowd meter",
        "puts off what depends on neighbours that are not there",
        "accel.search.outlook:is_crowded",
        returns(True),
        _CROWD,
    ),
    Fault(
        "neighbours_unseen",
        "crowd meter",
        "uses all threads beside any neighbour",
        "accel.run.host_load:HostLoad.is_shared",
        property_becomes(lambda self, right: False),
        _SHARED,
    ),
    Fault(
        "neighbours_never_leave",
        "crowd meter",
        "leaves cores to neighbours that have left",
        "accel.run.host_load:HostLoad.is_quiet",
        property_becomes(lambda self, right: False),
        _SHARED,
    ),
    Fault(
        "remembers_neighbours",
        "crowd meter",
        "remembers what was kept beside neighbours for every run",
        "accel.search.state:SearchState.lasting_plan",
        lambda right: lambda self: self.plan,
        _SHARED,
    ),
    # Verdict
    Fault(
        "smallest_cause_first",
        "verdict",
        "names the smallest cause first",
        "accel.profiler.naming:ordered",
        result_becomes(_smallest_first),
        _NAMING,
    ),
    Fault(
        "threshold_halved",
        "verdict",
        "calls a twentieth of the step a cause",
        "accel.profiler.diagnose.findings:SURE",
        is_now(0.05),
        _NAMING,
    ),
    Fault(
        "threshold_doubled",
        "verdict",
        "calls a fifth of the step no cause",
        "accel.profiler.diagnose.findings:SURE",
        is_now(0.20),
        _NAMING,
    ),
    Fault(
        "no_borderline",
        "verdict",
        "calls nothing borderline",
        "accel.profiler.diagnose.findings:SURE",
        is_now(0.08),
        _NAMING,
    ),
    Fault(
        "overlap_is_decided",
        "verdict",
        "puts causes in order that overlap within noise",
        "accel.profiler.naming:too_close",
        returns(""),
        _NAMING,
    ),
    Fault(
        "crowd_is_no_finding",
        "verdict",
        "names causes from figures that a crowd has distorted",
        "accel.profiler.naming:_crowded",
        returns(None),
        _NAMING,
    ),
    Fault(
        "neighbours_hide_all",
        "verdict",
        "names nothing but the crowd beside one busy process",
        "accel.profiler.naming:_hides_all",
        returns(True),
        _NAMING,
    ),
    Fault(
        "neighbours_hide_nothing",
        "verdict",
        "names causes whatever else is on the cores",
        "accel.profiler.naming:_hides_all",
        returns(False),
        _NAMING,
    ),
    Fault(
        "small_causes_beside_neighbours",
        "verdict",
        "names a small cause that a neighbour has made large enough",
        "accel.profiler.naming:WORTH_BESIDE",
        is_now(0.0),
        _NAMING,
    ),
    Fault(
        "few_steps_suffice",
        "verdict",
        "judges by a handful of steps",
        "accel.profiler.naming:diagnose",
        _whatever_the_steps,
        _NAMING,
    ),
    Fault(
        "contradictions_stand",
        "verdict",
        "leaves findings that the phases contradict",
        "accel.profiler.diagnose.consistency:check",
        lambda right: lambda findings, shares: (list(findings), []),
        ("tests/profiler/test_consistency.py",),
    ),
    Fault(
        "experiments_are_ignored",
        "verdict",
        "names what an experiment has shown to save nothing",
        "accel.profiler.conclusion.judging:judge",
        returns([]),
        _JUDGING,
    ),
    # Loader
    Fault(
        "keeps_the_slowest",
        "loader",
        "takes the slowest of the engines tried",
        "accel.dataio.passes.rounds:Rounds.best",
        property_becomes(_slowest),
        _TUNER,
    ),
    Fault(
        "simplicity_is_worth_nothing",
        "loader",
        "takes more workers for a gain within noise",
        "accel.dataio.passes.rounds:_SIMPLER",
        is_now(0.0),
        _TUNER,
    ),
    Fault(
        "one_round_decides",
        "loader",
        "decides after one block of each",
        "accel.dataio.passes.rounds:Rounds._settled",
        returns(True),
        _TUNER,
    ),
    Fault(
        "rounds_never_settle",
        "loader",
        "goes on with engines that differ in nothing",
        "accel.dataio.passes.rounds:Rounds._settled",
        returns(False),
        _TUNER,
    ),
    Fault(
        "never_chooses_anew",
        "loader",
        "stays with an engine that has become slow",
        "accel.dataio.passes.tuner:Tuner._watch",
        returns(None),
        _TUNER,
    ),
    Fault(
        "more_workers_than_cores",
        "loader",
        "tries workers that only wait for a core",
        "accel.dataio.passes.tuner:most_workers",
        returns(16),
        _TUNER,
    ),
    # Gradients' scheme
    Fault(
        "small_gains_unproved",
        "scheme",
        "keeps a gain that no trial has shown",
        "accel.comm.selector:_TRIAL",
        is_now(TrialConfig(looks=(2, 3), alpha=0.4, keep_gain=-0.9, drop_gain=-0.95)),
        _SCHEMES,
    ),
    Fault(
        "tries_the_worst",
        "scheme",
        "tries first what is predicted to be slowest",
        "accel.comm.cost_model.choice:worthwhile",
        result_becomes(lambda options: options[::-1]),
        (*_SCHEMES, "tests/comm/test_choice.py"),
    ),
    Fault(
        "exactness_is_worth_nothing",
        "scheme",
        "of two alike takes the less exact one",
        "accel.comm.cost_model.choice:fidelity",
        result_becomes(lambda fidelity: -fidelity),
        ("tests/comm/test_choice.py", *_SCHEMES),
    ),
    Fault(
        "ranks_disagree",
        "scheme",
        "lets each rank decide for itself",
        "accel.comm.ranks.object_group:ObjectGroup.decide",
        _each_for_itself,
        ("tests/comm/test_failure.py",),
    ),
]
