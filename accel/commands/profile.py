"""`accel profile`: run an unmodified script, name its bottleneck, and write the report."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel import __version__
from accel.commands.script_job import ScriptJob, check_script, own_arguments, say, training_in_children
from accel.errors import InvalidArgument
from accel.files import check_folder, is_there, write_atomic

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
    "--json",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("accel-profile.json"),
    show_default=True,
    help="The report; its web page and its trace are written beside it.",
)
@click.option("--confirm/--no-confirm", default=True, help="Try the suspects on real steps.  [default: confirm]")
@click.pass_context
def profile(
    context: click.Context, script: str, arguments: tuple[str, ...], module: bool, target: Path, confirm: bool
) -> None:
    """Run SCRIPT with its own ARGUMENTS and name what holds its training back.

    \b
        accel profile train.py -- --epochs 1
        torchrun --nproc-per-node 2 -m accel profile train.py -- --epochs 1

    The script runs to its end, unmodified; its output and its exit status are its own. The report goes to stderr.
    """
    _check(script, module, target)
    target = target.absolute()  # the script may change its directory
    script_arguments = own_arguments(arguments)

    from accel.profiler.gather import Exchange
    from accel.profiler.script import Script

    exchange = Exchange()
    if confirm and not exchange.launched:
        click.echo(_DIAGNOSING, err=True)
    line = shlex.join(["accel", "profile", *(["-m"] if module else []), script, *script_arguments])
    ProfileJob(Script(script, script_arguments, module=module), exchange, target, line, confirm).begin(context)


class ProfileJob(ScriptJob):
    """A script to be profiled; once it has run, the report is made.

    Args:
        script: what to run.
        exchange: the other ranks.
        target: where the report goes.
        line: the command, for the report.
        confirm: test the suspects by experiments.
    """

    def __init__(self, script: Script, exchange: Exchange, target: Path, line: str, confirm: bool) -> None:
        super().__init__(script)
        self._exchange, self._target, self._line, self._confirm = exchange, target, line, confirm
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
            trace_file=self._target.with_suffix(".trace.json"),
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
        _write(report, self._target)


def _check(script: str, module: bool, target: Path) -> None:
    check_script(script, module)
    if target.suffix.lower() == ".html":
        raise InvalidArgument(f"--json must not end in .html, where the web page goes, got {str(target)!r}")
    if is_there("--json", target) and not target.is_file():
        raise InvalidArgument(f"--json must be an ordinary file, got {str(target)!r}; name one, then print it")
    check_folder("--json", target)


def _nothing(session: ProfileSession, wall_s: float) -> str:
    """Say that there was no step, and where the training may have been instead."""
    recorder = session.recorder
    what = "whole step" if recorder.updates else "optimizer step"
    batches = f"{recorder.loaders.fetched} batches from a DataLoader"
    passed = f"{recorder.backwards} backward passes, {recorder.updates} updates, {recorder.delivery.steps} whole steps"
    text = f"accel: no {what} seen in {wall_s:.1f} s ({batches}, {passed}); nothing to report"
    if recorder.updates_elsewhere:
        text += (
            f"\naccel: {recorder.updates_elsewhere} updates ran in other threads, which are not seen; "
            "train in the thread that runs the script"
        )
    if not recorder.backwards and (children := training_in_children("profile")):
        text += f"\n{children}"
    return text


def _write(report: ProfileReport, target: Path) -> None:
    from accel.report.rendering import as_page, as_text, as_verdict

    page = target.with_suffix(".html")
    say(as_text(report, stream=sys.stderr))
    try:
        write_atomic(target, report.to_json() + "\n")
        write_atomic(page, as_page(report))
        written = f"wrote {target}, {page}" + (f", {report.trace_file}" if report.trace_file else "")
    except (OSError, ValueError) as error:
        # The script's own exit status matters more than the report's.
        written = f"the report could not be written: {error}"
    say(f"accel: {written}")
    say(as_verdict(report, sys.stderr))  # again: the report's first line has left the screen by now
