"""`accel doctor`: look for what slows communication down on this machine, and for slow habits in source code."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel.code.finder import HABITS, Search, search
from accel.errors import InvalidArgument
from accel.files import check_folder, is_there, write_atomic
from accel.report.terminal import Page

if TYPE_CHECKING:
    from accel.comm.doctor import CheckFinding, Examination, NcclLog

EXIT_FINDINGS = 1
SCHEMA = 1

_STYLES = {"error": "bold red", "warn": "yellow", "info": "cyan"}

_log = click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also read what NCCL_DEBUG=INFO printed.",
)
_json = click.option(
    "--json",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=lambda ctx, param, target: _in_folder(target),
    metavar="FILE",
    help="Also write the findings there.",
)


def _in_folder(target: Path | None) -> Path | None:
    if target is not None:
        check_folder("--json", target)
    return target


@click.group(invoke_without_command=True)
@_log
@_json
@click.pass_context
def doctor(ctx: click.Context, log: Path | None, target: Path | None) -> None:
    """Look for what slows training down, without running it.

    Without a command it looks at this machine's network: `accel doctor network`.
    """
    if ctx.invoked_subcommand is None:
        ctx.exit(_network(log, target))
    if log is not None or target is not None:
        raise InvalidArgument("--log and --json must follow the command, as in accel doctor network --log FILE")


@doctor.command()
@_log
@_json
@click.pass_context
def network(ctx: click.Context, log: Path | None, target: Path | None) -> None:
    """Look at NCCL, gloo, links, GPUDirect, PCIe and limits of this machine.

    Reads files, environment and limits, and changes nothing. What it can't look at it names, with the reason. The exit
    status is 0, 1 if a finding is a warning or an error, and 2 if FILE can't be used.
    """
    ctx.exit(_network(log, target))


def _network(log: Path | None, target: Path | None) -> int:
    from accel.comm.doctor import Host, examine

    diagnosis = examine(Host(), None if log is None else _read_log(log))
    click.echo(render_network(diagnosis))
    if target is not None:
        _save({"kind": "network", "schema": SCHEMA, **asdict(diagnosis)}, target)
    return EXIT_FINDINGS if diagnosis.bad else 0


def _read_log(log: Path) -> NcclLog:
    from accel.comm.doctor import NotALog, read_nccl_log

    try:
        return read_nccl_log(log)
    except OSError as error:
        raise InvalidArgument(f"--log {log} can't be read: {(error.strerror or str(error)).lower()}") from None
    except NotALog as error:
        raise InvalidArgument(f"--log {log} is not an NCCL log: {error}") from None


def render_network(diagnosis: Examination, width: int | None = None, color: bool | None = None) -> str:
    """Render the network doctor's findings, the worst first.

    Args:
        diagnosis: the findings.
        width, color: as `terminal.render` takes them.
    """
    page = Page(width, color)
    counts = Counter(finding.level for finding in diagnosis.findings)
    words = ", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level])
    page.paragraph(f"accel: {words or 'nothing'} found by {_check_count(diagnosis)} checks", "bold")
    for finding in diagnosis.findings:
        _write_finding(page, finding)
    if diagnosis.passed:
        page.heading("nothing wrong with")
        page.paragraph(", ".join(diagnosis.passed))
    if diagnosis.unseen:
        page.heading("could not look at")
        reasons: dict[str, list[str]] = {}
        for name, why in diagnosis.unseen:
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            page.paragraph(f"{', '.join(names)}: {why}")
    return page.text()


def _check_count(diagnosis: Examination) -> int:
    return len(diagnosis.passed) + len({finding.check for finding in diagnosis.findings})


def _write_finding(page: Page, finding: CheckFinding) -> None:
    page.paragraph("")
    page.paragraph(f"{finding.level}: {finding.title} ({finding.check})", _STYLES[finding.level])
    page.paragraph(f"seen: {finding.evidence}", indent=2)
    page.paragraph(f"costs: {finding.costs}", indent=2)
    page.paragraph(f"set: {finding.change}", "green", indent=2)


@doctor.command()
@click.argument("path", type=click.Path(path_type=Path))
@_json
@click.option("--fail", is_flag=True, help="Exit with status 1 if there are findings.")
@click.pass_context
def code(ctx: click.Context, path: Path, target: Path | None, fail: bool) -> None:
    """Find slow habits in what a training step runs, in the Python file PATH or in those of the folder PATH.

    Files are read, not run. The exit status is 0, 1 with --fail if there are findings, and 2 if PATH is not there.
    """
    if not is_there("PATH", path, "read"):
        raise InvalidArgument(f"PATH must be a Python file or a folder, got {str(path)!r}, which is not there")
    result = search(path)
    click.echo(render(result))
    if target is not None:
        _write(result, target)
    ctx.exit(EXIT_FINDINGS if fail and result.findings else 0)


def render(result: Search, width: int | None = None, color: bool | None = None) -> str:
    """Render findings as text, with a paragraph for each habit and a line for each place.

    Args:
        result: the findings.
        width, color: as `terminal.render` takes them.
    """
    page = Page(width, color)
    counts = Counter(finding.habit for finding in result.findings)
    total = sum(counts.values())
    files = f"{result.files} file{'' if result.files == 1 else 's'}"
    page.paragraph(f"accel: {total or 'no'} slow habit{'' if total == 1 else 's'} in {files}", "bold")
    for habit in (habit for habit in HABITS if counts[habit]):
        page.heading(f"{habit} ({counts[habit]})")
        page.paragraph(f"costs: {HABITS[habit].costs}")
        page.paragraph(f"write: {HABITS[habit].instead}", "green")
        for finding in result.findings:
            if finding.habit == habit:
                page.paragraph(f"{finding.file}:{finding.line}: {finding.source}", indent=2)
    if result.unread:
        page.heading("not read")
        for file, reason in result.unread:
            page.paragraph(f"{file}: {reason}", indent=2)
    return page.text()


def _write(result: Search, target: Path) -> None:
    _save({"kind": "code", "schema": SCHEMA, **asdict(result)}, target)


def _save(document: dict[str, object], target: Path) -> None:
    try:
        write_atomic(target, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise InvalidArgument(
            f"--json {target} can't be written: {error.strerror or error}; name another place"
        ) from None
    click.echo(f"wrote {target}", err=True)
