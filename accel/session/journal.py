"""The report of a run: built from the search's state, printed and written to files; and lines while the run goes on."""

from __future__ import annotations

import copy
import dataclasses
import logging
import platform
import shlex
import sys
from collections.abc import Callable, Container
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

import accel
from accel.profiler import stderr
from accel.profiler.report import utf8
from accel.report import NOTHING_REMEMBERED, Machine, Report, ReportPlace, State, StrategyRow
from accel.run import Run, ranks
from accel.search import outlook
from accel.search.plan import Choices, Plan, fingerprint
from accel.search.state import Candidate, SearchState
from accel.search.verdicts import remember

if TYPE_CHECKING:
    from accel.session.session import Session

log = logging.getLogger("accel")


class Announcer:
    """Print messages for the user; decisions of the first search are logged, and their outcome is the report's."""

    def __init__(self) -> None:
        self.printed: set[str] = set()
        """Lines that were printed once, and are not printed again."""
        self._kept: set[str] = set()
        self._prints_decisions = False

    def say(self, line: str) -> None:
        """Print one line, once, on the rank that prints."""
        if line not in self.printed and ranks.leads():
            self.printed.add(line)
            stderr.write(f"accel: {line}")

    def search_has_ended(self) -> None:
        """The report has been printed: from now on, print what changes the plan."""
        self._prints_decisions = True

    def announce(self, row: StrategyRow) -> None:
        """Log a decision; print it if it changes the plan that was reported."""
        changes_plan = row.status == "kept" or row.name in self._kept
        if row.status == "kept":
            self._kept.add(row.name)
        else:
            self._kept.discard(row.name)
        prints = self._prints_decisions and changes_plan
        if not prints and not log.isEnabledFor(logging.DEBUG):
            return
        from accel.report.optimize_document import decision_line  # brings rich: only where there is something to print

        line = decision_line(row)
        log.debug(line)
        if prints:
            stderr.write(line)


