"""Target assignment on a GPU: FCOS, FCOS3D and SimOTA, launched one by one and as replays of a graph.

    python -m benchmarks.gpu.sections assignment FILE

FCOS at nuScenes size: 8 images, 30,929 points, 10 and 50 boxes; against the head's algorithm with a range index and
with a tensor index, as on a CPU (benchmarks/fcos_targets.py). SimOTA: 640 x 640, 100 boxes an image, over batch sizes
(benchmarks/gpu/simota.py). The target's number is the device's time: replays over inputs that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.kernels.fcos_targets import targets as ops
from accel.kernels.fcos_targets.inputs import FcosPoints
from benchmarks import fcos_targets
from benchmarks.gpu import simota
from benchmarks.gpu.device_times import launched, replayed, sets
from benchmarks.gpu.rows import Figures, bytes_per_s, growing, tried
from tests.kernels.fcos_oracle import fcos3d_batch, fcos_batch


def changed(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a dataclass with its tensors changed."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return type(inputs)(**{name: change(v) if isinstance(v, Tensor) else v for name, v in values.items()})


def fcos_rows(bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each assignment and number of boxes."""
    sizes, strides, ranges = fcos_targets.SIZES, fcos_targets.STRIDES, fcos_targets.RANGES
    points = FcosPoints.regular(sizes, strides, ranges, device="cuda")
    kinds = {"FCOS": (ops.fcos_targets, fcos_batch, 4), "FCOS3D": (ops.fcos3d_targets, fcos3d_batch, 9)}
    for boxes in (10, 50):
        gts = changed(fcos_targets.batch(boxes), Tensor.cuda)
        for name, (ours, published, columns) in kinds.items():
            least = ops.cost(fcos_targets.IMAGES, len(points.xy), boxes, columns).bytes
            measure = partial(_fcos_row, ours, published, points, gts, least, bandwidth)
            yield tried({"op": name, "images": fcos_targets.IMAGES, "boxes": boxes}, measure)


def _fcos_row(
    ours: Any, published: Any, points: FcosPoints, gts: Any, least_bytes: float, bandwidth: float
) -> dict[str, Any]:
    config = fcos_targets.CONFIG
    same = torch.equal(ours(points, gts, config)[0], published(points, gts, config, "arange")[0])
    if not same:
        return {"failed": "labels differ from the published algorithm's: nothing is timed"}
    given = [(changed(points, Tensor.clone), changed(gts, Tensor.clone)) for _ in range(sets(least_bytes))]
    device = replayed([partial(ours, *one, config) for one in given])
    return {
        "ours_ms": launched(lambda: ours(points, gts, config))._asdict(),
        "ours_device_ms": device._asdict(),
        "roofline": least_bytes / bandwidth * 1e3 / device.median,
        "range_ms": launched(lambda: published(points, gts, config, "range"))._asdict(),
        "arange_ms": launched(lambda: published(points, gts, config, "arange"))._asdict(),
    }


def everything() -> Figures:
    """Measure; yield the rows so far of each kind."""
    bandwidth = bytes_per_s()
    yield from growing("fcos", fcos_rows(bandwidth))
    yield from growing("simota", simota.rows(bandwidth))
