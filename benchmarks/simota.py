"""SimOTA for a whole batch against the published loop over images, on a CPU; on a GPU, the time of a batch.

    python -m benchmarks.simota [--rounds 12] [--record]

16 images of 640 x 640, 8,400 anchors, 80 classes, 50 boxes each. The loop is tests/kernels/simota_oracle.py as
published: vectorised within an image, the class cost of every pair and class, torch.topk per ground truth. The two run
in turns, loop ours ours loop; each round gives a ratio. Before anything is timed they must agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor

from accel.kernels.simota import cost, simota_assign
from accel.kernels.simota_inputs import Assignment
from benchmarks import recording
from tests.kernels import simota_oracle

CLASSES = 80
STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class Race:
    """Times of a batch, ms, and their ratio, with the 20th and 80th percentile of the rounds."""

    loop_ms: float
    ours_ms: float
    ratio: float
    ratio_p20: float
    ratio_p80: float
    rounds: int
    threads: int


@dataclass(frozen=True)
class Timed:
    """Time of a batch on a GPU, ms: median, 20th and 80th percentile."""

    images: int
    boxes: int
    eager_ms: float
    eager_p20_ms: float
    eager_p80_ms: float
    graph_ms: float
    """Replayed from a CUDA graph."""
    least_ms: float | None
    """What reading and writing every byte once takes at `bytes_per_s`, if that was given."""


@dataclass(frozen=True)
class Batch:
    """Predictions of 640 x 640 images and their boxes."""

    boxes: Tensor
    cls: Tensor
    obj: Tensor
    points: Tensor
    strides: Tensor
    gt_boxes: Tensor
    gt_classes: Tensor

    def assign(self) -> Assignment:
        """Assign it at once."""
        return simota_assign(**vars(self))

    def loop(self) -> list[simota_oracle.Found]:
        """Assign it image by image, as published."""
        return [
            simota_oracle.assign(
                simota_oracle.Image(
                    self.boxes[i],
                    self.cls[i],
                    self.obj[i],
                    self.points,
                    self.strides,
                    self.gt_boxes[i],
                    self.gt_classes[i],
                ),
                ties="torch",
            )
            for i in range(len(self.boxes))
        ]


def batch_of(images: int, boxes: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return predictions near their cells, as those of a head in training, and boxes of 10 to 160 pixels."""
    torch.manual_seed(0)
    points, levels = [], []
    for stride in STRIDES:
        cells = (torch.arange(640 // stride) + 0.5) * stride
        points.append(torch.cartesian_prod(cells, cells).flip(1))
        levels.append(torch.full((len(points[-1]),), float(stride)))
    middle, strides = torch.cat(points), torch.cat(levels)
    shift = (torch.rand(images, len(middle), 2) - 0.5) * 2 * strides[:, None]
    predicted = torch.cat([middle + shift, torch.rand(images, len(middle), 2) * 150 + 10], -1)
    truths = torch.cat([torch.rand(images, boxes, 2) * 640, torch.rand(images, boxes, 2) * 150 + 10], -1)
    made = [
        predicted.to(dtype),
        (torch.randn(images, len(middle), CLASSES) - 3).to(dtype),
        torch.randn(images, len(middle)).to(dtype),
        middle,
        strides,
        truths,
        torch.randint(0, CLASSES, (images, boxes)),
    ]
    return Batch(*(tensor.to(device) for tensor in made))


def agree(batch: Batch) -> None:
    """Raise unless the loop and the batch assign alike."""
    ours = batch.assign()
    for index, want in enumerate(batch.loop()):
        if not torch.equal(ours.matched_gt[index], want.matched_gt):
            raise RuntimeError(f"the loop and the batch assign image {index} differently: nothing is timed")


def milliseconds(run: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def race(images: int, boxes: int, rounds: int) -> Race:
    """Time the loop and the batch in turns on the CPU."""
    batch = batch_of(images, boxes, torch.device("cpu"), torch.float32)
    agree(batch)
    loops, ours, ratios = [], [], []
    for _ in range(rounds):
        first, one, two, last = (milliseconds(run) for run in (batch.loop, batch.assign, batch.assign, batch.loop))
        loops += [first, last]
        ours += [one, two]
        ratios.append((first + last) / (one + two))
    low, high = spread(ratios)
    return Race(
        statistics.median(loops),
        statistics.median(ours),
        statistics.median(ratios),
        low,
        high,
        rounds,
        torch.get_num_threads(),
    )


def spread(values: list[float]) -> tuple[float, float]:
    """Return the 20th and the 80th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return cuts[0], cuts[-1]


def on_gpu(images: int, boxes: int, bytes_per_s: float | None, rounds: int = 50) -> Timed:
    """Time a batch in fp16 on the GPU, launched one by one and as a graph."""
    batch = batch_of(images, boxes, torch.device("cuda"), torch.float16)
    eager = gpu_milliseconds(batch.assign, rounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.assign()
    replayed = gpu_milliseconds(graph.replay, rounds)
    least = cost(images, 8400, boxes, CLASSES, itemsize=2).bytes / bytes_per_s * 1e3 if bytes_per_s else None
    return Timed(images, boxes, statistics.median(eager), *spread(eager), statistics.median(replayed), least)


def gpu_milliseconds(run: Callable[[], Any], rounds: int) -> list[float]:
    """Return times between events, after three calls to warm up; the second cache is emptied before each."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


@click.command()
@click.option("--rounds", default=12, show_default=True)
@click.option("--images", default=16, show_default=True, help="Of the race on the CPU.")
@click.option("--boxes", default=50, show_default=True, help="Per image, of the race on the CPU.")
@click.option("--gb-per-s", type=float, help="Bandwidth of the GPU, for the least time.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, images: int, boxes: int, gb_per_s: float | None, record: bool) -> None:
    """Measure."""
    found = race(images, boxes, rounds)
    print(
        f"CPU, {images} images, {boxes} boxes each: loop {found.loop_ms:.0f} ms, ours {found.ours_ms:.1f} ms, "
        f"{found.ratio:.1f}x [{found.ratio_p20:.1f}, {found.ratio_p80:.1f}], {found.threads} threads"
    )
    timed = []
    if torch.cuda.is_available():
        for size in (1, 8, 16, 32, 64):
            timed.append(on_gpu(size, 100, gb_per_s * 1e9 if gb_per_s else None))
            print(f"GPU, {size} images, 100 boxes each: {timed[-1].eager_ms:.3f} ms, graph {timed[-1].graph_ms:.3f} ms")
    if record:
        write(found, timed, f"python -m benchmarks.simota --rounds {rounds} --images {images} --boxes {boxes}")


def write(found: Race, timed: list[Timed], command: str) -> None:
    """Write the figures beside the others."""
    what = "SimOTA assignment of a batch against the published loop over images"
    figures = {"cpu": asdict(found), "gpu": [asdict(each) for each in timed]}
    recording.write("simota", what, figures, command=command, device="cuda" if timed else "cpu")


if __name__ == "__main__":
    main()
