"""How long a job of two workers stands still when one of them is killed: a script under torchrun, accel, TorchFT.

    python -m benchmarks.recovery [--rounds 5] [--record]

Each job trains the same model in steps of some 25 ms; when both workers have taken 60 together, one is sent SIGKILL.
Counted from there: the time until any worker has ended a step again, the time until both have, and how many steps are
done twice. The script saves every 20 steps, as scripts under torchrun do, and accel is asked for as much; torchrun
starts both workers anew. TorchFT keeps no file: the worker that is left goes on alone, and the other one, started by
its own torchrun, gets the weights from it. It is left out where `torchft-nightly` is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from accel.elastic.saving.torchrun_nodes import VARIABLE
from benchmarks.record import ROOT, Column, Record
from benchmarks.render import SOURCE, Row

_STEPS = 60
_TIMEOUT_S = 120.0
NAMES = {"script": "torchrun and the script's own checkpoint", "accel": "torchrun and accel", "torchft": "TorchFT"}

RECORD = Record(
    "recovery",
    "how long a job of two workers stands still when one is killed",
    {
        "way": Column("what keeps the job alive", "kept alive by"),
        "rounds": Column("times that a worker was killed", "rounds"),
        "failed": Column("of these, how often the job was not whole again within two minutes", "not whole again"),
        "still_s": Column("until any worker has ended a step, median", "any worker again, s", "{still_s:.1f} {still}"),
        "still": Column("least and most"),
        "whole_s": Column("until both have, median", "both again, s", "{whole_s:.1f} {whole}"),
        "whole": Column("least and most"),
        "repeated": Column("steps done twice, median", "steps done twice", ":.0f"),
    },
    key=("way",),
    head=f"{SOURCE}. One of two workers is sent SIGKILL; median, least and most.",
)


class Recovery(NamedTuple):
    """What a kill cost."""

    still_s: float
    whole_s: float
    repeated: int


class Workers:
    """The steps that the workers of a job have written down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> dict[Path, list[dict[str, Any]]]:
        """Return those of each worker, the oldest worker first."""
        return {path: _lines(path) for path in sorted(self._folder.glob("*.jsonl"))}

    def wait_for(self, ranks: int, count: int, since: float = 0.0, fewer: bool = False) -> float:
        """Wait until workers have taken steps together after a time; return when the last of those steps ended.

        Args:
            ranks: that take a step together.
            count: of steps that each takes.
            since: seconds since the epoch.
            fewer: one worker is enough, with however many others.
        """
        deadline, wanted = time.monotonic() + _TIMEOUT_S, 1 if fewer else ranks
        while time.monotonic() < deadline:
            ends = [
                [line["at"] for line in lines if line["at"] > since and (fewer or line["world"] == ranks)]
                for lines in self.steps().values()
            ]
            reached = sorted(each[count - 1] for each in ends if len(each) >= count)
            if len(reached) >= wanted:
                return float(reached[wanted - 1])
            time.sleep(0.02)
        raise TimeoutError(f"{ranks} ranks took no {count} steps within {_TIMEOUT_S:g} s")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that someone still writes."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def started(way: str, folder: Path) -> Iterator[None]:
    """Run a job of two workers."""
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=9"]
    worker = ["-m", "benchmarks.recovery_worker", way, str(folder)]
    commands = [[*job, "--nproc-per-node=2", *worker]]
    # Without the variable one job of three never came back, by a fault of torch (`torchrun_nodes.py`).
    # TorchFT's managers need the store that it leaves out, and each of its workers is alone in its job.
    own_store = {} if way == "torchft" else {VARIABLE: "1"}
    environ = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    lighthouse: Any = None
    if way == "torchft":
        from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,unused-ignore]

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        commands = [[*job, "--nproc-per-node=1", *worker]] * 2
    log = (folder / "output").open("wb")
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environ, "REPLICA_GROUP": str(number)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        for number, command in enumerate(commands)
    ]
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for path in folder.glob("*.jsonl"):
            _kill(int(path.stem.partition("-")[2]), of=folder)
        for process in running:
            process.kill()
            process.wait()
        log.close()
        if lighthouse is not None:
            lighthouse.shutdown()


def _kill(process: int, of: Path) -> None:
    """Kill a worker, if it still runs."""
    try:
        if str(of).encode() in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass


def recovery(way: str) -> Recovery:
    """Kill a worker of a job and return what that cost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = Workers(folder)
        with started(way, folder):
            try:
                workers.wait_for(2, _STEPS)
                newest = list(workers.steps())[-1]
                killed = time.time()
                _kill(int(newest.stem.partition("-")[2]), of=folder)
                still = workers.wait_for(2, 1, since=killed + 0.05, fewer=True)
                whole = workers.wait_for(2, 1, since=killed + 0.05)
            except TimeoutError as error:
                raise RuntimeError(f"{way}: {error}:\n{(folder / 'output').read_text()[-3000:]}") from None
            lines = [line for own in workers.steps().values() for line in own]
        before = max(line["step"] for line in lines if line["at"] <= killed + 0.05)
        again = min(line["step"] for line in lines if line["at"] > killed + 0.05)
        return Recovery(still - killed, whole - killed, max(0, before - again + 1))


def row_of(way: str, rounds: int) -> Row:
    """Return the row of one way."""
    found: list[Recovery] = []
    for _ in range(rounds):
        try:
            found.append(recovery(way))
        except RuntimeError as error:
            click.echo(error, err=True)
    if not found:
        raise RuntimeError(f"{way}: the job never came back")
    still, whole = sorted(one.still_s for one in found), sorted(one.whole_s for one in found)
    return {
        "way": NAMES[way],
        "rounds": rounds,
        "failed": rounds - len(found),
        "still_s": statistics.median(still),
        "still": f"[{still[0]:.1f}, {still[-1]:.1f}]",
        "whole_s": statistics.median(whole),
        "whole": f"[{whole[0]:.1f}, {whole[-1]:.1f}]",
        "repeated": statistics.median(one.repeated for one in found),
    }


@click.command()
@click.argument("ways", nargs=-1, type=click.Choice(list(NAMES)))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(ways: tuple[str, ...], rounds: int, record: bool) -> None:
    """Kill a worker of jobs that are kept alive in several WAYS (default: all)."""
    console, rows = Console(highlight=False, soft_wrap=True), []
    for way in ways or NAMES:
        if way == "torchft" and importlib.util.find_spec("torchft") is None:
            console.print("left out: torchft: torchft-nightly is not installed")
            continue
        rows.append(row_of(way, rounds))
        console.print(
            "{way}: any again after {still_s:.1f} s {still}, both {whole_s:.1f} s {whole}, ".format_map(rows[-1])
            + "{repeated:.0f} steps twice".format_map(rows[-1])
        )
    if record:
        RECORD.write(rows)


if __name__ == "__main__":
    main()
