"""The elastic sampler's computed order against a list from torch.randperm: time per index and memory, on a CPU.

    python -m benchmarks.elastic_sampler [--rounds 12] [--record]

For each n and batch size: the time to an epoch's first batch (what a resumed rank waits for), then that per index of
handing out batches as lists. "randperm" is what DistributedSampler does: the whole permutation as a list, first of all.
The two run in turns, randperm ours ours randperm; each round gives a ratio. Memory is what the resident size
has grown by after ten batches, each in a process of its own. Before anything is timed both must be permutations.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import click
import numpy as np
import torch

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.sampling.permutation import Permutation
from benchmarks.record import Column, Record
from benchmarks.render import Row
from benchmarks.spread import fifths

Batches = Iterator[list[int]]


RECORD = Record(
    "elastic-sampler",
    "order of the elastic sampler, computed, against a list from torch.randperm",
    {
        "samples": Column("of an epoch"),
        "batch": Column("per rank and step"),
        "randperm_first_ms": Column("time to the first batch, median, ms"),
        "ours_first_ms": Column("the same of ours, ms"),
        "first_ratio": Column("randperm ÷ ours, median of the rounds"),
        "first_p20": Column("20th percentile"),
        "first_p80": Column("80th percentile"),
        "randperm_ns": Column("per index after the first batch, and without the list's making, ns"),
        "randperm_epoch_ns": Column("per index of a whole epoch, the list's making shared out, ns"),
        "ours_ns": Column("per index after the first batch, ns"),
        "randperm_mib": Column("growth of the resident size after ten batches, MiB"),
        "ours_mib": Column("the same of ours, MiB"),
    },
    rows_name="races",
)
LINE = (
    "n = {samples:.0e}, batches of {batch}: first batch {randperm_first_ms:.2f} ms by randperm, {ours_first_ms:.3f} ms "
    "ours, {first_ratio:.0f}x [{first_p20:.0f}, {first_p80:.0f}]; per index {randperm_ns:.0f} ns "
    "({randperm_epoch_ns:.0f} with the list), ours {ours_ns:.0f} ns; {randperm_mib:.1f} MiB, ours {ours_mib:.1f} MiB"
)


def listed(samples: int, batch: int) -> Batches:
    """Yield one rank's batches as DistributedSampler draws them: a list of all indices, then slices of it."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(samples, generator=generator).tolist()
    return (indices[begin : begin + batch] for begin in range(0, samples, batch))


def computed(samples: int, batch: int) -> Batches:
    """Yield one rank's batches as the elastic sampler deals them."""
    return iter(ElasticSampler(samples, batch_size=batch))


WAYS: dict[str, Callable[[int, int], Batches]] = {"randperm": listed, "ours": computed}


def agree() -> None:
    """Raise unless both hand out each index once."""
    for name, way in WAYS.items():
        if sorted(index for batch in way(10_001, 64) for index in batch) != list(range(10_001)):
            raise RuntimeError(f"{name} does not hand out each index once: nothing is timed")


def timed(way: Callable[[int, int], Batches], samples: int, batch: int) -> tuple[float, float]:
    """Return the time to the first batch, ms, and that per index of the next ones, at most 200,000 indices, ns."""
    began = time.perf_counter_ns()
    batches = way(samples, batch)
    next(batches)
    first = time.perf_counter_ns()
    count = sum(len(each) for each in islice(batches, max(1, min(samples, 200_000) // batch - 1)))
    return (first - began) / 1e6, (time.perf_counter_ns() - first) / count


def race(samples: int, batch: int, rounds: int) -> Row:
    """Time both in turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    ratios = []
    for _ in range(rounds):
        one, two, three, four = (timed(WAYS[name], samples, batch) for name in ("randperm", "ours", "ours", "randperm"))
        found["randperm"] += [one, four]
        found["ours"] += [two, three]
        ratios.append((one[0] + four[0]) / (two[0] + three[0]))
    first = {name: statistics.median(each[0] for each in pairs) for name, pairs in found.items()}
    each = {name: statistics.median(pair[1] for pair in pairs) for name, pairs in found.items()}
    return {
        "samples": samples,
        "batch": batch,
        "randperm_first_ms": first["randperm"],
        "ours_first_ms": first["ours"],
        **fifths(ratios).named("first_ratio", "first_p20", "first_p80"),
        "randperm_ns": each["randperm"],
        "randperm_epoch_ns": each["randperm"] + first["randperm"] * 1e6 / samples,
        "ours_ns": each["ours"],
        "randperm_mib": resident_mib("randperm", samples, batch),
        "ours_mib": resident_mib("ours", samples, batch),
    }


def resident_mib(name: str, samples: int, batch: int) -> float:
    """Return by how much the resident size has grown after ten batches, MiB, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(_grown, (name, samples, batch)))


def _grown(name: str, samples: int, batch: int) -> float:
    list(WAYS[name](10_000, 100))  # what is loaded at first use
    before = _resident_pages()
    batches = WAYS[name](samples, batch)
    list(islice(batches, 10))
    return (_resident_pages() - before) * resource.getpagesize() / 2**20


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def in_bulk(samples: int, block: int = 16_384) -> float:
    """Return the time per index of the permutation alone in blocks of 16,384, ns: no lists, few calls."""
    order = Permutation(samples, seed=0)
    block = min(block, samples)
    starts = range(0, min(samples - block, 20 * block) + 1, block)
    best = []
    for start in starts:
        places = np.arange(start, start + block)
        began = time.perf_counter_ns()
        order(places)
        best.append((time.perf_counter_ns() - began) / block)
    return statistics.median(best)


@click.command()
@click.option("--rounds", default=12, show_default=True)
@click.option("--samples", default=(10**4, 10**6, 10**8), show_default=True, multiple=True, help="n; repeatable.")
@click.option("--batch", default=(32, 256), show_default=True, multiple=True, help="Per rank and step; repeatable.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, samples: tuple[int, ...], batch: tuple[int, ...], record: bool) -> None:
    """Measure."""
    agree()
    races = []
    for length in samples:
        for size in batch:
            # A list of 10^8 takes seconds: two rounds show what there is to see.
            races.append(race(length, size, rounds if length < 10**7 else min(rounds, 2)))
            print(LINE.format_map(races[-1]))
    bulk = {str(length): in_bulk(length) for length in samples}
    print("permutation alone, blocks of 16,384:", ", ".join(f"n = {n}: {ns:.0f} ns" for n, ns in bulk.items()))
    if record:
        threads = torch.get_num_threads()
        RECORD.write(races, numpy=np.__version__, threads=threads, permutation_ns_per_index=bulk)


if __name__ == "__main__":
    main()
