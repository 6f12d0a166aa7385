"""`accel doctor`: look for slow habits without running anything."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from accel.code_finder import HABITS, Search, search
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.terminal import Page

FOUND = 1


@click.group()
def doctor() -> None:
    """Look for what slows training down, without running it."""


@doctor.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--json",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the findings there.",
)
@click.option("--fail", is_flag=True, help="Exit with status 1 if there are findings.")
@click.pass_context
def code(ctx: click.Context, path: Path, target: Path | None, fail: bool) -> None:
    """Find slow habits in the Python file PATH, or in those of the folder PATH.

    Files are read, not run. The exit status is 0, 1 with --fail if there are findings, and 2 if PATH is not there.
    """
    if not path.exists():
        raise InvalidArgument(f"PATH must be a Python file or a folder, got {str(path)!r}, which is not there")
    found = search(path)
    click.echo(render(found))
    if target is not None:
        _write(found, target)
    ctx.exit(FOUND if fail and found.findings else 0)


def render(found: Search, width: int | None = None, color: bool | None = None) -> str:
    """Render findings as text, a paragraph a habit and a line a place.

    Args:
        found: what was found.
        width, color: as `terminal.render` takes them.
    """
    page = Page(width, color)
    counts = Counter(finding.habit for finding in found.findings)
    total = sum(counts.values())
    files = f"{found.files} file{'' if found.files == 1 else 's'}"
    page.say(f"accel: {total or 'no'} slow habit{'' if total == 1 else 's'} in {files}", "bold")
    for habit in (habit for habit in HABITS if counts[habit]):
        page.heading(f"{habit} ({counts[habit]})")
        page.say(f"costs: {HABITS[habit].costs}")
        page.say(f"write: {HABITS[habit].instead}", "green")
        for finding in found.findings:
            if finding.habit == habit:
                page.say(f"{finding.file}:{finding.line}: {finding.source}", indent=2)
    if found.unread:
        page.heading("not read")
        for file, reason in found.unread:
            page.say(f"{file}: {reason}", indent=2)
    return page.text()


def _write(found: Search, target: Path) -> None:
    text = json.dumps({"kind": "code", "schema": 1, **asdict(found)}, indent=1) + "\n"
    try:
        write_atomic(target, text)
    except OSError as error:
        raise InvalidArgument(
            f"--json {target} can't be written: {error.strerror or error}; name another place"
        ) from None
    click.echo(f"wrote {target}", err=True)
