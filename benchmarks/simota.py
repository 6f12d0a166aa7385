"""SimOTA for a whole batch against the published loop over images, on a CPU; benchmarks/gpu/simota.py has the GPU's.

    python -m benchmarks.simota [--rounds 12] [--record]

16 images of 640 x 640, 8,400 anchors, 80 classes, 50 boxes each. The loop is tests/kernels/simota_oracle.py as
published: vectorised within an image, the class cost of every pair and class, torch.topk per ground truth. The two run
in turns, loop ours ours loop; each round gives a ratio. Before anything is timed they must agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

from accel.kernels.simota import simota_assign
from accel.kernels.simota.inputs import Assignment
from benchmarks.record import Record
from benchmarks.render import SOURCE, Cell, Row, block, times
from benchmarks.spread import fifths
from tests.kernels import simota_oracle

CLASSES = 80
STRIDES = (8, 16, 32)


RECORD = Record("simota", "SimOTA assignment of a batch against the published loop over images")


def table_block(result: Row) -> str:
    """Return the race of SimOTA on a CPU."""
    head = f"{SOURCE}, {{cpu[threads]}} threads, {{cpu[rounds]}} interleaved rounds; median and 20 to 80 % of them."
    columns: dict[str, Cell] = {"": "{name}", "ms a batch": "{ms}", "speed-up": "{speedup}"}
    race = result["cpu"]
    speedup = times("ratio", "ratio_p20", "ratio_p80", digits=1).format_map(race)
    rows = [
        {"name": "loop over images, as published", "ms": f"{race['loop_ms']:.0f}", "speedup": "1"},
        {"name": "`simota_assign`", "ms": f"{race['ours_ms']:.1f}", "speedup": speedup},
    ]
    return block(head.format_map(result), columns, rows)


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
        return [simota_oracle.assign(self.image(i), ties="torch") for i in range(len(self.boxes))]

    def image(self, index: int) -> simota_oracle.Image:
        """Return one image."""
        own = self.boxes[index], self.cls[index], self.obj[index]
        return simota_oracle.Image(*own, self.points, self.strides, self.gt_boxes[index], self.gt_classes[index])


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


def race(images: int, boxes: int, rounds: int) -> Row:
    """Time the loop and the batch in turns on the CPU; ratios have the 20th and 80th percentile of the rounds."""
    batch = batch_of(images, boxes, torch.device("cpu"), torch.float32)
    agree(batch)
    loops, ours, ratios = [], [], []
    for _ in range(rounds):
        first, one, two, last = (milliseconds(run) for run in (batch.loop, batch.assign, batch.assign, batch.loop))
        loops += [first, last]
        ours += [one, two]
        ratios.append((first + last) / (one + two))
    return {
        "loop_ms": statistics.median(loops),
        "ours_ms": statistics.median(ours),
        **fifths(ratios).named("ratio", "ratio_p20", "ratio_p80"),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


@click.command()
@click.option("--rounds", default=12, show_default=True)
@click.option("--images", default=16, show_default=True, help="Of the race on the CPU.")
@click.option("--boxes", default=50, show_default=True, help="Per image, of the race on the CPU.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, images: int, boxes: int, record: bool) -> None:
    """Measure."""
    measured = race(images, boxes, rounds)
    print(f"CPU, {images} images, {boxes} boxes each: {LINE.format_map(measured)}")
    if record:
        RECORD.write([], cpu=measured, gpu=[])


LINE = (
    "loop {loop_ms:.0f} ms, ours {ours_ms:.1f} ms, {ratio:.1f}x [{ratio_p20:.1f}, {ratio_p80:.1f}], {threads} threads"
)

if __name__ == "__main__":
    main()
