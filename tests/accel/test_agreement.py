"""No report contradicts itself: those of the tests, of simulated searches at every moment, and of real runs."""

from __future__ import annotations

import dataclasses
import io
import logging
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accel
from accel.profiler import naming
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.conclusion import verdict
from accel.profiler.evidence import Evidence, OpTime, Roofline, ThreadShare
from accel.profiler.phases import Measurement
from accel.profiler.trace.roofline import measure
from accel.profiler.trace.window import Window
from accel.profiler.trial import Trial
from accel.report import Report, StrategyRow
from accel.report.words import limit_text
from accel.run import Run
from accel.search import outlook
from accel.search.budget import Budget
from accel.search.controller import decisions
from accel.search.state import SearchState
from accel.session.journal import Announcer, Journal
from tests.accel import profile_reports, run_reports, test_report
from tests.accel.agreement import of_profile, of_report, roofs
from tests.accel.loops import advance, advance_until, make, settled, training
from tests.accel.simulation import FAST, Machine, candidate
from tests.accel.simulation import search as search_of
from tests.sampling import examples

RUNNING = ThreadShare(run=0.95, wait=0.02, blocked=0.03)


@pytest.mark.parametrize("make", [run_reports.full, test_report._report])
def test_reports_of_the_tests_agree(make: Callable[[], Report]) -> None:
    assert of_report(make()) == []


@pytest.mark.parametrize("make", [profile_reports.full, profile_reports.refused, profile_reports.wide])
def test_profile_reports_of_the_tests_agree(make: Callable[[], Any]) -> None:
    assert of_profile(make()) == []


# -- what was told ----------------------------------------------------------------------------------------------------


def told(**fields: Any) -> Report:
    return dataclasses.replace(run_reports.full(), **fields)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (told(plain_ms=10.0, accel_ms=8.986, speedup=1.13, samples_per_step=135.95), "the verdict contradicts itself"),
        (
            told(rows=[dataclasses.replace(run_reports.row(), before_ms=25.2, after_ms=24.7, gain=0.97)]),
            "0.97x beside",
        ),
        (told(anatomy_before={"forward": 41.8}, anatomy_after={"outside": 81.4}), "adds up to 81.4 ms"),
        (
            told(bottleneck="host", bottleneck_share=0.6, anatomy_after={"host": 0.64, "forward": 15.36}),
            "its phase takes 4%",
        ),
        (told(plan={}, speedup=1.0), "the plan holds"),
        (told(speedup=None, plain_ms=None), "the search is done and there is no speed-up of the whole"),
    ],
)
def test_the_check_sees_what_was_seen(report: Report, words: str) -> None:
    """Each of these was told by a report."""
    assert any(words in said for said in of_report(report)), of_report(report)


def test_the_check_sees_an_operator_above_its_roof() -> None:
    report = profile_reports.full()
    report.experiments[0].after_ms = 150.0
    assert any("and it saves 67" in said for said in of_profile(report))


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(0.001, 1e5), st.floats(0.05, 50), st.floats(0.0, 0.5), st.one_of(st.none(), st.floats(0.1, 4096)))
def test_one_trial_has_one_estimate(plain_s: float, gain: float, noise: float, samples: float | None) -> None:
    """Whatever the steps, on a machine that drifts: ratio, both times and samples a second are one another's."""
    trial, number = Trial(), 0
    while trial.verdict is None:
        number += 1
        step = plain_s * (1 + noise * number) / (gain if trial.arm == "B" else 1.0)
        trial.record([step * (1 + noise * (n % 3)) for n in range(5)])
    found = trial.outcome()
    row = StrategyRow(name="x", summary="", treats=[], exactness="exact", status="kept")
    row.before_ms, row.after_ms, row.gain = found.before_ms, found.after_ms, found.gain
    row.gain_low, row.gain_high = found.low, found.high
    report = Report(
        state="done",
        plain_ms=found.before_ms,
        accel_ms=found.after_ms,
        speedup=found.gain,
        speedup_low=found.low,
        speedup_high=found.high,
        samples_per_step=samples,
        rows=[row],
        plan={"x": None},
    )

    assert found.before_ms / found.after_ms == pytest.approx(found.gain)
    assert of_report(report) == []


# -- simulated searches ------------------------------------------------------------------------------------------------


