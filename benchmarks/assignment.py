"""Target assignment on a GPU: FCOS, FCOS3D and SimOTA, launched one by one and as replays of a graph.

    python3 -m benchmarks.assignment

FCOS at nuScenes size: 8 images, 30,929 points, 10 and 50 boxes; against the head's algorithm with a range index and
with a tensor index, as on a CPU (benchmarks/fcos_targets.py). SimOTA: 640 x 640, 100 boxes an image, over batch sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import click
import torch
from torch import Tensor

from accel.kernels import fcos_targets as ops
from accel.kernels.fcos_inputs import FcosPoints
from benchmarks import fcos_targets, simota
from tests.kernels.fcos_oracle import fcos3d_batch, fcos_batch


def on_gpu(held: Any) -> Any:
    """Return a dataclass with its tensors on the GPU."""
    moved = {f.name: getattr(held, f.name) for f in fields(held)}
    return type(held)(**{name: v.cuda() if isinstance(v, Tensor) else v for name, v in moved.items()})


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Return ms of a call: median and quantiles launched, median as a graph's replay."""
    from triton import testing

    median, low, high = testing.do_bench(call, quantiles=[0.5, 0.2, 0.8])
    return {"median": median, "p20": low, "p80": high}


def replayed(call: Callable[[], Any]) -> float:
    """Return the median ms of replays of a graph: what the device takes alone."""
    from triton import testing

    found: float = testing.do_bench_cudagraph(call, quantiles=[0.5])
    return found


def fcos_rows() -> list[dict[str, Any]]:
    """Return a row for each assignment and number of boxes."""
    sizes, strides, ranges = fcos_targets.SIZES, fcos_targets.STRIDES, fcos_targets.RANGES
    points = FcosPoints.regular(sizes, strides, ranges, device="cuda")
    kinds = {"FCOS": (ops.fcos_targets, fcos_batch), "FCOS3D": (ops.fcos3d_targets, fcos3d_batch)}
    rows = []
    for boxes in (10, 50):
        gts = on_gpu(fcos_targets.batch(boxes))
        for name, (ours, published) in kinds.items():
            row = {"op": name, "images": fcos_targets.IMAGES, "boxes": boxes, **_fcos_row(ours, published, points, gts)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _fcos_row(ours: Any, published: Any, points: FcosPoints, gts: Any) -> dict[str, Any]:
    config = fcos_targets.CONFIG
    same = torch.equal(ours(points, gts, config)[0], published(points, gts, config, "arange")[0])
    if not same:
        return {"failed": "labels differ from the published algorithm's: nothing is timed"}
    return {
        "ours_ms": timed(lambda: ours(points, gts, config)),
        "ours_device_ms": replayed(lambda: ours(points, gts, config)),
        "range_ms": timed(lambda: published(points, gts, config, "range")),
        "arange_ms": timed(lambda: published(points, gts, config, "arange")),
    }


def simota_rows(bytes_per_s: float | None = None) -> list[dict[str, Any]]:
    """Return a row for each batch size."""
    rows = [asdict(simota.on_gpu(images, 100, bytes_per_s)) for images in (1, 8, 16, 32, 64)]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


@click.command()
def main() -> None:
    """Time target assignment on this machine's GPU."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        sys.exit(2)
    fcos_rows()
    simota_rows()


if __name__ == "__main__":
    main()
