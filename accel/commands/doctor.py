"""`accel doctor`: what this machine and its Python are, and what slows communication down."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel import __version__
from accel.errors import InvalidArgument
from accel.files import check_folder, save
from accel.report.terminal import Page
from accel.report.words import count_text

if TYPE_CHECKING:
    from accel.comm.doctor import Examination, NcclLog

EXIT_FINDINGS = 1
SCHEMA = 1

_PACKAGES = (
    *("torchvision", "transformers", "lightning", "accelerate", "timm", "triton", "scipy", "simplejpeg"),
    *("nvidia-dali-cuda120", "nvidia-dali-cuda130", "ray", "kubernetes", "optuna"),
)
_VARIABLES = ("ACCEL", "ACCEL_CACHE", "ACCEL_DATA", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that change what accel or torch does; those of NCCL and gloo are the network's."""
_GIB = 2**30
_STYLES = {"error": "bold red", "warn": "yellow", "info": "cyan"}
_WORDS = {"error": "error", "warn": "warning", "info": "note"}


@click.command()
@click.argument("what", type=click.Choice(["all", "environment", "network"]), default="all")
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also read what NCCL_DEBUG=INFO printed.",
)
@click.option(
    "--report",
    "--json",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the findings there, as JSON.",
)
@click.pass_context
def doctor(ctx: click.Context, what: str, log: Path | None, target: Path | None) -> None:
    """Print versions, devices, cores and memory, and look at what slows the network down.

    \b
        accel doctor                        both
        accel doctor environment            for a bug report
        accel doctor network --log FILE     NCCL, gloo, links, GPUDirect, PCIe and limits

    Reads files, environment and limits, and changes nothing. What it can't look at it names, with the reason. The exit
    status is 0, 1 if a finding about the network is a warning or an error, and 2 if FILE can't be used.
    """
    if log is not None and what == "environment":
        raise InvalidArgument("--log must come with the network's checks, got `accel doctor environment`; leave it out")
    if target is not None:
        check_folder("--report", target)
    read = None if log is None else _read_log(log)
    document: dict[str, Any] = {"kind": what, "schema": SCHEMA}
    found_bad = False
    if what != "network":
        document["environment"] = environment()
        click.echo(_render_environment(document["environment"]))
    if what != "environment":
        from accel.comm.doctor import Host, examine

        examination = examine(Host(), read)
        click.echo(render(examination))
        document.update(asdict(examination))
        found_bad = examination.bad
    if target is not None:
        save("--report", target, json.dumps(document, indent=1) + "\n")
        click.echo(f"wrote {target}", err=True)
    ctx.exit(EXIT_FINDINGS if found_bad else 0)


def _render_environment(facts: dict[str, str]) -> str:
    page = Page(None, None)
    page.heading("environment")
    for name, text in facts.items():
        page.paragraph(f"{name}: {text}")
    return page.text() + "\n"


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
    words = ", ".join(count_text(counts[level], _WORDS[level]) for level in _STYLES if counts[level])
    checks = len(examination.passed) + len({finding.check for finding in examination.findings})
    page.paragraph(f"network: {words or 'nothing found'} ({checks} checks)", "bold")
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


# --- the environment --------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return facts of the software and of the machine as this process sees it, by name.

    Example:
        >>> environment()["torch"].split()[0]  # doctest: +SKIP
        '2.13.0+cpu'
    """
    import torch

    from accel.profiler import cgroup, host

    cores, quota = host.usable_cores(), cgroup.quota()
    memory = host.total_memory()
    limited = "" if quota is None else f", a quota of {quota:g}"
    instructions = torch.backends.cpu.get_cpu_capability()
    facts = {
        "accel": __version__,
        "python": f"{platform.python_version()} ({platform.platform()})",
        "torch": f"{torch.__version__}, built for {_built_for()}",
        "packages": ", ".join(_installed()) or "none of those that accel can use",
        "cpu": f"{host.cpu_name()}, {cores} cores usable{limited}, {instructions}",
        "threads": f"torch {torch.get_num_threads()}, between operators {torch.get_num_interop_threads()}",
        "memory": "not known" if memory is None else f"{memory / _GIB:.1f} GiB",
        "shared memory": _space(Path("/dev/shm")),
        "plan cache": _cache(),
        "variables": ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ) or "none set",
    }
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return {**facts, **({f"gpu {index}": text for index, text in enumerate(gpus)} or {"gpu": "none that torch sees"})}


def _built_for() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"


def _gpu(index: int) -> str:
    import torch

    what = torch.cuda.get_device_properties(index)
    return f"{what.name}, {what.total_memory / _GIB:.0f} GiB, compute capability {what.major}.{what.minor}"


def _installed() -> list[str]:
    """Return the installed packages that accel can use, with their versions."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return versions


def _space(folder: Path) -> str:
    try:
        space = shutil.disk_usage(folder)
    except OSError:
        return f"{folder}: not there"
    return f"{folder}: {space.free / _GIB:.1f} of {space.total / _GIB:.1f} GiB free"


def _cache() -> str:
    from accel.cache.folder import NoFolder, cache_folder

    try:
        folder = cache_folder()
    except NoFolder as reason:
        return f"none: {reason}" if str(reason) else "switched off by ACCEL_CACHE=0"
    plans = sum(1 for _ in folder.glob("*")) if folder.is_dir() else 0
    return f"{folder}: {plans} files"
