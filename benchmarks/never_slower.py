"""Never slower: each loop of the suite, accelerated against itself under `accel.disabled()`, in turns.

    python -m benchmarks.never_slower [LOOP …] [--allow reordered] [--pairs 40] [--record]

Each loop has a process of its own. The search runs first; then turns of 20 steps alternate between accelerated and
disabled, on the same objects in the same memory: two processes that both train plainly differed by up to 3 % on small
loops, which is more than what is looked for. What `disabled` itself leaves in the loop is bounded by
tests/accel/test_overhead.py. A loop passes if its accelerated step may be at most 1.02 times the plain one by the
interval, and that is no wider than 0.1: what varies more says nothing.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import click
from rich.console import Console

import accel
from benchmarks.loops import LOOPS, run
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import ratio

TURN = 20
LIMIT, WIDEST = 1.02, 0.1
SEARCH_STEPS = 8000


RECORD = Record(
    "never-slower",
    "accelerated ÷ plain step time after the search, mean of interleaved turns with 95 % interval",
    {
        "loop": Column("by its name", "loop"),
        "plain_ms": Column("median step without accel, ms", "plain ms", ":.2f"),
        "accel_ms": Column("median step with it, ms"),
        "ratio": Column("of step times", "accelerated ÷ plain [95 %]", "{ratio:.3f} [{low:.3f}, {high:.3f}]"),
        "low": Column("of its 95 % interval"),
        "high": Column("of its 95 % interval"),
        "kept": Column("strategies that stayed"),
        "settled": Column("whether the search had ended"),
        "passed": Column("whether the ratio is within the limit"),
    },
    head=(f"{SOURCE}. Accelerated ÷ plain step time after the search; below 1 is faster; limit {{limit}}."),
    key=("loop",),
    rows_name="loops",
)
LINE = (
    "{loop:18} {plain_ms:7.3f} → {accel_ms:7.3f} ms, accelerated ÷ plain {ratio:.3f} [{low:.3f}, {high:.3f}], {words} "
    "kept"
)


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
        return accel.optimize(model, *rest, cache=False, **options)

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


def race(name: str, allow: str, pairs: int, disable: tuple[str, ...] = ()) -> Row:
    """Let a loop's search end in this process, then time it accelerated and disabled in turns."""
    # A spawned process would spawn workers too, where a script forks them: two seconds an epoch.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
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
    plain_ms, accel_ms = (statistics.median(t for turn in side for t in turn) * 1e3 for side in (plain, fast))
    measured = ratio(fast, plain)
    return {
        "loop": name,
        "plain_ms": plain_ms,
        "accel_ms": accel_ms,
        "ratio": measured.value,
        "low": measured.low,
        "high": measured.high,
        "kept": kept,
        "settled": settled,
        "passed": settled and measured.low <= LIMIT and measured.high - measured.low <= WIDEST,
    }


def alone(name: str, allow: str, pairs: int) -> Row:
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
    rows = []
    for name in loops or LOOPS:
        row = alone(name, allow, pairs)
        rows.append(row)
        words = LINE.format_map({**row, "words": ", ".join(row["kept"]) or "nothing"})
        console.print(f"{'ok  ' if row['passed'] else 'FAIL'} {words}{'' if row['settled'] else ', search not over'}")
    if record:
        replace(RECORD, name=f"never-slower-{allow}").write(rows, limit=f"{LIMIT}")
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
