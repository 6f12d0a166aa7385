"""SimOTA on a GPU: our batch against the published loop on the GPU and the plain vectorised path, with and without
compilation. Nothing is timed that disagrees with the published algorithm.

Predictions in fp16, as under autocast. The loop is given them in fp32, in which our kernels compute. A decision that
hangs on less than fp32 rounds may go either way; such an image must show it in fp64, as in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accel.kernels.simota import Assignment, cost
from benchmarks.gpu.device_times import launched, replayed, sets
from benchmarks.gpu.rows import Figures, growing, tried
from benchmarks.gpu.simota_vectorised import assign
from benchmarks.render import Row
from benchmarks.simota import CLASSES, Batch, batch_of
from tests.kernels import simota_oracle

BATCHES = (64, 8, 1, 16, 32)
"""The one that a target is about first."""
RIVALS_AT = (8, 64)
BOXES = 100
ANCHORS = 8400


def on(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch with every tensor changed."""
    return replace(batch, **{name: change(tensor) for name, tensor in vars(batch).items()})


def wide(tensor: Tensor) -> Tensor:
    """Return fp32 of what is a floating tensor."""
    return tensor.float() if tensor.is_floating_point() else tensor


def disagreement(found: Assignment, batch: Batch, images: int) -> str:
    """Say where an assignment differs from the published algorithm's on the first images; '' if it doesn't."""
    held = on(batch, lambda t: wide(t).cpu())
    near = 0
    for index in range(min(images, len(held.boxes))):
        image = held.image(index)
        want = simota_oracle.assign(image)
        if torch.equal(found.matched_gt[index].cpu(), want.matched_gt):
            continue
        near += 1
        if not simota_oracle.assign(image.to(torch.float64)).margin < simota_oracle.MARGIN:
            return f"image {index} is assigned otherwise than published"
    return f"{near} images hang on less than fp32 rounds; 1 may" if near > 1 else ""


def rows(bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each batch size, its rivals with it where there are any."""
    for images in BATCHES:
        yield tried({"images": images, "boxes": BOXES}, partial(measured, images, bytes_per_s))
        torch.cuda.empty_cache()


def measured(images: int, bytes_per_s: float) -> dict[str, Any]:
    """Return ours and its rivals at one batch size."""
    batch = batch_of(images, BOXES, torch.device("cuda"), torch.float16)
    # Few images are looked at: the algorithm takes a second an image in Python.
    wrong = disagreement(batch.assign(), batch, 4 if images == BATCHES[0] else 1)
    if wrong:
        return {"failed": f"{wrong}: nothing is timed"}
    least = cost(images, ANCHORS, BOXES, CLASSES, itemsize=2)
    given = [on(batch, lambda t: t.clone()) for _ in range(sets(least.bytes))]
    device = replayed([one.assign for one in given])
    found: dict[str, Any] = {
        "ms": launched(batch.assign)._asdict(),
        "device_ms": device._asdict(),
        "roofline": least.bytes / bytes_per_s * 1e3 / device.median,
    }
    if images in RIVALS_AT:
        found["rivals"] = {name: rival(call, batch) for name, call in rivals(batch).items()}
    return found


def by_warps(counts: tuple[int, ...] = (4, 1, 2)) -> Figures:
    """Time the whole assignment with so many warps in each program that matches; Triton's default is 4."""
    from accel.kernels.simota import launchers
    from accel.kernels.simota.triton import match_kernel

    images = BATCHES[0]
    batch = batch_of(images, BOXES, torch.device("cuda"), torch.float16)
    least = cost(images, ANCHORS, BOXES, CLASSES, itemsize=2)
    given = [on(batch, lambda t: t.clone()) for _ in range(sets(least.bytes))]

    def with_warps(count: int) -> Row:
        plan = SimpleNamespace(plan=partial(match_kernel.plan, num_warps=count))
        with mock.patch.object(launchers, "match_kernel", plan):
            launchers._launches.cache_clear()
            if wrong := disagreement(batch.assign(), batch, 1):
                return {"failed": wrong}
            return {"device_ms": replayed([one.assign for one in given])._asdict()}

    try:
        yield from growing(
            "rows", (tried({"images": images, "warps": count}, partial(with_warps, count)) for count in counts)
        )
    finally:
        launchers._launches.cache_clear()


def rivals(batch: Batch) -> dict[str, Callable[[], Any]]:
    """Return the loop over images, which waits for the device, and the plain path."""
    torch._dynamo.reset()
    compiled = torch.compile(assign, fullgraph=True, dynamic=False)
    held = on(batch, wide)
    return {"loop": held.loop, "plain": lambda: assign(batch), "compile": lambda: compiled(batch)}


def rival(call: Callable[[], Any], batch: Batch) -> dict[str, Any]:
    """Time one that assigns alike, or say why not."""

    def measure() -> Row:
        assigned = call()
        if isinstance(assigned, Assignment) and (wrong := disagreement(assigned, batch, 1)):
            return {"failed": wrong}
        return launched(call)._asdict()

    return tried({}, measure)
