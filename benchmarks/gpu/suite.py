"""`make gpu`: what decides first, then the other GPU benchmarks, under ten minutes a call, as JSON.

    python3 -m benchmarks.gpu [--out FOLDER] [--limit 570] [--only PART ...]

The parts of benchmarks/gpu/decisive.py come first, the tests among them; then the sections of
benchmarks/gpu/sections.py, each in a process of its own, the most important ones first. What is recorded already, of
the same device and the same sources, is not run again: the next call goes on where the time of this one ran out. A
section that fails, or for which the time runs out, is recorded as that, and the next is run. The figures are held to
the targets (benchmarks/gpu/targets.py); where tests failed, or did not run, nothing is claimed of them. The
exit status is 0 if all tests passed and every section ran to its end, whatever the targets.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

from accel.profiler.host import seconds_since_start
from benchmarks.gpu import decisive, decisive_tables, targets
from benchmarks.gpu.results import Results, is_green
from benchmarks.gpu.sections import SECTIONS
from benchmarks.record import FOLDER

LEAST_S = 15
"""A section for which less is left is not begun."""
ENDING_S = 5
"""Kept of the time of a call: processes are ended, and tables printed."""
LEAST_OF_PART_S = 20
"""The same of a part that decides."""


def suite(
    names: tuple[str, ...],
    results: Results,
    settings: decisive.Settings,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run parts and sections within so many seconds, and return those that did not run to their end.

    Args:
        names: of what is wanted; () for all that is not known yet.
        results: where the figures go.
        settings: of the parts that decide.
        limit_s: seconds for all together.
        clock: tells the seconds.
    """
    began = clock()
    took_s = results.figures.get("seconds", {})
    # What an earlier call did not come to, or to a small part of, is next.
    for name in sorted(decisive.PARTS, key=lambda name: took_s.get(name, 0.0) / decisive.LIMITS_S[name]):
        left_s = limit_s - (clock() - began)
        if (not names or name in names) and left_s >= LEAST_OF_PART_S:
            decisive.run_part(name, results, settings, min(left_s, decisive.LIMITS_S[name]))
    for name in SECTIONS:
        left_s = limit_s - (clock() - began)
        if (name in names if names else not results.is_known(name)) and left_s >= LEAST_S:
            decisive.run_section(name, results, settings, min(left_s, SECTIONS[name].limit_s))
    return [name for name in SECTIONS if not (names and name not in names) and not results.is_known(name)]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the results. Default benchmarks/results.")
@click.option("--limit", default=570, show_default=True, help="Seconds for everything.")
@click.option("--only", multiple=True, type=click.Choice([*decisive.PARTS, *SECTIONS]), help="Leave the others out.")
def main(out: Path | None, limit: int, only: tuple[str, ...]) -> None:
    """Run the GPU suite."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run, nothing was written")
        sys.exit(2)
    settings = decisive.Settings(decisive.CACHE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as timeout(1) ends it
    results = Results.opened("make gpu", out or Path(os.environ.get("OUT") or FOLDER), settings.cache)
    try:
        lacking = suite(only, results, settings, limit - seconds_since_start() - ENDING_S)
    except KeyboardInterrupt:
        print("ended by a signal")
        lacking = [name for name in SECTIONS if not results.is_known(name)]
    print(decisive_tables.text(results.figures))
    print(targets.table(targets.judged(results.figures, is_green(results.figures))))
    for name in lacking:
        print(f"{name}: {results.figures.get(name, {}).get('failed', 'not run, or of other sources: run this again')}")
    sys.exit(0 if is_green(results.figures) and not lacking else 1)


if __name__ == "__main__":
    main()
