"""`accel profile`: run an unmodified script, name its bottleneck, and write the report."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from accel import __version__
from accel.commands.script_job import ScriptJob, check_script, own_arguments, say, training_in_children
from accel.files import check_report, write_atomic

if TYPE_CHECKING:
    from accel.profiler.gather import Exchange
    from accel.profiler.report import ProfileReport
    from accel.profiler.script import Script
    from accel.profiler.session import ProfileSession

_TERMINATED_S = 10.0
"""How long a rank that was sent SIGTERM waits for what the others saw; torchrun kills it 30 s after the signal."""
_DIAGNOSING = (
    "accel: profiling. Suspects are tried on real steps; what that changes in the training is put back. "
    "This is a diagnosing run: --no-confirm leaves the training as it is."
)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.option(
    "--report",
    "--json",
    type=click.Path(path_type=Path),
    default=Path("accel-profile"),
    show_default=True,
    help="A folder for report.json, report.html and trace.json, or a .json file that the other two lie beside.",
)
@click.option("--confirm/--no-confirm", default=True, help="Try the suspects on real steps.  [default: confirm]")
@click.option("-v", "--verbose", is_flag=True, help="Print the whole report.")
@click.pass_context
def profile(
    context: click.Context,
    script: str,
    arguments: tuple[str, ...],
    module: bool,
    report: Path,
    confirm: bool,
    verbose: bool,
) -> None:
    """Run SCRIPT with its own ARGUMENTS and name what holds its training back.

    \b
        accel profile train.py -- --epochs 1
        torchrun --nproc-per-node 2 -m accel profile train.py -- --epochs 1

    The script runs to its end, unmodified; its output and its exit status are its own. The report goes to stderr.
    """
    check_script(script, module)
    check_report("--report", report, may_be_page=False)
    files = ReportFiles.at(report)
    script_arguments = own_arguments(arguments)

    from accel.profiler.gather import Exchange
    from accel.profiler.script import Script

    exchange = Exchange()
    if confirm and not exchange.launched:
        click.echo(_DIAGNOSING, err=True)
    line = shlex.join(["accel", "profile", *(["-m"] if module else []), script, *script_arguments])
    ProfileJob(Script(script, script_arguments, module=module), exchange, files, line, confirm, verbose).begin(context)


class ReportFiles(NamedTuple):
    """Where a report, its web page and its trace go."""

    report: Path
    page: Path
    trace: Path

    @classmethod
    def at(cls, place: Path) -> ReportFiles:
        """Return the files of a folder, or those beside a .json file."""
        if place.suffix.lower() == ".json":
            return cls(place, place.with_suffix(".html"), place.with_suffix(".trace.json"))
        return cls(place / "report.json", place / "report.html", place / "trace.json")


class ProfileJob(ScriptJob):
    """A script to be profiled; once it has run, the report is made.

    Args:
        script: what to run.
        exchange: the other ranks.
        files: where the report goes.
        line: the command, for the report.
        confirm: test the suspects by experiments.
        verbose: print the whole report.
    """

    def __init__(
        self, script: Script, exchange: Exchange, files: ReportFiles, line: str, confirm: bool, verbose: bool
    ) -> None:
        super().__init__(script)
        self._exchange, self._line = exchange, line
        self._shown = files
        self._files = ReportFiles(*(path.absolute() for path in files))  # the script may change its directory
        self._confirm, self._verbose = confirm, verbose
        self._thread = threading.get_ident(), threading.get_native_id()
        self._started, self._started_at = datetime.now(timezone.utc), time.perf_counter()
        self._session: ProfileSession | None = None

    def __enter__(self) -> None:
        super().__enter__()
        self.begin_after_torch()

    def start(self) -> None:
        """Profile the training."""
        from accel.dataio.loader import ContinuousLoader
        from accel.dataio.passes.loader_core import LoaderPass
        from accel.profiler.session import ProfileSession

        self._session = ProfileSession(
            confirm=self._confirm,
            trace_file=self._files.trace,
            exchange=self._exchange,
            loaders=((ContinuousLoader, LoaderPass),),
            thread=self._thread,
        )
        self._session.start()

    def leave_alone(self) -> None:
        """Stop recording: training in a forked child is not part of the report."""
        if self._session is not None:
            self._session.leave_alone()

    def conclude(self) -> None:
        """Make the report of all ranks and write it, or say why there is none."""
        from accel.profiler.conclusion import verdict
        from accel.report.next_step import after_profile

        wall_s = time.perf_counter() - self._started_at
        if self._session is None:
            self.start()  # no torch in the script: the report says what is not there
        session = self._session
        assert session is not None
        session.stop()
        recorder, exchange, ending = session.recorder, self._exchange, self.script.ending
        evidence = session.finish()
        diagnosis = session.diagnose(evidence)
        everyone = {}
        if exchange.launched:
            timeout_s = _TERMINATED_S if ending.text == "terminated" else None
            try:
                everyone = exchange.collect(verdict.rank_summary(evidence, diagnosis), timeout_s)
            except OSError as error:
                session.unseen.append(f"other ranks: {error}")
        if exchange.rank != 0:
            return
        if recorder.delivery.steps == 0:
            say(_nothing(session, wall_s))
            return
        evidence.unseen = list(dict.fromkeys([*evidence.unseen, *session.unseen]))
        report = verdict.build_report(evidence, diagnosis)
        report.experiments = list(session.experiments.values())
        report.unattributed = recorder.delivery.unattributed()
        report.wall_s, report.command, report.ended = wall_s, self._line, ending.text
        report.started = self._started.isoformat(timespec="seconds")
        report.host.accel = __version__
        if exchange.launched:
            verdict.merge(report, everyone, diagnosis.anatomy, exchange.size)
        report.next_step = after_profile(report)
        self._write(report)

    def _write(self, report: ProfileReport) -> None:
        """Print and save the report."""
        from accel.report.rendering import as_brief, as_page, as_text

        render = as_text if self._verbose else as_brief
        say(render(report, stream=sys.stderr))
        try:
            write_atomic(self._files.report, report.to_json() + "\n")
            write_atomic(self._files.page, as_page(report))
        except (OSError, ValueError) as error:
            # The script's own exit status matters more than the report's.
            say(f"accel: the report could not be written: {error}")
            return
        names = [self._shown.report, self._shown.page, *([self._shown.trace] if report.trace_file else [])]
        say(f"accel: wrote {', '.join(map(str, names))}")
        if not self._verbose:
            say(f"accel: the whole report: accel report {shlex.quote(str(self._shown.report))}, or -v")


def _nothing(session: ProfileSession, wall_s: float) -> str:
    """Say that there was no step, and where the training may have been instead."""
    recorder = session.recorder
    what = "whole step" if recorder.updates else "optimizer step"
    batches = f"{recorder.loaders.fetched} batches from a DataLoader"
    passed = f"{recorder.backwards} backward passes, {recorder.updates} updates, {recorder.delivery.steps} whole steps"
    text = f"accel: no {what} seen in {wall_s:.1f} s ({batches}, {passed}); nothing to report. "
    text += "Name a script that trains with torch's optimizers"
    if recorder.updates_elsewhere:
        text += (
            f"\naccel: {recorder.updates_elsewhere} updates ran in other threads, which are not seen; "
            "train in the thread that runs the script"
        )
    if not recorder.backwards and (children := training_in_children("profile")):
        text += f"\n{children}"
    return text
