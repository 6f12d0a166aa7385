"""FCOS and FCOS3D targets on a CPU at nuScenes size: published index, tensor index, ours.

    python -m benchmarks.fcos_targets [--rounds 15] [--threads 2] [--record]

Points of five levels at 928 x 1600: 30,929. Two things are timed: picking a row of each point's [G, C] table, and the
assignment of a batch of 8 images. `range` is the published index, x[range(P), index]; `arange` the same with a tensor,
all else image by image as published; `torch.compile` is the latter, compiled before it is timed. Each baseline is timed
against ours in turns, A B B A, so that a machine that slows down slows both: a round gives one ratio, and the median of
them is shown with the middle half.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch

from accel.kernels.fcos_targets import fcos3d_targets, fcos_targets
from accel.kernels.fcos_targets.inputs import Fcos3dGts, FcosConfig, FcosPoints
from accel.kernels.gather_rows import gather_rows
from benchmarks.record import Record
from benchmarks.render import SOURCE, Cell, Row, block, times
from benchmarks.spread import quartiles, ratios
from tests.kernels.fcos_oracle import Index, fcos3d_batch, fcos_batch

SIZES = [(116, 200), (58, 100), (29, 50), (15, 25), (8, 13)]
STRIDES = [8, 16, 32, 64, 128]
RANGES = [(-1.0, 48.0), (48.0, 96.0), (96.0, 192.0), (192.0, 384.0), (384.0, 1e8)]
IMAGES = 8
CONFIG = FcosConfig(background=10, attr_background=9)

Call = Callable[[], Any]


RECORD = Record("fcos-targets", f"targets of {IMAGES} images at 30,929 points; a row of a [G, C] table for each point")
LINE = "{ratio:.1f}x [{low:.1f}, {high:.1f}], {baseline_ms:.3g} against {ours_ms:.3g} ms"


def table_block(result: Row) -> str:
    """Return the races of FCOS targets on a CPU."""
    head = f"{SOURCE}. {{what}}; interleaved rounds, median and quartiles."
    columns: dict[str, Cell] = {
        "": "{name}",
        "baseline ms": "{baseline_ms:.3g}",
        "accel ms": "{ours_ms:.3g}",
        "speed-up": times("ratio", "low", "high", digits=1),
    }
    return block(head.format_map(result), columns, ({"name": name, **row} for name, row in result["ratios"].items()))


def batch(boxes: int) -> Fcos3dGts:
    """Return a batch of so many boxes an image, none of them padding."""
    draw = torch.Generator().manual_seed(boxes)
    centers = torch.rand(IMAGES, boxes, 2, generator=draw) * torch.tensor([1600.0, 928.0])
    sizes = torch.rand(IMAGES, boxes, 2, generator=draw) ** 2 * 400 + 4
    return Fcos3dGts(
        boxes=torch.cat((centers - sizes / 2, centers + sizes / 2), -1),
        labels=torch.randint(0, 10, (IMAGES, boxes), generator=draw),
        valid=torch.ones(IMAGES, boxes, dtype=torch.bool),
        boxes_3d=torch.randn(IMAGES, boxes, 9, generator=draw),
        centers=centers + torch.randn(IMAGES, boxes, 2, generator=draw) * 4,
        depths=torch.rand(IMAGES, boxes, generator=draw) * 60,
        attr_labels=torch.randint(0, 9, (IMAGES, boxes), generator=draw),
    )


def calls(points: FcosPoints, boxes: int) -> dict[str, tuple[Call, dict[str, Call]]]:
    """Return what is timed: name → (ours, baselines)."""
    gts = batch(boxes)
    listed = FcosPoints(points.xy, points.regress_range, points.stride)

    def published(assign: Callable[..., Any], how: Index) -> Call:
        return lambda: assign(points, gts, CONFIG, how)

    def baselines(assign: Callable[..., Any]) -> dict[str, Call]:
        found: dict[str, Call] = {how: published(assign, how) for how in ("range", "arange")}
        return {**found, "torch.compile": torch.compile(published(assign, "arange"), dynamic=False)}

    return {
        "FCOS3D": (lambda: fcos3d_targets(points, gts, CONFIG), baselines(fcos3d_batch)),
        "FCOS": (lambda: fcos_targets(points, gts, CONFIG), baselines(fcos_batch)),
        "FCOS3D, any points": (
            lambda: fcos3d_targets(listed, gts, CONFIG),
            {"arange": published(fcos3d_batch, "arange")},
        ),
        "index of 4 columns": indexing(len(points.xy), boxes, 4),
        "index of 9 columns": indexing(len(points.xy), boxes, 9),
    }


def indexing(total: int, boxes: int, columns: int) -> tuple[Call, dict[str, Call]]:
    """Return gather_rows and what it replaces."""
    x, index = torch.randn(total, boxes, columns), torch.randint(0, boxes, (total,))
    return lambda: gather_rows(x, index), {
        "range": lambda: x[range(total), index],
        "arange": lambda: x[torch.arange(total), index],
    }


def milliseconds(call: Call, repeats: int) -> float:
    """Return the mean of one call, ms."""
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats * 1e3


def compared(baseline: Call, ours: Call, rounds: int) -> Row:
    """Time both in turns, A B B A; return ms, and their ratio with its quartiles."""
    milliseconds(baseline, 1)
    repeats = max(1, round(5 / max(milliseconds(ours, 3), 1e-3)))  # 5 ms at least: no round is a single short call
    baselines, own = [], []
    for _ in range(rounds):
        first, one = milliseconds(baseline, 1), milliseconds(ours, repeats)
        two, last = milliseconds(ours, repeats), milliseconds(baseline, 1)
        baselines.append((first + last) / 2)
        own.append((one + two) / 2)
    return {
        "baseline_ms": statistics.median(baselines),
        "ours_ms": statistics.median(own),
        **quartiles(ratios(baselines, own)).named("ratio", "low", "high"),
        "rounds": rounds,
    }


@click.command()
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=2))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--boxes", "counts", default=(10, 50), show_default=True, multiple=True, type=click.IntRange(min=1))
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, threads: int, counts: tuple[int, ...], record: bool) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    points = FcosPoints.regular(SIZES, STRIDES, RANGES)
    races: dict[str, Row] = {}
    for boxes in counts:
        for name, (ours, baselines) in calls(points, boxes).items():
            for baseline, call in baselines.items():
                race = f"{name}, {boxes} boxes, against {baseline}"
                races[race] = compared(call, ours, rounds)
                print(f"{race}: {LINE.format_map(races[race])}", flush=True)
    if record:
        RECORD.write([], ratios=races)


if __name__ == "__main__":
    main()
