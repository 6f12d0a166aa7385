"""Never slower: each loop of the suite, plain against accelerated after its search, in turns.

    python -m benchmarks.never_slower [LOOP …] [--allow reordered] [--pairs 30] [--record]

The search runs first, alone. Then plain and accelerated take turns of 20 steps. A loop passes if the accelerated step
is at most 1.02 times the plain one, or at most 20 µs longer: the 95 % interval of the ratio reaches below that.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from accel.files import write_atomic
from benchmarks.loops import LOOPS, run
from benchmarks.pairs import Ratio, racers, ratio

TURN = 20
LIMIT = 1.02
OVERHEAD_S = 20e-6


def train(name: str, steps: int, allow: str | None, disable: tuple[str, ...], on_step: Callable[..., None]) -> None:
    """Run one loop of the suite, plainly if `allow` is None."""
    holder: list[Any] = []

    def wrap(model: Any, loader: Any, optimizer: Any = None) -> tuple[Any, ...]:
        import accel

        holder.append(model)
        given = (model, loader) if optimizer is None else (model, loader, optimizer)
        return accel.optimize(*given, allow=allow or "exact", disable=disable, budget=120)

    def state() -> Any:
        import accel

        return accel.explain(holder[0]).state if holder else None

    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet:
        if allow is None:
            run(name, steps=steps, on_step=lambda step: on_step(step, state))
        else:
            run(name, steps=steps, wrap=wrap, on_step=lambda step: on_step(step, state))


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
    overhead_us: float
    settled: bool
    passed: bool


def race(name: str, *, allow: str, pairs: int, disable: tuple[str, ...] = (), search_steps: int = 3000) -> Verdict:
    """Let a loop's search end, then run plain and accelerated in turns."""
    steps = search_steps + (pairs + 10) * TURN
    options: dict[str, Any] = {"name": name, "steps": steps, "disable": disable}
    variants = {"plain": (train, {**options, "allow": None}), "accel": (train, {**options, "allow": allow})}
    with racers(variants) as field:
        plain, fast = field["plain"], field["accel"]
        while fast.info not in ("done", "undone") and not fast.done and len(fast.turns) * TURN < search_steps:
            fast.run(TURN)
        settled = fast.info in ("done", "undone")
        for _ in range(3):  # warm both
            plain.run(TURN)
            fast.run(TURN)
        for racer in (plain, fast):
            racer.turns.clear()
        for number in range(pairs):
            for racer in (plain, fast) if number % 2 else (fast, plain):
                racer.run(TURN)
        found = ratio(fast.turns, plain.turns)
        plain_ms, accel_ms = (statistics.median(t for turn in r.turns for t in turn[2:]) * 1e3 for r in (plain, fast))
    return _judge(name, found, plain_ms, accel_ms, settled)


def _judge(name: str, found: Ratio, plain_ms: float, accel_ms: float, settled: bool) -> Verdict:
    limit = max(LIMIT, 1 + OVERHEAD_S / (plain_ms / 1e3))
    passed = settled and found.low <= limit
    overhead = (found.value - 1) * plain_ms * 1e3
    return Verdict(name, plain_ms, accel_ms, found.value, found.low, found.high, overhead, settled, passed)


@click.command()
@click.argument("loops", nargs=-1)
@click.option("--allow", default="reordered", show_default=True)
@click.option("--pairs", default=30, show_default=True, help="Turns of each.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(loops: tuple[str, ...], allow: str, pairs: int, record: bool) -> None:
    """Race plain against accelerated for LOOPS (default: all)."""
    console = Console(highlight=False, soft_wrap=True)
    verdicts = []
    for name in loops or LOOPS:
        verdict = race(name, allow=allow, pairs=pairs)
        if not verdict.passed and verdict.settled:  # a burst of another process: once more, with more turns
            verdict = race(name, allow=allow, pairs=2 * pairs)
        verdicts.append(verdict)
        console.print(
            f"{'ok  ' if verdict.passed else 'FAIL'} {name:18} {verdict.plain_ms:7.3f} → {verdict.accel_ms:7.3f} ms, "
            f"accelerated ÷ plain {verdict.ratio:.3f} [{verdict.low:.3f}, {verdict.high:.3f}], "
            f"{'settled' if verdict.settled else 'search not over'}"
        )
    if record:
        import torch

        from accel.journal import machine_name

        summary = {
            "what": "accelerated ÷ plain step time after the search, mean of interleaved turns with 95 % interval",
            "command": f"python -m benchmarks.never_slower --allow {allow} --pairs {pairs}",
            "date": date.today().isoformat(),
            "machine": machine_name(torch.device("cpu")),
            "torch": torch.__version__,
            "limit": f"{LIMIT} or {OVERHEAD_S * 1e6:.0f} µs",
            "loops": [asdict(verdict) for verdict in verdicts],
        }
        target = Path(__file__).parent / "results" / f"never-slower-{allow}-cpu-{date.today().isoformat()}.json"
        write_atomic(target, json.dumps(summary, indent=1) + "\n")
    if not all(verdict.passed for verdict in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
