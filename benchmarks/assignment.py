"""Target assignment on a GPU: FCOS, FCOS3D and SimOTA, launched one by one and as replays of a graph.

    python3 -m benchmarks.assignment

FCOS at nuScenes size: 8 images, 30,929 points, 10 and 50 boxes; against the head's algorithm with a range index and
with a tensor index, as on a CPU (benchmarks/fcos_targets.py). SimOTA: 640 x 640, 100 boxes an image, over batch sizes
(benchmarks/gpu/simota.py). The target's number is the device's time: replays over inputs that no cache holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

from accel.kernels.fcos_targets import targets as ops
from accel.kernels.fcos_targets.inputs import FcosPoints
from benchmarks import fcos_targets
from benchmarks.gpu import simota
from benchmarks.gpu.device_times import launched, replayed, sets
from tests.kernels.fcos_oracle import fcos3d_batch, fcos_batch


def on_gpu(held: Any) -> Any:
    """Return a dataclass with its tensors on the GPU."""
    moved = {f.name: getattr(held, f.name) for f in fields(held)}
    return type(held)(**{name: v.cuda() if isinstance(v, Tensor) else v for name, v in moved.items()})


def fcos_rows(bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each assignment and number of boxes."""
    sizes, strides, ranges = fcos_targets.SIZES, fcos_targets.STRIDES, fcos_targets.RANGES
    points = FcosPoints.regular(sizes, strides, ranges, device="cuda")
    kinds = {"FCOS": (ops.fcos_targets, fcos_batch, 4), "FCOS3D": (ops.fcos3d_targets, fcos3d_batch, 9)}
    for boxes in (10, 50):
        gts = on_gpu(fcos_targets.batch(boxes))
        for name, (ours, published, columns) in kinds.items():
            row: dict[str, Any] = {"op": name, "images": fcos_targets.IMAGES, "boxes": boxes}
            least = ops.cost(fcos_targets.IMAGES, len(points.xy), boxes, columns).bytes
            try:
                row |= _fcos_row(ours, published, points, gts, least, bytes_per_s)
            except Exception as failed:  # the others are measured all the same
                row["failed"] = f"{type(failed).__name__}: {str(failed)[:200]}"
            yield row


def _fcos_row(
    ours: Any, published: Any, points: FcosPoints, gts: Any, least_bytes: float, bytes_per_s: float
) -> dict[str, Any]:
    config = fcos_targets.CONFIG
    same = torch.equal(ours(points, gts, config)[0], published(points, gts, config, "arange")[0])
    if not same:
        return {"failed": "labels differ from the published algorithm's: nothing is timed"}
    given = [(_copied(points), _copied(gts)) for _ in range(sets(least_bytes))]
    device = replayed([partial(ours, *one, config) for one in given])
    return {
        "ours_ms": asdict(launched(lambda: ours(points, gts, config))),
        "ours_device_ms": asdict(device),
        "roofline": least_bytes / bytes_per_s * 1e3 / device.median,
        "range_ms": asdict(launched(lambda: published(points, gts, config, "range"))),
        "arange_ms": asdict(launched(lambda: published(points, gts, config, "arange"))),
    }


def _copied(held: Any) -> Any:
    given = {f.name: getattr(held, f.name) for f in fields(held)}
    return type(held)(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()})


def everything(bytes_per_s: float) -> Iterator[tuple[str, Any]]:
    """Measure; yield the rows so far of each kind."""
    for name, rows in (("fcos", fcos_rows(bytes_per_s)), ("simota", simota.rows(bytes_per_s))):
        found = []
        for row in rows:
            found.append(row)
            print(json.dumps(row), flush=True)
            yield name, found


@click.command()
def main() -> None:
    """Time target assignment on this machine's GPU."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        sys.exit(2)
    from accel.profiler.trace import roofline

    list(everything(roofline.measure(torch.device("cuda"), []).gb_per_s * 1e9))


if __name__ == "__main__":
    main()
