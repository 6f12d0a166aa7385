"""Optimizers on a CPU against torch's, and against loops; benchmarks/gpu/optimizers.py has the GPU's.

    python -m benchmarks.optimizers [--rounds 30] [--numel 8000000] [--threads 2] [--record]

A transformer's layers of so many parameters, and 300 vectors of 64, where what is called takes the time. The two of a
race run in turns, rival ours ours rival; each round gives a ratio. Before anything is timed the weights must agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import nn

from benchmarks.kernels.optimizer_rivals import OURS, Step, loop, params_of, shapes, torchs
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row, times
from benchmarks.spread import fifths

SMALL = [(64,)] * 300

RECORD = Record(
    "optimizers",
    "a step of accel.optim against torch.optim and loops over parameters",
    {
        "optimizer": Column("which", "optimizer"),
        "parameters": Column("how many, in how many tensors", "parameters"),
        "rival": Column("what it is raced against", "against"),
        "rival_ms": Column("median of a step of the rival, ms", "rival ms", ":.2f"),
        "ours_ms": Column("median of a step of ours, ms", "accel ms", ":.2f"),
        "ratio": Column("rival over ours, median of the rounds", "speed-up", times("ratio", "ratio_p20", "ratio_p80")),
        "ratio_p20": Column("20th percentile of the rounds"),
        "ratio_p80": Column("80th percentile of the rounds"),
    },
    head=f"{SOURCE}, {{threads}} threads, {{rounds}} interleaved rounds; median and 20 to 80 % of them.",
)

Made = tuple[Step, list[nn.Parameter]]


def rivals(name: str) -> dict[str, Callable[[list[nn.Parameter]], Step]]:
    """Return what makes a step of each rival."""
    if name in ("lamb", "lars"):
        return {"loop": lambda params: loop(name, params)}
    return {
        "torch foreach": lambda params: torchs(name, params, foreach=True).step,
        "torch fused": lambda params: torchs(name, params, fused=True).step,
    }


def race(name: str, rival: str, own_shapes: list[Any], rounds: int, clock: Callable[[], float]) -> Row:
    """Time steps of ours and of a rival in turns."""
    ours_params, rival_params = (params_of(own_shapes, "cpu", torch.float32) for _ in range(2))
    kind, options = OURS[name]
    ours, theirs = kind(ours_params, **options).step, rivals(name)[rival](rival_params)
    return in_turns(name, rival, (ours, ours_params), (theirs, rival_params), rounds, clock)


def in_turns(
    name: str, rival: str, ours: Made, theirs: Made, rounds: int, clock: Callable[[], float], near: float = 1e-6
) -> Row:
    """Time two steps in turns, after three of each have given the same weights."""
    agree(name, ours, theirs, near)
    slow, fast, ratios = [], [], []
    for _ in range(rounds):
        first, one, two, last = (_milliseconds(step, clock) for step in (theirs[0], ours[0], ours[0], theirs[0]))
        slow += [first, last]
        fast += [one, two]
        ratios.append((first + last) / (one + two))
    return {
        "optimizer": name,
        "parameters": f"{sum(p.numel() for p in ours[1]):,} in {len(ours[1])}",
        "rival": rival,
        "rival_ms": statistics.median(slow),
        "ours_ms": statistics.median(fast),
        **fifths(ratios).named("ratio", "ratio_p20", "ratio_p80"),
    }


def agree(name: str, ours: Made, theirs: Made, near: float = 1e-6) -> None:
    """Raise unless both have the same weights after three steps."""
    for _ in range(3):
        ours[0]()
        theirs[0]()
    for a, b in zip(ours[1], theirs[1], strict=True):
        if not torch.allclose(a, b, rtol=1e-4, atol=near):
            raise RuntimeError(f"{name} and its rival give different weights: nothing is timed")


def _milliseconds(step: Step, clock: Callable[[], float]) -> float:
    began = clock()
    step()
    return (clock() - began) * 1e3


def races(numel: int, rounds: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[Row]:
    """Yield a row for each optimizer, set of parameters and rival."""
    for own_shapes in (shapes(numel), SMALL):
        for name in OURS:
            for rival in rivals(name):
                yield race(name, rival, own_shapes, rounds, clock)


@click.command()
@click.option("--rounds", default=30, show_default=True)
@click.option("--numel", default=8_000_000, show_default=True, help="Parameters of the larger set.")
@click.option("--threads", default=torch.get_num_threads, type=int, help="Of torch.  [default: cores]")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, numel: int, threads: int, record: bool) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    measured = []
    for row in races(numel, rounds):
        measured.append(row)
        print(LINE.format_map(row), flush=True)
    if record:
        RECORD.write(measured, threads=threads, rounds=rounds)


LINE = (
    "{optimizer:6} {parameters:>20} against {rival:14} {rival_ms:8.2f} ms, ours {ours_ms:8.2f} ms, "
    "{ratio:.2f}x [{ratio_p20:.2f}, {ratio_p80:.2f}]"
)

if __name__ == "__main__":
    main()
