"""The continuous loader against others: seconds per epoch, and to the first batch of an epoch, interleaved.

    python -m benchmarks.loaders [--only small] [--turns 5] [--record]

Turn after turn, each loader runs some epochs of a job without a pause; the first of them is not counted. Ratios are
taken within a turn. `best of hand` is the fastest of the continuous loader's own modes with any number of workers, each
chosen by hand; `auto` has chosen before the first turn, and what that took is told.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import click
import torch
from torch.utils.data import DataLoader

from accel.dataio.loader import ContinuousLoader
from benchmarks.loading.jobs import BURSTS, FAR, LARGE, LARGE_OURS, PHOTOS, SMALL, STARTS, TINY, Job
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row, times
from benchmarks.spread import extremes, ratios
from benchmarks.suite.packages import let_torchvision_import

# Of warming up an automatic choice.
_SETTLED_S = 8.0
FLOOR = "no loading: the steps alone"


def _head(result: Row) -> str:
    """Say what was measured, and how far the automatic mode came."""
    lines = [
        f"{SOURCE}. Turns of some epochs each, interleaved; medians over turns, and the lowest and highest ratio "
        "within a turn.",
        "",
        "The steps alone are the most that a loader can reach, whatever it is compared with. Of that speed the "
        "automatic mode reaches:",
        "",
    ]
    return "\n".join([*(line.format_map(result) for line in lines), *_shares(result["rows"])])


def _chosen(row: Row) -> str:
    return f": {row['note'].split(':')[0]}" if row["loader"].endswith("auto") and row["note"] else ""


def _shares(rows: list[Row]) -> list[str]:
    """Return, for each job with a step, which share of the possible speed the automatic mode reaches."""
    floors = {row["job"]: row for row in rows if row["loader"] == FLOOR}
    return [
        f"- {row['job']}{_decoder(row)}: {floors[row['job']]['epoch_s'] / row['epoch_s']:.0%}, "
        f"{row['speedup']:.2f}x of at most {floors[row['job']]['speedup']:.2f}x"
        for row in rows
        if row["job"] in floors and row["loader"].endswith("continuous, auto")
    ]


def _decoder(row: Row) -> str:
    name, colon, _ = row["loader"].partition(": ")
    return f", by `{name}`" if colon else ""


RECORD = Record(
    "loaders",
    "seconds per epoch of data loaders, interleaved; speedup over the first loader of each job",
    {
        "job": Column("what is loaded, and how long the step is"),
        "loader": Column("and its workers", "loader", lambda row: row["loader"] + _chosen(row)),
        "epoch_s": Column("median of turns, s", "s per epoch", ":.3f"),
        "epoch_low_s": Column("least, s"),
        "epoch_high_s": Column("most, s"),
        "first_ms": Column("median of epochs, ms", "first batch, ms (most)", "{first_ms:.1f} ({first_most_ms:.1f})"),
        "first_most_ms": Column("longest, ms"),
        "speedup": Column("over the job's first loader, median of the turns' ratios", "speed-up", times("speedup")),
        "speedup_low": Column("least"),
        "speedup_high": Column("most"),
        "note": Column("what was chosen automatically, and after how long"),
    },
    head=_head,
    title=lambda row: row["job"],
    key=("job",),
)
LINE = (
    "  {loader:52} {epoch_s:7.3f} s, first batch {first_ms:7.2f} ms (≤ {first_most_ms:.1f}), {speedup:5.2f}x "
    "[{speedup_low:.2f}, {speedup_high:.2f}]  {note}"
)


def plain(job: Job, workers: int = 0, kind: Any = DataLoader, **options: Any) -> Any:
    """Return a loader of torch's interface."""
    if workers:
        options["num_workers"] = workers
    if job.collate is not None:
        options["collate_fn"] = job.collate
    # A generator of the loader's own, so that every loader could know the next epoch's order.
    return kind(job.dataset(), job.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0), **options)


def ours(job: Job, mode: Any, workers: int | None = None) -> ContinuousLoader:
    """Return a continuous loader."""
    return ContinuousLoader(plain(job), mode=mode, num_workers=workers)


