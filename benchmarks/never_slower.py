"""Never slower: each loop of the suite, accelerated against itself under `accel.disabled()`, in turns.

    python -m benchmarks.never_slower [LOOP …] [--allow reordered] [--pairs 40] [--record]

Each loop has a process of its own. The search runs first; then turns of 20 steps alternate between accelerated and
disabled, on the same objects in the same memory: two processes that both train plainly differed by up to 3 % on small
loops, which is more than what is looked for. What `disabled` itself leaves in the loop is bounded by
tests/accel/test_overhead.py. A loop passes if its accelerated step is at most 1.02 times the plain one.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import accel
from accel.files import write_atomic
from benchmarks.loops import LOOPS, run
from benchmarks.pairs import ratio

TURN = 20
LIMIT = 1.02
SEARCH_STEPS = 4000


@dataclass(frozen=True)
class Verdict:
    """How one loop fared."""

    loop: str
    plain_ms: float
    accel_ms: float
    ratio: float
    """accelerated ÷ plain step time; below 1 is faster."""
    low: float
    high: float
    kept: list[str]
    settled: bool
    passed: bool


class Turns:
    """Called after each step of a loop: waits for the search to end, then alternates accelerated and disabled turns."""

    def __init__(self, pairs: int) -> None:
        self.models: list[Any] = []
        self.pairs = pairs
        self.accelerated: list[list[float]] = []
        self.plain: list[list[float]] = []
        self.settled = False
        self._turn: list[float] | None = None
        self._disabled: contextlib.ExitStack = contextlib.ExitStack()
        self._mark = 0.0

    @property
    def steps(self) -> int:
        """Steps enough for the search and the turns, with a few turns to warm up."""
        return SEARCH_STEPS + 2 * (self.pairs + 4) * TURN

    def wrap(self, model: Any, *rest: Any, **options: Any) -> tuple[Any, ...]:
        """Optimize as the loop asked for, and remember the model."""
        self.models.append(model)
        return accel.optimize(model, *rest, **options)

    def __call__(self, step: int) -> None:
        """End a step."""
        now = time.perf_counter()
        if self._turn is not None:
            self._turn.append(now - self._mark)
        if not self.settled:
            self.settled = self._searched() or step >= SEARCH_STEPS
        if self.settled and (self._turn is None or len(self._turn) == TURN):
            self._change()
        self._mark = time.perf_counter()

    def _searched(self) -> bool:
        return all(accel.explain(model).state in ("done", "undone") for model in self.models)

    def _change(self) -> None:
        """Begin the next turn, in the order A B B A A B B A …, so that a drift falls on both alike."""
        number = len(self.accelerated) + len(self.plain)
        self._disabled.close()
        self._turn = []
        if number % 4 in (1, 2):
            self._disabled.enter_context(accel.disabled())
            self.plain.append(self._turn)
        else:
            self.accelerated.append(self._turn)

    def close(self) -> None:
        """Leave nothing disabled."""
        self._disabled.close()


class _EnoughError(Exception):
    """The turns are over."""


def race(name: str, allow: str, pairs: int, disable: tuple[str, ...] = ()) -> Verdict:
    """Let a loop's search end in this process, then time it accelerated and disabled in turns."""
    turns = Turns(pairs)

    def on_step(step: int) -> None:
        turns(step)
        if len(turns.plain) + len(turns.accelerated) > 2 * (pairs + 3):
            raise _EnoughError

    def wrap(*given: Any) -> tuple[Any, ...]:
        return turns.wrap(*given, allow=allow, disable=disable, budget=120)

    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(_EnoughError), contextlib.closing(turns):
        run(name, steps=turns.steps, wrap=wrap, on_step=on_step)
    reports = [accel.explain(model) for model in turns.models]
    settled = all(report.state in ("done", "undone") for report in reports)
    kept = [line.name for report in reports for line in report.rows if line.status == "kept"]
    # The first three pairs warm up what a switch finds cold; the last turn is not over.
    fast, plain = turns.accelerated[3 : pairs + 3], turns.plain[3 : pairs + 3]
    found = ratio(fast, plain)
    plain_ms, accel_ms = (statistics.median(t for turn in side for t in turn) * 1e3 for side in (plain, fast))
    passed = settled and found.value <= LIMIT
    return Verdict(name, plain_ms, accel_ms, found.value, found.low, found.high, kept, settled, passed)


def alone(name: str, allow: str, pairs: int) -> Verdict:
    """Race a loop in a process of its own, so that no loop finds what another has left."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(race, name, allow, pairs).result()


@click.command()
@click.argument("loops", nargs=-1)
@click.option("--allow", default="reordered", show_default=True)
@click.option("--pairs", default=40, show_default=True, help="Turns of each.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(loops: tuple[str, ...], allow: str, pairs: int, record: bool) -> None:
    """Race accelerated against plain for LOOPS (default: all)."""
    console = Console(highlight=False, soft_wrap=True)
    verdicts = []
    for name in loops or LOOPS:
        verdict = alone(name, allow, pairs)
        verdicts.append(verdict)
        console.print(
            f"{'ok  ' if verdict.passed else 'FAIL'} {name:18} {verdict.plain_ms:7.3f} → {verdict.accel_ms:7.3f} ms, "
            f"accelerated ÷ plain {verdict.ratio:.3f} [{verdict.low:.3f}, {verdict.high:.3f}], "
            f"{', '.join(verdict.kept) or 'nothing'} kept{'' if verdict.settled else ', search not over'}"
        )
    if record:
        _record(verdicts, allow, pairs)
    if not all(verdict.passed for verdict in verdicts):
        sys.exit(1)


def _record(verdicts: list[Verdict], allow: str, pairs: int) -> None:
    import torch

    from accel.report.journal import machine_name

    summary = {
        "what": "accelerated ÷ plain step time after the search, mean of interleaved turns with 95 % interval",
        "command": f"python -m benchmarks.never_slower --allow {allow} --pairs {pairs}",
        "date": date.today().isoformat(),
        "machine": machine_name(torch.device("cpu")),
        "torch": torch.__version__,
        "limit": f"{LIMIT}",
        "loops": [asdict(verdict) for verdict in verdicts],
    }
    target = Path(__file__).parent / "results" / f"never-slower-{allow}-cpu-{date.today().isoformat()}.json"
    write_atomic(target, json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
