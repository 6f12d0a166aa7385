"""Bernoulli draws on the CPU against torch's, which they equal bit for bit.

    python -m benchmarks.bernoulli [--rounds 30] [--record]

The two of a race run in turns, torch ours ours torch; each round gives a ratio. Before anything is timed the numbers
and the generators' states must agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import click
import torch
from torch import Generator, Tensor

from accel.kernels.bernoulli import bernoulli_, why_not
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row, times
from benchmarks.spread import fifths

COUNTS = (2_048, 16_384, 131_072, 1_048_576, 8_388_608)
DTYPES = (torch.float32, torch.bool)

RECORD = Record(
    "bernoulli",
    "draws of dropout's masks on the CPU against torch's, the same bits",
    {
        "dtype": Column("of the tensor", "dtype"),
        "elements": Column("how many", "elements", ":,"),
        "torch_ns": Column("of torch, ns an element, median", "torch ns each", ":.2f"),
        "ours_ns": Column("of ours, ns an element, median", "accel ns each", ":.2f"),
        "ratio": Column("torch over ours, median of the rounds", "speed-up", times("ratio", "ratio_p20", "ratio_p80")),
        "ratio_p20": Column("20th percentile of the rounds"),
        "ratio_p80": Column("80th percentile of the rounds"),
    },
    head=f"{SOURCE}, {{rounds}} interleaved rounds; median and 20 to 80 % of them.",
)
LINE = (
    "{dtype:8} {elements:>9,} elements: torch {torch_ns:5.2f} ns each, ours {ours_ns:5.2f} ns, "
    "{ratio:.2f}x [{ratio_p20:.2f}, {ratio_p80:.2f}]"
)
Draw = Callable[..., Tensor]


def race(dtype: torch.dtype, count: int, rounds: int, clock: Callable[[], float] = time.perf_counter) -> Row:
    """Time draws of ours and of torch in turns.

    Raises:
        RuntimeError: if their numbers or states differ.
    """
    tensor, generators = torch.empty(count, dtype=dtype), (Generator().manual_seed(0), Generator().manual_seed(0))
    torchs, ours = (_torchs, generators[0]), (bernoulli_, generators[1])
    numbers = [draw(torch.empty_like(tensor), 0.9, generator=generator) for draw, generator in (torchs, ours)]
    if not torch.equal(*numbers) or not torch.equal(*(generator.get_state() for generator in generators)):
        raise RuntimeError(f"other numbers than torch's for {count} elements of {dtype}: nothing is timed")
    slow, fast, ratios = [], [], []
    for _ in range(rounds):
        first, one, two, last = (_nanoseconds(each, tensor, clock) for each in (torchs, ours, ours, torchs))
        slow += [first, last]
        fast += [one, two]
        ratios.append((first + last) / (one + two))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "elements": count,
        "torch_ns": statistics.median(slow),
        "ours_ns": statistics.median(fast),
        **fifths(ratios).named("ratio", "ratio_p20", "ratio_p80"),
    }


def _torchs(tensor: Tensor, p: float, *, generator: Generator) -> Tensor:
    return tensor.bernoulli_(p, generator=generator)


def _nanoseconds(side: tuple[Draw, Generator], tensor: Tensor, clock: Callable[[], float]) -> float:
    draw, generator = side
    began = clock()
    draw(tensor, 0.9, generator=generator)
    return (clock() - began) / tensor.numel() * 1e9


def races(rounds: int) -> Iterator[Row]:
    """Yield a row for each dtype and number of elements."""
    for dtype in DTYPES:
        for count in COUNTS:
            yield race(dtype, count, rounds)


@click.command()
@click.option("--rounds", default=30, show_default=True)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Measure."""
    if reason := why_not():
        raise click.ClickException(reason)
    measured = []
    for row in races(rounds):
        measured.append(row)
        print(LINE.format_map(row), flush=True)
    if record:
        RECORD.write(measured, rounds=rounds)


if __name__ == "__main__":
    main()
