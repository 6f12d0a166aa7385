"""`accel mcp`: profiles, reports and plans as tools of a coding agent, by the Model Context Protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from accel import __version__
from accel.errors import AccelError, InvalidArgument

_INSTRUCTIONS = (
    "Find out why a PyTorch training script is slow, and make it faster. Start with `profile`; its next_step says what "
    "to do. `optimize` runs the script with accel and returns what was kept, with a diff for the script."
)
_PROFILE_FIELDS = ("verdict", "refused", "findings", "next", "steps", "step_ms", "ended", "next_step")
_RUN_FIELDS = (
    *("model", "state", "plain_ms", "accel_ms", "speedup", "speedup_low", "speedup_high", "training_same", "plan"),
    *("bottleneck", "bottleneck_share", "bottleneck_advice", "next_step"),
)


@click.command()
def mcp() -> None:
    """Serve profile, optimize, explain and compare to a coding agent, on stdin and stdout.

    Name `accel mcp` as the command of a server in the agent's settings. The scripts that the agent names are run, in
    the directory where this command was started. See https://modelcontextprotocol.io.
    """
    server().run()


def server() -> Any:
    """Return the server with its tools.

    Raises:
        InvalidArgument: if the package `mcp` is not installed.
    """
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise InvalidArgument("accel mcp needs the package mcp: pip install 'accel-train[mcp]'") from None
    made = MCPServer("accel", version=__version__, instructions=_INSTRUCTIONS)
    for tool in (profile, optimize, explain, compare):
        made.tool()(tool)
    return made


def profile(script: str, arguments: list[str], timeout_s: float = 600.0) -> dict[str, Any]:
    """Run a training script once under the profiler, and return what holds it back.

    Args:
        script: path of the script.
        arguments: its own; choose them so that it trains for at least 300 steps.
        timeout_s: seconds after which the script is ended; the report then says what was seen until then.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        printed = _accel(["profile", "--report", str(target), script, "--", *arguments], timeout_s)
        return _fields(target, _PROFILE_FIELDS, printed)


def optimize(
    script: str, arguments: list[str], allow: str = "reordered", budget: str = "30s", timeout_s: float = 1800.0
) -> dict[str, Any]:
    """Run a training script with accel, and return what was kept, its gain, and a diff that writes it into the script.

    Args:
        script: path of the script.
        arguments: its own; it should train for some minutes.
        allow: how far numbers may move: "exact", "reordered", "reduced" (bfloat16, TF32), "float8" or "lossy".
        budget: what the search may cost, as "30s" or "3%".
        timeout_s: seconds after which the script is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        target, diff = Path(folder) / "report.json", Path(folder) / "plan.diff"
        places = ["--report", str(target), "--patch", str(diff)]
        printed = _accel(["run", "--allow", allow, "--budget", budget, *places, script, "--", *arguments], timeout_s)
        result = _fields(target, _RUN_FIELDS, printed)
        if diff.exists():
            result["diff"] = diff.read_text(encoding="utf-8")
        return result


def explain(report: str) -> str:
    """Return a report that accel has written as text: what was tried, what each thing gave, and why.

    Args:
        report: path of its JSON.
    """
    from accel.report.rendering import as_text
    from accel.report.report import load

    return as_text(load(report), width=100, color=False)


def compare(before: str, after: str) -> str:
    """Return how two reports of one training differ, step time first.

    Args:
        before: path of the older report's JSON.
        after: path of the newer one's.
    """
    from accel.report.compare import compare as compare_reports
    from accel.report.report import load

    return compare_reports(load(before), load(after)).render()


def _accel(arguments: list[str], timeout_s: float) -> str:
    """Run a command of accel, and return the end of what it printed."""
    command = subprocess.Popen(
        [sys.executable, "-m", "accel", *arguments],
        stdin=subprocess.DEVNULL,  # stdin and stdout of this process belong to the protocol
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        printed, _ = command.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        command.terminate()  # accel ends the script and writes its report
        printed, _ = command.communicate()
    return printed[-4000:]


def _fields(report: Path, names: tuple[str, ...], printed: str) -> dict[str, Any]:
    """Return fields of a report; without one, what was printed says why."""
    if not report.exists():
        raise AccelError(f"there is no report; the script printed: {printed}")
    document = json.loads(report.read_text(encoding="utf-8"))
    return {**{name: document.get(name) for name in names}, "printed": printed}
