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
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

from accel.profiler.host import usable_cores
from benchmarks.loading.jpeg_rivals import HEIGHT, RIVALS, THREADS, WIDTH, missing
from benchmarks.loading.photos import jpegs
from benchmarks.pairs import racers
from benchmarks.record import Column, Record
from benchmarks.render import Row, times
from benchmarks.spread import Ratio, ratio

DISTRIBUTIONS = ("torch", "pillow", "simplejpeg", "opencv-python-headless", "spdl-core", "nvidia-dali-cuda130")
TITLES = {"resize": "The whole image, 500x375 to 224x224", "train": "`RandomResizedCrop(224)` and a flip"}


def _of_ours(ratio: dict[str, float] | None) -> str:
    return times("value", "low", "high").format_map(ratio) if ratio else "1"


RECORD = Record(
    "jpeg",
    "JPEG files to uint8 batches of 224 x 224 on the CPU",
    {
        "job": Column("resize the whole image, or train: cut, resize and mirror"),
        "way": Column("who decodes, and in what", "way"),
        "cpu_ms": Column("CPU time of an image, median of the turns, ms", "CPU-ms an image", ":.2f"),
        "images_per_s": Column("median of the turns", "images/s", ":.0f"),
        "cpu_ms_turns": Column("one figure a turn, ms"),
        "images_per_s_turns": Column("one figure a turn"),
        "cpu_ratio": Column("CPU time, with a 95 % interval", "its CPU ÷ ours", lambda row: _of_ours(row["cpu_ratio"])),
        "wall_ratio": Column("with a 95 % interval", "its seconds ÷ ours", lambda row: _of_ours(row["wall_ratio"])),
    },
    head=lambda result: (
        f"`{result['command']}`, {result['date']}, {result['machine']}, {result['cores']} cores. {result['files']}. "
        f"{', '.join(f'{name} {version}' for name, version in result['versions'].items())}. Turns interleaved; medians "
        "of turns, lowest and highest ratio within a turn."
    ),
    title=lambda row: TITLES[row["job"]],
)


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
    cpu_ratio, wall_ratio = (
        None if used is first else asdict(ratio([[turn[which]] for turn in used], [[turn[which]] for turn in first]))
        for which in (0, 1)
    )
    return {
        "job": job,
        "way": name,
        "cpu_ms": statistics.median(cpu),
        "images_per_s": statistics.median(rate),
        "cpu_ms_turns": cpu,
        "images_per_s_turns": rate,
        "cpu_ratio": cpu_ratio,
        "wall_ratio": wall_ratio,
    }


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
    print(f"{words}; batches of {batch}, {THREADS} threads or workers, {usable_cores()} cores")
    rows = [row for job in ("resize", "train") for row in _printed(compare(job, names, files, batch, turns))]
    for name, modules in absent.items():
        print(f"left out: {name} ({', '.join(modules)} not installed)")
    if record:
        versions = {name: metadata.version(name) for name in DISTRIBUTIONS if _installed(name)}
        RECORD.write(rows, versions=versions, files=words, left_out=absent)


def _printed(rows: list[Row]) -> list[Row]:
    for row in rows:
        spread = f"[{min(row['cpu_ms_turns']):.2f}, {max(row['cpu_ms_turns']):.2f}]"
        compared = ""
        if row["cpu_ratio"] is not None:
            compared = f", CPU {Ratio(**row['cpu_ratio'])}, seconds {Ratio(**row['wall_ratio'])} of ours"
        print(
            f"  {row['job']:7}{row['way']:29}{row['cpu_ms']:5.2f} CPU-ms an image {spread}, "
            f"{row['images_per_s']:6.0f} images/s{compared}"
        )
    return rows


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