class Followed:
    """A search on a simulated machine, with its journal."""

    def __init__(self, candidates: list[Any], machine: Machine, **options: Any) -> None:
        run = Run(nn.Linear(2, 2), [], [], None, None)  # type: ignore[arg-type]
        self.printed = io.StringIO()
        voice = Announcer()
        self.controller = search_of(candidates, announce=voice.announce, pace=FAST, **options)
        counts = {"rank": 0, "steps": 0, "samples_per_step": 32.0}
        self.session: Any = SimpleNamespace(run=run, active={}, alive=True, failed="", **counts)
        self.session.switchboard = SimpleNamespace(note=lambda name: "")
        self.journal = Journal(
            self.session, self.controller, voice, allow="reordered", budget="", report=None, replayed=None
        )
        self._machine, self._decisions = machine, decisions(self.controller)
        self._action = next(self._decisions)
        self.settled = False

    def step(self) -> None:
        """Take one action; the report is printed when a search ends, as in a run."""
        was_settled = self._action.after_search
        with redirect_stderr(self.printed):
            self._action = self._decisions.send(self._machine.answer(self._action))
            self.session.steps = self._machine.step
            if self._action.after_search and not (self.settled and was_settled):
                self.settled = self.journal.search_has_ended()


def some_candidates() -> list[Any]:
    return [
        candidate("good", phase="forward"),
        candidate("several", settings=(1, 2, 4)),
        candidate("input", treats=frozenset({Bottleneck.INPUT})),
        candidate("wrong"),
        candidate("dear", cost_s=3.0),
        candidate("free", touches=frozenset()),
        candidate("barred", ruled_out=("not allowed", "it is lossy"), refusal=lambda: "it does not apply"),
        candidate("off", ruled_out=("disabled", "left out")),
    ]


@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.05, 0.3]),
    speeds=st.lists(st.sampled_from([0.8, 1.0, 1.02, 1.3, 2.0]), min_size=8, max_size=8),
    changes_at=st.sampled_from([0, 150, 900]),
    trips_at=st.sampled_from([10**9, 60, 700]),
    slower_from=st.sampled_from([10**9, 800]),
    budget=st.sampled_from([1e9, "10%"]),
    waits=st.booleans(),
)
def test_reports_of_a_search_agree_at_every_moment(
    seed: int,
    noise: float,
    speeds: list[float],
    changes_at: int,
    trips_at: int,
    slower_from: int,
    budget: Any,
    waits: bool,
) -> None:
    names: list[Any] = ["good", ("several", 1), ("several", 2), ("several", 4), "input", "wrong", "dear", "free"]
    machine = Machine(
        speed=dict(zip(names, speeds, strict=True)),
        noise=noise,
        seed=seed,
        wrong=frozenset({"wrong"}),
        trips_at={"good": trips_at},
        regime=lambda step: "other" if changes_at and step >= changes_at else "shape",
        drift=lambda step: 1.5 if step >= slower_from else 1.0,
        data_share=0.3,
        thread=lambda step: ThreadShare(run=0.4, wait=0.6, blocked=0.0) if waits else RUNNING,
    )
    search = Followed(some_candidates(), machine, budget=budget)
    last, seen = "", None
    while machine.step < 1500:
        for _ in range(1 + seed % 7):
            search.step()
        report = search.journal.report()
        looks = (report.state, [row.status for row in report.rows])
        assert of_report(report, forms=looks != seen) == []
        seen = looks
        if last and not last.startswith("no verdict") and not search.controller.reopened:
            # What a search has found stands until another one has ended, unless it was undone, or more is kept.
            undone = any(row.status == "undone" for row in search.controller.rows.values())
            assert undone or report.plan or not report.verdict().startswith("no verdict")
        assert report.plan.keys() >= search.controller.plan.keys()
        last = report.verdict()
    search.journal._finished = True
    ended = search.journal.report()
    assert of_report(ended) == []
    assert (ended.state == "interrupted") == (search.controller.searching and ended.speedup is None)


def test_each_decision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="accel")
    search = Followed(some_candidates(), Machine(speed={"good": 1.5, "several": 1.5}, noise=0.02))
    while not search.settled:
        search.step()
    for _ in range(20):
        search.step()
    assert len(caplog.messages) == len(set(caplog.messages)) >= 6


