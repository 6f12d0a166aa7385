"""`accel report` and `accel compare`: read reports, without loading torch."""

from __future__ import annotations

import re
from pathlib import Path

import click

from accel.errors import ReportError
from accel.files import check_folder, save
from accel.report.compare import compare as compare_reports
from accel.report.rendering import as_page, as_text
from accel.report.report import load

REGRESSED = 1


def _threshold(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Read a fraction such as `0.05` or a percentage such as `5%`."""
    match = re.fullmatch(r"\s*(\d{1,9}\.?\d*|\.\d+)\s*(%?)\s*", value, re.ASCII)
    # A bare 5 would mean 500 %, which is hardly meant and would let every regression pass.
    if match is None or (float(match[1]) >= 1 and not match[2]):
        raise click.BadParameter(f"must be a percentage or a fraction below 1, e.g. 5% or 0.05. Found: {value!r}")
    return float(match[1]) / (100 if match[2] else 1)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="OUT", help="Also write it as a web page.")
def report(file: Path, page: Path | None) -> None:
    """Print the report in FILE (JSON, as written by accel), or in a folder of that name."""
    loaded = load(file)
    if page is not None:
        if page.resolve() == file.resolve():
            raise ReportError(f"--html must name another file than the report itself. Found: {page}")
        check_folder("--html", page)
        save("--html", page, as_page(loaded))
        click.echo(f"wrote {page}", err=True)
    click.echo(as_text(loaded))


@click.command()
@click.argument("before", type=click.Path(path_type=Path), metavar="A")
@click.argument("after", type=click.Path(path_type=Path), metavar="B")
@click.option("--threshold", callback=_threshold, default="5%", metavar="5%|0.05", help="Slow-down to accept.")
@click.pass_context
def compare(ctx: click.Context, before: Path, after: Path, threshold: float) -> None:
    """Compare report B with the older report A.

    The exit status is 0 if B is no slower than the threshold allows, 1 if it is, and 2 if a report can't be used.
    """
    comparison = compare_reports(load(before), load(after), threshold=threshold)
    click.echo(comparison.render())
    ctx.exit(REGRESSED if comparison.regressed else 0)
