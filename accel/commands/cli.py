"""The `accel` command: read reports, compare them, without loading torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from accel import __version__
from accel.commands.bench import bench
from accel.commands.doctor import doctor
from accel.commands.profile import profile
from accel.commands.run import run
from accel.commands.script_job import ScriptJob
from accel.errors import AccelError, ReportError
from accel.files import check_folder, write_atomic
from accel.profiler.report import ProfileReport
from accel.report import Report
from accel.report.compare import compare
from accel.report.reader import load
from accel.report.rendering import as_page, as_text
from accel.report.words import clean

UNUSABLE = 2
REGRESSED = 1


class _Group(click.Group):
    """A group that prints accel's errors as one line, with exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AccelError as error:
            click.echo(f"error: {clean(error)}", err=True)
            ctx.exit(UNUSABLE)

    def prepared(self, *args: Any, **kwargs: Any) -> ScriptJob | None:
        """Run a command; if it has a script to run, return that instead, so that it runs outside of click's frames."""
        jobs: list[ScriptJob] = []
        try:
            self.main(*args, obj=jobs, **kwargs)
        except SystemExit:
            if not jobs:
                raise
        return jobs[0] if jobs else None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run a command."""
        job = self.prepared(*args, **kwargs)
        if job is not None:
            with job:
                exec(job.script.code(), job.script.globals)
            sys.exit(job.script.ending.status)


def _threshold(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Read a fraction such as `0.05` or a percentage such as `5%`."""
    match = re.fullmatch(r"\s*(\d{1,9}\.?\d*|\.\d+)\s*(%?)\s*", value, re.ASCII)
    # A bare 5 would mean 500 %, which is hardly meant and would let every regression pass.
    if match is None or (float(match[1]) >= 1 and not match[2]):
        raise click.BadParameter(f"must be a percentage or a fraction below 1, e.g. 5% or 0.05. Found: {value!r}")
    return float(match[1]) / (100 if match[2] else 1)


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="accel")
def main() -> None:
    """Make an unmodified training script faster, profile it, and read and compare the reports."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="OUT", help="Also write it as a web page.")
def report(file: Path, page: Path | None) -> None:
    """Print the report in FILE (JSON, as written by accel)."""
    loaded = load(file)
    if page is not None:
        _write_page(loaded, file, page)
    click.echo(as_text(loaded))


@main.command(name="compare")
@click.argument("before", type=click.Path(path_type=Path), metavar="A")
@click.argument("after", type=click.Path(path_type=Path), metavar="B")
@click.option("--threshold", callback=_threshold, default="5%", metavar="5%|0.05", help="Slow-down to accept.")
@click.pass_context
def compare_command(ctx: click.Context, before: Path, after: Path, threshold: float) -> None:
    """Compare report B with the older report A.

    The exit status is 0 if B is no slower than the threshold allows, 1 if it is, and 2 if a report can't be used.
    """
    comparison = compare(load(before), load(after), threshold=threshold)
    click.echo(comparison.render())
    ctx.exit(REGRESSED if comparison.regressed else 0)


def _write_page(loaded: Report | ProfileReport, file: Path, page: Path) -> None:
    if page.resolve() == file.resolve():
        raise ReportError(f"--html must name another file than the report itself. Found: {page}")
    check_folder("--html", page)
    try:
        write_atomic(page, as_page(loaded))
    except OSError as error:
        raise ReportError(f"{page} can't be written: {error.strerror or error}. Give --html another place.") from None
    click.echo(f"wrote {page}", err=True)


main.add_command(run)
main.add_command(profile)
main.add_command(doctor)
main.add_command(bench)
