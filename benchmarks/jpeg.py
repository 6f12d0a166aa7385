"""From JPEG files to uint8 batches on the CPU: ours against the other ways, on the same files.

    python -m benchmarks.jpeg [--quick] [--record]

Each way runs in a process of its own. In its turn it reads an epoch and then another one, which counts; turns go round
in the order A B C C B A …, and ratios come from the same round. The trusted figure on a shared machine is CPU time:
getrusage of the process and what the kernel counted for its worker processes; images per second depend on who else uses
the cores.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import recording
from benchmarks.loading.jpeg_rivals import HEIGHT, RIVALS, THREADS, WIDTH, missing
from benchmarks.loading.photos import jpegs
from benchmarks.pairs import Ratio, racers, ratio

DISTRIBUTIONS = ("torch", "pillow", "simplejpeg", "opencv-python-headless", "spdl-core", "nvidia-dali-cuda130")


@dataclass(frozen=True)
class Row:
    """One way on one job; lists hold one figure for each turn."""

    job: str
    way: str
    cpu_ms: float
    """CPU-ms an image, the median of the turns."""
    images_per_s: float
    """The median of the turns."""
    cpu_ms_turns: list[float]
    images_per_s_turns: list[float]
    cpu_ratio: Ratio | None
    """CPU time ÷ that of ours, with its 95 % interval; None for ours."""
    wall_ratio: Ratio | None
    """Seconds ÷ those of ours."""


def cpu_s() -> float:
    """Return the CPU time of this process and its workers, those that ended included, s."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    running = sum(_of_threads(child.pid) for child in multiprocessing.active_children() if child.pid)
    return sum(used.ru_utime + used.ru_stime for used in ended) + running


def _of_threads(process: int) -> float:
    # In ns, where /proc/PID/stat counts in hundredths of a second.
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{process}/task").glob("*/schedstat")) / 1e9


def read(on_step: Callable[..., None], name: str, files: list[Path], batch: int, job: str, turns: int) -> None:
    """Read two epochs a turn, the second one counted, in the process of one way."""
    torch.set_num_threads(1)
    if not missing(name) and "OpenCV" in name:
        import cv2

        cv2.setNumThreads(0)
    epoch = RIVALS[name][0](files, batch, job)
    if epoch() != len(files):
        raise RuntimeError(f"{name} must return every image once")
    for turn in range(turns):
        epoch()  # so that what is read ahead at the beginning is as much as what is read ahead at the end
        before, began = cpu_s(), time.perf_counter()
        epoch()
        seconds, used = time.perf_counter() - began, cpu_s() - before
        on_step(turn, lambda used=used, seconds=seconds: (used, seconds))
    del epoch
    gc.collect()  # ends worker processes before the turn is over


def compare(job: str, names: list[str], files: list[Path], batch: int, turns: int) -> list[Row]:
    """Return the rows of one job."""
    variants: dict[str, Any] = {
        name: (read, {"name": name, "files": files, "batch": batch, "job": job, "turns": turns}) for name in names
    }
    used: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with racers(variants) as running:
        for turn in range(turns):
            order = names if turn % 2 == 0 else names[::-1]
            for name in order:
                running[name].run(1)
                used[name].append(running[name].info)
        for racer in running.values():
            racer.run(1)
    return [_row(job, name, used[name], used[names[0]], len(files)) for name in names]


def _row(job: str, name: str, used: list[tuple[float, float]], first: list[tuple[float, float]], images: int) -> Row:
    cpu, rate = [1000 * s / images for s, _ in used], [images / s for _, s in used]
    ratios = [
        None if used is first else ratio([[turn[which]] for turn in used], [[turn[which]] for turn in first])
        for which in (0, 1)
    ]
    return Row(job, name, statistics.median(cpu), statistics.median(rate), cpu, rate, *ratios)


@click.command()
@click.option("--images", default=600, show_default=True)
@click.option("--batch", default=64, show_default=True)
@click.option("--turns", default=8, show_default=True, help="Epochs of each way and job.")
@click.option("--quick", is_flag=True, help="120 images, 3 turns.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(images: int, batch: int, turns: int, quick: bool, record: bool) -> None:
    """Measure."""
    images, turns = (120, 3) if quick else (images, turns)
    names = [name for name in RIVALS if not missing(name)]
    absent = {name: missing(name) for name in RIVALS if missing(name)}
    files, words = jpegs(images, WIDTH, HEIGHT)
    print(f"{words}; batches of {batch}, {THREADS} threads or workers, {_cores()} cores")
    rows = [row for job in ("resize", "train") for row in _printed(compare(job, names, files, batch, turns))]
    for name, modules in absent.items():
        print(f"left out: {name} ({', '.join(modules)} not installed)")
    if record:
        command = f"python -m benchmarks.jpeg --images {images} --batch {batch} --turns {turns}"
        write(rows, words, absent, command)


def _printed(rows: list[Row]) -> list[Row]:
    for row in rows:
        spread = f"[{min(row.cpu_ms_turns):.2f}, {max(row.cpu_ms_turns):.2f}]"
        compared = "" if row.cpu_ratio is None else f", CPU {row.cpu_ratio}, seconds {row.wall_ratio} of ours"
        print(
            f"  {row.job:7}{row.way:29}{row.cpu_ms:5.2f} CPU-ms an image {spread}, {row.images_per_s:6.0f} images/s"
            f"{compared}"
        )
    return rows


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def write(rows: list[Row], words: str, absent: dict[str, list[str]], command: str) -> None:
    """Write the figures beside the others."""
    figures = {
        "cores": _cores(),
        "versions": {each: metadata.version(each) for each in DISTRIBUTIONS if _installed(each)},
        "files": words,
        "left_out": absent,
        "rows": [asdict(row) for row in rows],
    }
    recording.write("jpeg", "JPEG files to uint8 batches of 224 x 224 on the CPU", figures, command=command)


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