def stateful(job: Job, workers: int) -> Any:
    """Return torchdata's loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what torch has deprecated
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return plain(job, workers, kind, persistent_workers=True)


def multi_epochs(job: Job, workers: int) -> Any:
    """Return timm's loader that keeps its workers over epochs."""
    let_torchvision_import()
    return plain(job, workers, importlib.import_module("timm.data.loader").MultiEpochsDataLoader)


Maker = Callable[[], Any]


def rivals(job: Job, workers: int) -> dict[str, Maker]:
    """Return the loaders of others, by name; the first is the baseline."""
    return {
        f"DataLoader, {workers} workers": lambda: plain(job, workers),
        f"DataLoader, {workers} persistent workers": lambda: plain(job, workers, persistent_workers=True),
        f"torchdata StatefulDataLoader, {workers} persistent workers": lambda: stateful(job, workers),
        f"timm MultiEpochsDataLoader, {workers} workers": lambda: multi_epochs(job, workers),
        "DataLoader, no workers": lambda: plain(job),
        FLOOR: lambda: range(len(plain(job))),
    }


def hand(job: Job, counts: Iterable[int] = (1, 2)) -> dict[str, Maker]:
    """Return the continuous loader in each mode."""
    found: dict[str, Maker] = {"continuous, inline": lambda: ours(job, "inline")}
    for count in counts:
        found[f"continuous, fork({count})"] = partial(ours, job, "fork", count)
        found[f"continuous, threads({count})"] = partial(ours, job, "threads", count)
    return found


def automatic(job: Job) -> dict[str, Maker]:
    """Return the continuous loader that chooses by itself."""
    return {"continuous, auto": lambda: ours(job, "auto")}


def everything(job: Job, workers: int = 2, counts: Iterable[int] = (1, 2)) -> dict[str, Maker]:
    """Return all loaders of a job."""
    return rivals(job, workers) | hand(job, counts) | automatic(job)


def epoch(loader: Any, job: Job) -> tuple[float, float]:
    """Run one epoch and return its seconds, and those to the first batch."""
    began = time.perf_counter()
    first = None
    for _ in loader:
        if first is None:
            first = time.perf_counter() - began
        if job.step_s:
            time.sleep(job.step_s)
    return time.perf_counter() - began, first or 0.0


def warm(loader: Any, job: Job) -> str:
    """Run a first epoch, and more until an automatic choice is made; return what was chosen."""
    began = time.perf_counter()
    epoch(loader, job)
    if not isinstance(loader, ContinuousLoader):
        return ""
    while "trying" in loader.explain() and time.perf_counter() - began < 60:
        epoch(loader, job)
    chosen_s = time.perf_counter() - began
    if "as requested" not in loader.explain():
        while time.perf_counter() - began < _SETTLED_S:  # the look-ahead follows for some seconds
            epoch(loader, job)
    return f"{loader.explain().splitlines()[0]}; after {chosen_s:.1f} s"


def compare(job: Job, makers: dict[str, Maker], turns: int) -> Iterator[Row]:
    """Run all loaders in turn and yield a row for each; the first one is the baseline."""
    loaders, notes = {}, {}
    for name, make in makers.items():
        try:
            loaders[name] = make()
            notes[name] = warm(loaders[name], job)
        except ImportError as error:
            click.echo(f"  {name}: left out, {error}")
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in loaders}
    for _ in range(turns):
        for name, loader in loaders.items():
            times[name].append([epoch(loader, job) for _ in range(job.epochs)][1:])
    for loader in loaders.values():
        if isinstance(loader, ContinuousLoader):
            loader.close()
    base = [statistics.fmean(seconds for seconds, _ in turn) for turn in next(iter(times.values()))]
    for name, taken in times.items():
        yield _row(job, name, taken, base, notes[name])


def _row(job: Job, name: str, taken: list[list[tuple[float, float]]], base: list[float], note: str) -> Row:
    means = [statistics.fmean(seconds for seconds, _ in turn) for turn in taken]
    first = extremes([first * 1e3 for turn in taken for _, first in turn])
    return {
        "job": job.name,
        "loader": name,
        **extremes(means).named("epoch_s", "epoch_low_s", "epoch_high_s"),
        "first_ms": first.median,
        "first_most_ms": first.high,
        **extremes(ratios(base, means)).named("speedup", "speedup_low", "speedup_high"),
        "note": note,
    }


