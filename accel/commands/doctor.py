"""`accel doctor`: look for what slows communication down on this machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel.errors import InvalidArgument
from accel.files import check_folder, save
from accel.report.terminal import Page

if TYPE_CHECKING:
    from accel.comm.doctor import Examination, NcclLog

EXIT_FINDINGS = 1
SCHEMA = 1

_STYLES = {"error": "bold red", "warn": "yellow", "info": "cyan"}


@click.command()
@click.argument("what", type=click.Choice(["network"]), default="network")
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also read what NCCL_DEBUG=INFO printed.",
)
@click.option(
    "--json",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the findings there.",
)
@click.pass_context
def doctor(ctx: click.Context, what: str, log: Path | None, target: Path | None) -> None:
    """Look at NCCL, gloo, links, GPUDirect, PCIe and limits of this machine.

    Reads files, environment and limits, and changes nothing. What it can't look at it names, with the reason. The exit
    status is 0, 1 if a finding is a warning or an error, and 2 if FILE can't be used.
    """
    from accel.comm.doctor import Host, examine

    if target is not None:
        check_folder("--json", target)
    examination = examine(Host(), None if log is None else _read_log(log))
    click.echo(render(examination))
    if target is not None:
        document = {"kind": what, "schema": SCHEMA, **asdict(examination)}
        save("--json", target, json.dumps(document, indent=1) + "\n")
        click.echo(f"wrote {target}", err=True)
    ctx.exit(EXIT_FINDINGS if examination.bad else 0)


def _read_log(log: Path) -> NcclLog:
    from accel.comm.doctor import NotALog, read_nccl_log

    try:
        return read_nccl_log(log)
    except OSError as error:
        raise InvalidArgument(f"--log {log} can't be read: {(error.strerror or str(error)).lower()}") from None
    except NotALog as error:
        raise InvalidArgument(f"--log {log} is not an NCCL log: {error}") from None


def render(examination: Examination, width: int | None = None, color: bool | None = None) -> str:
    """Render the findings, the worst first.

    Args:
        examination: the findings.
        width, color: as `terminal.render` takes them.
    """
    page = Page(width, color)
    counts = Counter(finding.level for finding in examination.findings)
    words = ", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level])
    checks = len(examination.passed) + len({finding.check for finding in examination.findings})
    page.paragraph(f"accel: {words or 'nothing'} found by {checks} checks", "bold")
    for finding in examination.findings:
        page.paragraph("")
        page.paragraph(f"{finding.level}: {finding.title} ({finding.check})", _STYLES[finding.level])
        page.paragraph(f"seen: {finding.evidence}", indent=2)
        page.paragraph(f"costs: {finding.costs}", indent=2)
        page.paragraph(f"set: {finding.change}", "green", indent=2)
    if examination.passed:
        page.heading("nothing wrong with")
        page.paragraph(", ".join(examination.passed))
    if examination.unseen:
        page.heading("could not look at")
        for reason in dict.fromkeys(reason for _, reason in examination.unseen):
            page.paragraph(f"{', '.join(name for name, why in examination.unseen if why == reason)}: {reason}")
    return page.text()