class Journal:
    """Keep the report of one run.

    Args:
        report: where it is to go, see `ReportPlace`.
        taken: where the reports of other models go.
        replayed: the plan that is replayed, None if one is searched for.
    """

    def __init__(
        self,
        session: Session,
        controller: SearchState,
        announcer: Announcer,
        *,
        allow: str,
        budget: str,
        report: str | None,
        taken: Container[Path | None] = (),
        replayed: Plan | None,
    ) -> None:
        self._run, self._session, self._controller, self._announcer = session.run, session, controller, announcer
        self.place, model = ReportPlace(report, taken), type(self._run.model).__name__
        if report is not None and self.place.target != Path(report):
            announcer.say(f"{report} has the report of another model; that of {model} goes to {self.place.target}")
        self.describe_batch: Callable[[Report], None] = lambda report: None
        """Puts what is known of the batch size into a report, if anything decides it."""
        self._replayed = replayed
        self._is_on_gpu = self._run.cuda  # at the end a framework may have taken the model back to the CPU
        self._finished = False
        self._is_reported = False
        """The outcome of a search has been printed."""
        self._concluded: Report | None = None
        """The report at the end of the last search."""
        self._report = Report(
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            command=utf8(shlex.join(["python", *sys.orig_argv[1:]])),
            machine=_machine(self._run),
            model=model,
            allow=allow,
            budget=budget,
        )
        self._describe_model()

    def _describe_model(self) -> None:
        """Set the model's size and fingerprint, as far as they are known: lazy modules learn theirs when called."""
        parameters = list(self._run.model.parameters())
        self._has_size = not any(map(is_lazy, parameters))
        self._report.parameters = sum(p.numel() for p in parameters if not is_lazy(p))
        self._report.fingerprint = fingerprint(self._run.model)

    def search_has_ended(self) -> bool:
        """A search is over: print its outcome in a few lines, write the files; return whether one has been printed.

        Nothing is told before a first trial that is still to come, and that of a later search is not printed.
        """
        if not self._is_reported and outlook.is_too_early(self._controller):
            return False
        report = self._concluded = copy.deepcopy(self.report())
        if not self._is_reported:
            from accel.report.optimize_document import summary  # brings rich: only where there is something to print

            stderr.write(summary(report, self.place.whole))
            self._announcer.search_has_ended()
            self._is_reported = True
            self._write(report)
        return True

    def finish(self) -> None:
        """The run is over, or accel was undone: write the files with the last numbers."""
        if self._finished or self._session.rank:
            return
        self._finished = True
        if self._session.failed:
            self._controller.recollection.failed()
        else:
            remember(self._controller, ended=True)
        self._write(self.report())

    def say_how_it_ended(self) -> None:
        """The process ends: print a line if no outcome of the search has been printed, or not all that is known now."""
        report = self.report()
        if not self._session.rank and (what := self._ending(report)):
            self._announcer.say(what)

    def _ending(self, report: Report) -> str:
        if report.state == "done" and not self._is_reported:
            untried = ", ".join(row.name for row in report.rows if row.status == "not tried")
            what = f"{report.model} {report.verdict()}" + (f"; not tried yet: {untried}" if untried else "")
            why, remedy = outlook.why_open(self._controller)
            return f"{what}: {why}; {remedy}" if untried and why else what
        if report.state != "interrupted":
            from accel.report.optimize_document import told_late

            return told_late(report, self._concluded or report)
        if report.steps == 0:
            what = f"no training step of {report.model} was seen"
            what += "; iterate the loader that optimize returned, and call the model that it was given"
            return "" if self._announcer.printed else what
        why, remedy = outlook.why_open(self._controller)
        what = f"the run ended after {report.steps} steps, before the search for {report.model} had a verdict"
        kept = report.kept_text() or ", ".join(report.plan)
        stored = None if report.cache.startswith(NOTHING_REMEMBERED) else self._controller.recollection.stored
        begins = f"; the next run begins with {', '.join(stored.plan)}" if kept and stored and stored.plan else ""
        return f"{what} ({why}); kept so far: {kept or 'nothing'}{begins}; {remedy}"

    def _write(self, report: Report) -> None:
        self.place.write(report, lambda path: self.plan(report).save(path))

    @property
    def kept(self) -> Choices:
        """What has been kept so far; with several ranks, which learn of that by what is on, nothing within a trial."""
        if self._run.world_size == 1:
            return dict(self._controller.plan)
        return {} if self._session.trying else self._session.active

    def plan(self, report: Report) -> Plan:
        """Return the present plan; one that is replayed stays as it was made, whatever of it applies in this run."""
        if self._replayed is not None:
            return self._replayed
        return Plan(
            fingerprint=report.fingerprint,
            model=report.model,
            strategies=dict(report.plan),
            allow=report.allow,
            device=report.machine.device,
            torch=report.machine.torch,
            speedup=report.speedup,
        )

    def report(self) -> Report:
        """Return the present report."""
        report, controller, session = self._report, self._controller, self._session
        report.machine.world_size = self._run.world_size
        if not self._has_size:
            self._describe_model()
        report.rows = [self._row(candidate) for candidate in controller.candidates.values()]
        report.events = list(controller.events)
        report.plan = dict(controller.plan) if session.rank == 0 else session.active
        report.state = self._state(controller)
        report.steps, report.search_steps = session.steps, controller.search_steps
        report.search_s = controller.cost_s
        report.remembered, report.cache = controller.recollection.text, controller.recollection.note
        report.samples_per_step = session.samples_per_step or None
        report.break_even_step = controller.break_even_step()
        report.offers = outlook.offers_of(controller)
        _speed(report, controller)
        _anatomy(report, controller)
        outlook.limit(report, controller)
        report.training_same = _training_same(report)
        self.describe_batch(report)
        report.unseen = self._unseen(session)
        return self._conclusion(report)

    def _row(self, candidate: Candidate) -> StrategyRow:
        """Return the row of a candidate as it is told: kept so far if it is on before its trial has ended."""
        row, note = candidate.row, candidate.design.note
        if row.status == "not tried" and candidate.name in self._controller.plan:
            return dataclasses.replace(row, status="kept", why="on so far; its trial has not ended")
        if row.status in ("not tried", "not allowed") and candidate.refused:
            return dataclasses.replace(row, status="not applicable", why=candidate.refused)
        return dataclasses.replace(row, why=f"{row.why}; {note}") if row.status == "kept" and note else row

    def _conclusion(self, report: Report) -> Report:
        """Return what the last search has found, if the run has ended in a later one and nothing of it was undone."""
        concluded, controller = self._concluded, self._controller
        if not self._finished or report.state != "interrupted" or concluded is None:
            return report
        if any(controller.rows[name].status == "undone" for name in concluded.plan):
            return report
        now = {name: getattr(report, name) for name in ("steps", "search_steps", "search_s", "events", "unseen")}
        return dataclasses.replace(concluded, **now)

    def _state(self, controller: SearchState) -> State:
        if not self._session.alive:
            return "undone"
        if controller.searching:
            if self._finished:
                return "done" if controller.searched_until else "interrupted"
            return "searching"
        return "done" if self._replayed is None else "replayed"

    def _unseen(self, session: Session) -> list[str]:
        unseen = ["the loss: outputs, gradients and updates were compared instead"]
        if not self._is_on_gpu:
            unseen.append("GPU phases: the model runs on the CPU")
        if not self._run.optimizers:
            unseen.append(
                "an optimizer: none of the model's parameters was stepped by one; each batch counts as a step"
            )
        if session.steps == 0:
            unseen.append("any training step: is the loader that accel.optimize returned the one the loop iterates?")
        if session.rank != 0:
            unseen.append(f"the search: rank 0 decides and holds the report, this is rank {session.rank}")
        if session.failed:
            unseen.append(f"anything after accel itself failed and left the loop as it was: {session.failed}")
        return unseen