def photos500(turns: int) -> Iterator[Row]:
    """512 JPEG files 500 x 375, decoded by Pillow and by `ImageDataset`."""
    torchs: dict[str, Maker] = {
        "DataLoader, no workers": lambda: plain(LARGE_OURS),
        "DataLoader, 2 workers": lambda: plain(LARGE_OURS, 2),
        "DataLoader, 2 persistent workers": lambda: plain(LARGE_OURS, 2, persistent_workers=True),
    }
    own = torchs | hand(LARGE_OURS) | automatic(LARGE_OURS)
    yield from compare(LARGE, everything(LARGE) | {f"ImageDataset: {name}": own[name] for name in own}, turns)


def tiny(turns: int) -> Iterator[Row]:
    """60,000 tiny samples, against the best number of workers."""
    workers: dict[str, Maker] = {
        f"DataLoader, {n} persistent workers": partial(plain, TINY, n, persistent_workers=True) for n in (1, 2, 4)
    }
    yield from compare(TINY, workers | hand(TINY) | automatic(TINY), turns)


def bursts(turns: int) -> Iterator[Row]:
    """Samples of which a few take long."""
    far_ahead = partial(plain, BURSTS, 2, persistent_workers=True, prefetch_factor=32)
    makers = rivals(BURSTS, 2) | {"DataLoader, 2 persistent workers, 32 ahead each": far_ahead} | automatic(BURSTS)
    yield from compare(BURSTS, makers, turns)


def starts(turns: int) -> Iterator[Row]:
    """Workers that are started without fork."""
    for method, step_s in itertools.product(("forkserver", "spawn"), (SMALL.step_s, 0.0)):
        name = f"{SMALL.name if step_s else '2,000 small images, no step'}, {method}"
        job = Job(name, SMALL.dataset, SMALL.batch_size, step_s, epochs=2)
        makers: dict[str, Maker] = {
            f"DataLoader, 2 workers by {method}": partial(plain, job, 2, multiprocessing_context=method),
            f"continuous, {method}(2)": partial(ours, job, method, 2),
        }
        floor: dict[str, Maker] = {FLOOR: lambda job=job: range(len(plain(job)))} if step_s else {}  # type: ignore[misc]
        yield from compare(job, makers | floor, max(3, turns // 2))


def heap(turns: int) -> Iterator[Row]:
    """Eight workers of a process with 3 GB in memory."""
    ballast = torch.ones(3 << 28)
    job = Job(f"{STARTS.name}, 3 GB parent, 8 workers", STARTS.dataset, STARTS.batch_size, STARTS.step_s, epochs=4)
    makers: dict[str, Maker] = {
        "DataLoader, 8 workers": lambda: plain(job, 8),
        "DataLoader, 8 persistent workers": lambda: plain(job, 8, persistent_workers=True),
        "continuous, fork(8)": lambda: ours(job, "fork", 8),
    }
    yield from compare(job, makers | automatic(job), turns)
    assert float(ballast[-1]) == 1.0  # kept to the end


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "small": partial(compare, SMALL, everything(SMALL)),
    "pictures": partial(compare, PHOTOS, everything(PHOTOS)),
    "photos500": photos500,
    "tiny": tiny,
    "far": partial(compare, FAR, everything(FAR, 8, (2, 4, 8, 16))),
    "bursts": bursts,
    "starts": starts,
    "heap": heap,
}


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts; default all.")
@click.option("--turns", default=5, show_default=True)
@click.option(
    "--record", is_flag=True, help="Write the rows to benchmarks/results/, in place of older ones of the job."
)
def main(only: tuple[str, ...], turns: int, record: bool) -> None:
    """Compare loaders."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for part in only or PARTS:
        for row in PARTS[part](turns):
            if not rows or rows[-1]["job"] != row["job"]:
                click.echo(row["job"])
            click.echo(LINE.format_map(row))
            rows.append(row)
    if record:
        RECORD.write(rows)


if __name__ == "__main__":
    main()