def test_what_does_not_apply_is_not_named_as_left_out_by_the_level() -> None:
    search = Followed(some_candidates(), Machine(speed={"good": 1.5}))
    while not search.settled:
        search.step()
    rows = {row.name: row for row in search.journal.report().rows}
    assert (rows["barred"].status, rows["barred"].why) == ("not applicable", "it does not apply")


def test_what_a_strategy_says_while_it_is_on_or_when_the_loop_is_gone_is_no_refusal() -> None:
    """Of TF32, that it is on already; of most others, that the model is on the CPU."""
    asked: list[str] = []

    def refuses() -> str:
        asked.append("")
        return "it is on already" if search.controller.searching and "slow" in search.session.active else ""

    search = Followed([candidate("slow", refusal=refuses, cost_s=1e6)], Machine(), budget="3%")
    for _ in range(300):
        search.step()
    before = len(asked)
    (row,) = search.journal.report().rows
    assert len(asked) == before and row.status == "not tried"


def test_left_as_it_was_stays_the_verdict_while_the_search_goes_on() -> None:
    """A candidate that has become affordable opens the search again; the run ends in it."""
    search = Followed([candidate("useless"), candidate("dear", cost_s=30.0)], Machine(noise=0.05), budget="10%")
    while not search.settled or not search.controller.searching:
        search.step()
    report = search.journal.report()
    assert "left as it was" in search.printed.getvalue()

    search.step()
    again = search.journal.report()
    assert again.verdict().startswith("left as it was")
    assert again.state == "searching"
    search.journal._finished = True
    assert search.journal.report().state == "done"
    assert of_report(report) == of_report(search.journal.report()) == []


@pytest.mark.parametrize("cost_s", [3.0, 9.0])
def test_nothing_is_said_while_the_run_is_too_young_for_a_first_trial_and_once_it_has_ended(cost_s: float) -> None:
    """In the middle of each short run stood that nothing had been tried; what won later was told beside it."""
    search = Followed([candidate("dear", cost_s=cost_s)], Machine(noise=0.01, speed={"dear": 1.5}), budget="10%")
    while not search.controller.rows["dear"].why:
        search.step()
    for _ in range(2):
        search.step()
    assert not search.settled and not search.printed.getvalue()
    search.journal._finished = True
    with redirect_stderr(search.printed):
        search.journal.say_how_it_ended()
    ended = search.printed.getvalue()
    assert "left as it was: nothing was tried" in ended and "; not tried yet: dear: the budget of 10% allows" in ended

    search.journal._finished = False
    while not search.settled:
        search.step()
    assert "dear" in search.controller.plan and "kept: dear" in search.printed.getvalue()
    search.printed.truncate(0)
    with redirect_stderr(search.printed):
        search.journal.say_how_it_ended()
    assert not search.printed.getvalue()


def test_what_a_later_search_has_kept_and_undone_is_reported_while_it_goes_on() -> None:
    """The report said that nothing was kept, of a run on a GPU that had kept a strategy for half of its time."""
    costs = {"cheap": 0.0, "dear": 3.0, "dearer": 3.2, "dearest": 4.0}
    candidates = [candidate(name, cost_s=seconds) for name, seconds in costs.items()]
    search = Followed(candidates, Machine(noise=0.01, speed={"dearer": 1.5}), budget="10%")
    while search.controller.rows["dear"].status != "undone":
        search.step()
    assert search.settled and search.controller.searching
    report = search.journal.report()
    assert report.verdict().startswith("left as it was: nothing tried")
    assert {row.name: row.status for row in report.rows}["dear"] == "undone"

    while not search.controller.plan:
        search.step()
    assert search.controller.searching
    report = search.journal.report()

    assert report.plan.keys() == {"dearer"}
    assert "not yet compared as a whole: dearer 1.5" in report.verdict()
    assert of_report(report) == []


def test_what_the_last_finished_search_has_found_stands_though_nobody_asked_then() -> None:
    """A report was stored only when somebody asked for one: the second search's speed-up was never known."""
    costs = {"cheap": 0.0, "dear": 3.0, "dearest": 6.0}
    speed = {"cheap": 1.3, "dear": 1.4, "dearest": 1.5}
    candidates = [candidate(name, cost_s=seconds) for name, seconds in costs.items()]
    search = Followed(candidates, Machine(noise=0.01, speed=speed), budget="10%")
    for plan in ({"cheap"}, {"cheap", "dear"}):
        while search.controller.plan.keys() != plan or search.controller.searching:
            search.step()
    both = search.controller.closed
    while not search.controller.searching:
        search.step()
    search.journal._finished = True
    report = search.journal.report()

    assert both is not None and report.speedup == both.gain > 1.6 and report.state == "done"
    assert report.plan.keys() == {"cheap", "dear"} and of_report(report) == []


