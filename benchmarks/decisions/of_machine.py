"""Faults of what is said of the machine: its crowd, the profiler's verdict, the loader's engine, gradients' scheme."""

from __future__ import annotations

from typing import Any

from accel.profiler.trial import TrialConfig
from benchmarks.decisions.fault import faults, is_now, property_becomes, result_becomes, returns

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
    *faults(
        "crowd meter",
        "accel.profiler.host",
        _METER,
        stuck_crowded=("always sees busy cores", "CrowdMeter.cores", returns(64.0)),
        stuck_quiet=("never sees busy cores", "CrowdMeter.cores", returns(0.0)),
        counts_its_own=("takes this run's own work for that of others", "_tree_seconds", returns(0.0)),
    ),
    *faults(
        "crowd meter",
        "accel.search.outlook",
        _CROWD,
        search_sees_no_crowd=("measures under neighbours what depends on them", "is_crowded", returns(False)),
        search_sees_a_crowd=(
            "puts off what depends on neighbours that are not there",
            "is_crowded",
            returns(True),
        ),
    ),
    *faults(
        "crowd meter",
        "accel.run.host_load",
        _SHARED,
        neighbours_unseen=(
            "uses all threads beside any neighbour",
            "HostLoad.is_shared",
            property_becomes(lambda self, right: False),
        ),
        neighbours_never_leave=(
            "leaves cores to neighbours that have left",
            "HostLoad.is_quiet",
            property_becomes(lambda self, right: False),
        ),
    ),
    *faults(
        "crowd meter",
        "accel.search.state",
        _SHARED,
        remembers_neighbours=(
            "remembers what was kept beside neighbours for every run",
            "SearchState.lasting_plan",
            lambda right: lambda self: self.plan,
        ),
    ),
    *faults(
        "verdict",
        "accel.profiler.naming",
        _NAMING,
        smallest_cause_first=("names the smallest cause first", "ordered", result_becomes(_smallest_first)),
        overlap_is_decided=("puts causes in order that overlap within noise", "too_close", returns("")),
        crowd_is_no_finding=("names causes from figures that a crowd has distorted", "_crowded", returns(None)),
        neighbours_hide_all=("names nothing but the crowd beside one busy process", "_hides_all", returns(True)),
        neighbours_hide_nothing=("names causes whatever else is on the cores", "_hides_all", returns(False)),
        small_causes_beside_neighbours=(
            "names a small cause that a neighbour has made large enough",
            "WORTH_BESIDE",
            is_now(0.0),
        ),
        few_steps_suffice=("judges by a handful of steps", "diagnose", _whatever_the_steps),
    ),
    *faults(
        "verdict",
        "accel.profiler.diagnose.findings",
        _NAMING,
        threshold_halved=("calls a twentieth of the step a cause", "SURE", is_now(0.05)),
        threshold_doubled=("calls a fifth of the step no cause", "SURE", is_now(0.20)),
        no_borderline=("calls nothing borderline", "SURE", is_now(0.08)),
    ),
    *faults(
        "verdict",
        "accel.profiler.diagnose.findings",
        ("tests/profiler/test_consistency.py",),
        contradictions_stand=(
            "leaves findings that the phases contradict",
            "within_phases",
            lambda right: lambda findings, shares: list(findings),
        ),
    ),
    *faults(
        "verdict",
        "accel.profiler.conclusion.verdict",
        _JUDGING,
        experiments_are_ignored=("names what an experiment has shown to save nothing", "judge", returns([])),
    ),
    *faults(
        "loader",
        "accel.dataio.passes.rounds",
        _TUNER,
        keeps_the_slowest=("takes the slowest of the engines tried", "Rounds.best", property_becomes(_slowest)),
        simplicity_is_worth_nothing=("takes more workers for a gain within noise", "_SIMPLER", is_now(0.0)),
        one_round_decides=("decides after one block of each", "Rounds._settled", returns(True)),
        rounds_never_settle=("goes on with engines that differ in nothing", "Rounds._settled", returns(False)),
    ),
    *faults(
        "loader",
        "accel.dataio.passes.tuner",
        _TUNER,
        never_chooses_anew=("stays with an engine that has become slow", "Tuner._watch", returns(None)),
        more_workers_than_cores=("tries workers that only wait for a core", "most_workers", returns(16)),
    ),
    *faults(
        "scheme",
        "accel.comm.selector",
        _SCHEMES,
        small_gains_unproved=(
            "keeps a gain that no trial has shown",
            "_TRIAL",
            is_now(TrialConfig(looks=(2, 3), alpha=0.4, keep_gain=-0.9, drop_gain=-0.95)),
        ),
    ),
    *faults(
        "scheme",
        "accel.comm.cost_model.choice",
        (*_SCHEMES, "tests/comm/test_choice.py"),
        tries_the_worst=(
            "tries first what is predicted to be slowest",
            "worthwhile",
            result_becomes(lambda options: options[::-1]),
        ),
    ),
    *faults(
        "scheme",
        "accel.comm.cost_model.choice",
        ("tests/comm/test_choice.py", *_SCHEMES),
        exactness_is_worth_nothing=(
            "of two alike takes the less exact one",
            "fidelity",
            result_becomes(lambda fidelity: -fidelity),
        ),
    ),
    *faults(
        "scheme",
        "accel.comm.ranks.object_group",
        ("tests/comm/test_failure.py",),
        ranks_disagree=("lets each rank decide for itself", "ObjectGroup.decide", _each_for_itself),
    ),
]
