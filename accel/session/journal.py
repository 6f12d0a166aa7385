"""The report of a run: built from the search's state, printed and written to files; and lines while the run goes on."""

from __future__ import annotations

import copy
import dataclasses
import logging
import platform
import shlex
import sys
from collections.abc import Callable, Container, Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parameter import is_lazy

import accel
from accel.profiler import stderr
from accel.profiler.report import utf8
from accel.report import NOTHING_REMEMBERED, Machine, Report, ReportPlace, State, StrategyRow
from accel.run import Run, ranks
from accel.search import outlook
from accel.search.plan import Choices, Plan, fingerprint
from accel.search.state import SearchState
from accel.search.verdicts import remember

if TYPE_CHECKING:
    from accel.session.session import Session

log = logging.getLogger("accel")

_ANATOMIES = ("anatomy_before", "anatomy_after")
_MEASURED = (
    *("plain_ms", "accel_ms", "speedup", "speedup_low", "speedup_high", "break_even_step"),
    *("bottleneck", "bottleneck_share", "bottleneck_advice"),
    *_ANATOMIES,
)
"""Fields of a report that hold what was measured of a finished plan."""


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
        self._reported: Literal["trials", "nothing tried"] | None = None
        """Of what the last outcome that was printed told."""
        self._concluded_in = 0
        """How often the search had begun again by then."""
        self._concluded: Report | None = None
        """The report at the end of the last search: its conclusions hold while another search runs."""
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

    def settled(self) -> bool:
        """A search is over: print its outcome in a few lines, write the files; return whether one has been printed.

        That of a later search is printed only where nothing had been tried before. In the first minute nothing is told
        before a first trial that is still to come: that takes 0.05 to 0.25 s.
        """
        report = self.report()  # whose conclusions stand while another search runs
        tried = self._controller.has_tried
        if self._reported is None and outlook.is_too_early(self._controller):
            return False
        if self._reported is None or (tried and self._reported == "nothing tried"):
            from accel.report.optimize_document import summary  # brings rich: only where there is something to print

            stderr.write(summary(report, self.place.whole))
            self._announcer.search_has_ended()
            self._reported = "trials" if tried else "nothing tried"
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
        """The process ends: print a line if no outcome of the search has been printed."""
        report = self.report()
        if not self._session.rank and (what := self._ending(report)):
            self._announcer.say(what)

    def _ending(self, report: Report) -> str:
        if report.state == "done" and self._reported is None:
            candidates = self._controller.candidates
            left = [row.name for row in report.rows if row.status == "not tried" and not candidates[row.name].refusal()]
            untried = ", ".join(left)
            what = f"{report.model} {report.verdict()}" + (f"; not tried yet: {untried}" if untried else "")
            why, remedy = outlook.why_open(self._controller)
            return f"{what}: {why}; {remedy}" if untried and why else what
        if report.state != "interrupted":
            return ""
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
        report.rows = list(controller.rows.values())
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
        if session.rank == 0:
            self._stand_by(report, controller)
        report.rows = list(map(self._with_note, report.rows))
        return report

    def _with_note(self, row: StrategyRow) -> StrategyRow:
        note = self._controller.candidates[row.name].comparison.note if row.status == "kept" else ""
        return dataclasses.replace(row, why=f"{row.why}; {note}") if note else row

    def _stand_by(self, report: Report, controller: SearchState) -> None:
        """Store the conclusions of a search that has ended; while another one runs, report what of them holds."""
        if not controller.searching:
            self._concluded, self._concluded_in = copy.deepcopy(report), controller.reopened
            return
        concluded = self._concluded
        # If a strategy was undone since, the stored conclusions no longer hold, and there are no new ones yet.
        if concluded is None or any(controller.rows[name].status == "undone" for name in concluded.plan):
            return
        if controller.reopened == self._concluded_in and concluded.plan != controller.plan:
            # What was added since is in the plan, and not in the speed-up of the whole. Of none that would be a 1.
            if concluded.plan and concluded.plan.items() <= controller.plan.items():
                self._repeat(concluded, report, _MEASURED)
            return
        self._repeat(concluded, report, (*_MEASURED, "plan", "training_same"))
        report.rows = [_latest(row, controller.rows[row.name]) for row in concluded.rows]

    def _repeat(self, concluded: Report, report: Report, names: Iterable[str]) -> None:
        for name in names:
            setattr(report, name, copy.deepcopy(getattr(concluded, name)))
        if self._finished:
            report.state = concluded.state

    def _state(self, controller: SearchState) -> State:
        if not self._session.alive:
            return "undone"
        if controller.searching:
            if self._finished:
                return "interrupted" if controller.closed is None else "done"
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


def _latest(concluded: StrategyRow, present: StrategyRow) -> StrategyRow:
    """Return the row of a strategy while another search runs: the stored one, unless it was decided about since."""
    if "kept" in (concluded.status, present.status):
        return copy.deepcopy(concluded)
    is_decided = present.status != "not tried" or (concluded.status == "not tried" and bool(present.why))
    return present if is_decided else copy.deepcopy(concluded)


def _speed(report: Report, controller: SearchState) -> None:
    """Set the step times before and after, and the speed-up, as the closing trial has shown them."""
    closing = controller.closed
    report.plain_ms = report.accel_ms = report.speedup = report.speedup_low = report.speedup_high = None
    if closing is not None:
        report.plain_ms, report.accel_ms = closing.before_ms, closing.after_ms
        report.speedup, report.speedup_low, report.speedup_high = closing.gain, closing.low, closing.high
    elif not controller.searching and not controller.plan and controller.plain_ms:
        report.plain_ms = report.accel_ms = controller.plain_ms
        report.speedup = 1.0


def _anatomy(report: Report, controller: SearchState) -> None:
    """Set both anatomies, scaled to the reported step times: they were measured outside the closing trial."""
    parts = [controller.anatomy_before, controller.anatomy_after]
    if not controller.searching and not controller.plan:
        parts[1] = parts[0]  # the later one may have been measured under a plan that is undone by now
    for name, part, step_ms in zip(_ANATOMIES, parts, (report.plain_ms, report.accel_ms), strict=True):
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