def test_a_replay_of_nothing_that_applies_says_so() -> None:
    search = Followed([candidate("barred", refusal=lambda: "it does not apply")], Machine(), budget="3%", replay={})
    while not search.settled:
        search.step()
    assert "left as it was" in search.printed.getvalue() or "replayed" in search.printed.getvalue()


def test_a_run_that_ended_before_its_search_is_interrupted_and_says_so() -> None:
    search = Followed(some_candidates(), Machine(noise=0.05))
    search.step()
    search.journal._finished = True

    report = search.journal.report()

    assert report.state == "interrupted"
    assert report.verdict() == f"no verdict: the run ended after {report.steps} steps, before the search did"


def test_crowded_cores_are_no_phase() -> None:
    """`host 60 %` stood beside a phase of that name with 4 %."""
    steps = [Measurement(step=n, seconds=0.01, phases={"host": 0.0004, "forward": 0.0096}) for n in range(30)]
    crowded = Evidence(steps=steps, thread=ThreadShare(run=0.4, wait=0.6, blocked=0.0), foreign_cores=1.0)
    controller = SearchState(offered=[], budget=Budget.parse(60))
    controller.diagnosis = naming.diagnose(crowded)
    report = Report(anatomy_after={"host": 0.4, "forward": 9.6})

    outlook.limit(report, controller)

    assert limit_text(report).startswith("crowded cores, 60 % of the step")
    assert of_report(report) == []


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_report_of_a_real_run_agrees(only_quick: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="accel")
    model, batches, optimizer = make()
    accelerated, stand_in, _ = accel.optimize(model, batches, optimizer, budget=60)
    loop = training(accelerated, stand_in, optimizer)
    advance_until(loop, settled(model))
    advance(loop, 3)
    report = accel.explain(model)
    accel.undo(model)

    assert of_report(report) == []
    assert [line.split()[1] for line in caplog.messages] == ["quick"]


def test_profile_of_real_steps_agrees() -> None:
    """Operators of every kind, views and copies within a cache among them, under the roofs of this machine."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    optimizer = torch.optim.Adam(model.parameters())
    window = Window(torch.device("cpu"))
    images, measured = torch.randn(4, 3, 16, 16), []

    def step() -> None:
        x = images.permute(0, 1, 3, 2).contiguous().view(4, 3, 256).unsqueeze(0).squeeze(0).reshape(4, 3, 16, 16)
        x = (x.expand(2, 4, 3, 16, 16)[0] + x.select(0, 0)).contiguous()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    window.start()
    for number in range(2):
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        measured.append(Measurement(step=number, seconds=seconds, phases={"forward": seconds}))
    evidence = Evidence(steps=measured * 12, trace=window.stop(2))
    evidence.roofline = measure(torch.device("cpu"), [torch.float32])

    report = verdict.build_report(evidence, naming.diagnose(evidence))

    assert of_profile(report) == []
    moved = {op.name: op.gb_per_s for op in report.ops}
    for view in ("view", "expand", "select", "slice", "contiguous", "permute", "reshape", "unsqueeze"):
        assert moved.get(view) is None


@settings(max_examples=examples(50), deadline=None)
@given(
    gflops=st.one_of(st.none(), st.floats(1e-3, 1e6)),
    gb_per_s=st.one_of(st.none(), st.floats(1e-3, 1e6)),
    intensity=st.one_of(st.none(), st.floats(1e-3, 1e4)),
    peak=st.floats(1.0, 1e5),
    copy=st.floats(1.0, 1e4),
)
def test_no_operator_is_above_its_roof_without_a_word(
    gflops: float | None, gb_per_s: float | None, intensity: float | None, peak: float, copy: float
) -> None:
    """98,700 % of the roof was told of a view."""
    op = OpTime(name="x", calls=1, ms=1, share=0.5, gflops=gflops, gb_per_s=gb_per_s, intensity=intensity)
    roofline = Roofline(gflops={"float32": peak}, gb_per_s=copy)
    assert list(roofs(profile_reports.full(ops=[op], roofline=roofline))) == []