def _speed(report: Report, controller: SearchState) -> None:
    """Set the step times before and after, and the speed-up, as the closing trial has shown them."""
    closing = controller.closed
    report.plain_ms = report.accel_ms = report.speedup = report.speedup_low = report.speedup_high = None
    if closing is not None:
        report.plain_ms, report.accel_ms = closing.before_ms, closing.after_ms
        report.speedup, report.speedup_low, report.speedup_high = closing.gain, closing.low, closing.high
    elif controller.searched_until and not controller.plan and controller.plain_ms:
        report.plain_ms = report.accel_ms = controller.plain_ms
        report.speedup = 1.0


def _anatomy(report: Report, controller: SearchState) -> None:
    """Set both anatomies, scaled to the reported step times: they were measured outside the closing trial."""
    parts = [controller.anatomy_before, controller.anatomy_after]
    if controller.searched_until and not controller.plan:
        parts[1] = parts[0]  # the later one may have been measured under a plan that is undone by now
    for name, part, step_ms in zip(
        ("anatomy_before", "anatomy_after"), parts, (report.plain_ms, report.accel_ms), strict=True
    ):
        total = sum(part.values())
        factor = step_ms / total if step_ms and total > 0 else 1e3
        setattr(report, name, {phase: seconds * factor for phase, seconds in part.items()})


def _machine(run: Run) -> Machine:
    return Machine(
        device=run.device_name,
        cores=run.cores,
        threads=run.threads,
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        accel=accel.__version__,
    )


def _training_same(report: Report) -> str:
    """Return how closely the kept strategies agree with the plain path, by the guard's comparisons."""
    kept = [row for row in report.rows if row.status == "kept"]
    if not kept:
        return ""
    worst = max(max(row.output_error or 0.0, row.gradient_error or 0.0) for row in kept)
    if worst == 0:
        return "same bits" if all(row.exactness == "exact" for row in kept) else "the guard found the same bits"
    return f"outputs, gradients and updates agree to {worst:.1e}"
