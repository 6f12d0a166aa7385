"""Do the default tests pass on each torch that is supported? `make test` with one interpreter for each version.

    make versions-test [VERSIONS="2.9.1 2.14.1=/path/to/python"]

A version without an interpreter gets a virtual environment of its own, `.venv-VERSION`: torch as the index has it (a
CUDA build is some 6 GB), all else by constraints.txt. What is recorded of a version stays until it is run again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time

import click
import tomllib
import torch
from rich.console import Console

from accel.profiler.host import machine_name
from benchmarks.record import ROOT, Column, Record
from benchmarks.render import Row
from benchmarks.repeated_tests import is_green, run_tests

VERSIONS = ("2.9.1", "2.11.0", "2.13.0", "2.14.1")
"""The oldest that is supported, that of the GPU suite, that of constraints.txt, and the newest that was tried."""
_OWN = ("torch", "torchvision", "triton", "setuptools")
"""Distributions of which each torch wants a version of its own."""
_PACKAGES = ("torchvision", "triton", "numpy")

RECORD = Record(
    name="torch-versions",
    what="the default tests under each version of torch",
    columns={
        "version": Column("of torch that was asked for"),
        "torch_found": Column("that was installed", "torch"),
        "torchvision": Column("version", "torchvision"),
        "triton": Column("version", "triton"),
        "numpy": Column("version"),
        "python": Column("version", "Python"),
        "passed": Column("tests", "passed"),
        "failed": Column("tests, errors included", "failed"),
        "skipped": Column("tests", "skipped"),
        "seconds": Column("it took", "s", ":.0f"),
        "failures": Column("names of the failed ones"),
        "skips": Column("reasons of the skipped ones, with their numbers"),
        "status": Column("exit status of make; none if it was ended after an hour"),
        "machine": Column("it ran on"),
    },
    head="`make versions-test`, {date}, {machine}, {cores} cores.",
    key=("version",),
)


def packages() -> list[str]:
    """Return what the default tests need beside torch, by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    # `dev` names another extra of ours, which isn't on the index.
    wanted = [*project["dependencies"], *extras["demo"], *extras["dev"]]
    return [each for each in wanted if re.split(r"[^\w-]", each)[0] not in (*_OWN, project["name"])]


def constraints() -> str:
    """Return constraints.txt without what depends on the version of torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0] not in _OWN)


def interpreter(version: str) -> str:
    """Return the interpreter of a version's virtual environment, which is made where there is none."""
    folder = ROOT / f".venv-{version}"
    python = str(folder / "bin" / "python")
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.write(constraints())
            pins.flush()
            install = [python, "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, "setuptools<82", "wheel"], check=True)  # torch before 2.13 wants no later one
            own = [f"torch=={version}", "torchvision", *packages()]
            subprocess.run([*install, "-c", pins.name, "--no-build-isolation", *own], check=True)
            if version.startswith("2.9."):  # which comes with a Triton that accel doesn't support
                subprocess.run([*install, "--no-deps", "triton==3.6.0"], check=True)
        (folder / ".installed").touch()
    return python


def installed(python: str) -> Row:
    """Return the versions that an interpreter has."""
    names = ("torch", *_PACKAGES)
    code = f"import importlib.metadata as m, platform; print(platform.python_version(), *map(m.version, {names}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(("python", "torch_found", *_PACKAGES), done.stdout.split(), strict=True))


def tested(version: str, python: str) -> Row:
    """Run the default tests with an interpreter, and return what is recorded."""
    began = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}  # accel itself is not installed there
    outcome = run_tests(["make", "--no-print-directory", "test", f"PYTHON={python}"], environ)
    row = outcome.row("", 0, time.monotonic() - began)
    about = {"version": version, **installed(python), "machine": machine_name(torch.device("cpu"))}
    return {**about, **{name: value for name, value in row.items() if name in RECORD.columns}}


@click.command()
@click.argument("versions", nargs=-1, metavar="[VERSION[=PYTHON]]…")
@click.option("--record/--no-record", default=True, help="Write the run of each version; default --record.")
def main(versions: tuple[str, ...], record: bool) -> None:
    """Run the default tests under VERSIONS of torch (default: all supported), and exit with 1 if one has failed."""
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    for given in versions or VERSIONS:
        version, _, python = given.partition("=")
        row = tested(version, python or interpreter(version))
        rows.append(row)
        console.print(one_line(row), markup=False)
        if record:
            RECORD.write([row], f"make versions-test VERSIONS={version}")
            fill_pages()
    if not all(map(is_green, rows)):
        sys.exit(1)


def fill_pages() -> None:
    """Put the record into the manual: a page that lags behind it fails the tests of the next version."""
    subprocess.run([sys.executable, "-m", "benchmarks.readme"], cwd=ROOT, check=True)


def one_line(row: Row) -> str:
    """Return the outcome of a version as it comes in."""
    failed = f", failed: {', '.join(row['failures'])}" if row["failures"] else ""
    counts = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
    return (
        f"{'ok  ' if is_green(row) else 'FAIL'} torch {row['torch_found']:14} {row['seconds']:6.0f} s  {counts}{failed}"
    )


if __name__ == "__main__":
    main()
