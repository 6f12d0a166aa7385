"""SimOTA on a GPU: what its kernels are launched with, and kept for a shape."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from accel.kernels.launching import PLANS, LaunchSequence, ceil_div, next_power_of_2
from accel.kernels.simota.inputs import Assignment, Given, Rules
from accel.kernels.simota.triton import candidate_kernel, list_kernel, match_kernel, near_kernel, resolve_kernel

_BLOCK = 256
REGIONS = {"center": 0, "box": 1, "given": 2}
_INTS, _PLANES = 4, 10
"""Arrays [B, A] between the kernels: integers (the list, the ranks, how many took a candidate, and the last of them;
behind them the lengths of the lists), and what is known of each candidate (box and area, cell and reach, sigmoid(obj),
the sum of log(1 - p))."""


@functools.lru_cache(PLANS)
def _launches(
    shape: tuple[int, int, int, int], steps: tuple[int, ...], has: tuple[bool, bool, bool], xyxy: bool, rules: Rules
) -> LaunchSequence:
    """Return what launches an assignment on tensors in the order of `assign`, which says what the numbers are."""
    images, count, gts, class_count = shape
    box_row, row, obj_row, gt_row, points_step, strides_step = steps
    has_obj, has_mask, has_candidates = has
    grid = (images, ceil_div(count, _BLOCK))
    # Products are not fused with sums, so that an IoU has the bits of the published one.
    form: dict[str, Any] = {"XYXY": xyxy, "REGION": REGIONS[rules.region], "enable_fp_fusion": False}
    truths: dict[str, Any] = {"HAS_MASK": has_mask, **form}
    classes: dict[str, Any] = {"C": class_count, "HAS_OBJ": has_obj}
    places = (points_step, strides_step, rules.radius)
    prices = (rules.cls_weight, rules.iou_weight, rules.log_eps, rules.union_eps)
    numbers = (count, gts, row, gt_row, *prices)
    near = near_kernel.plan(grid, count, gts, gt_row, *places, **truths, BLOCK=_BLOCK)
    listing = list_kernel.plan((images,), count, BLOCK=1024)
    candidate = candidate_kernel.plan(
        (images, ceil_div(count, 16)),
        *(count, box_row, row, obj_row, *places),
        **{**classes, **form},
        ROWS=16,
        BLOCK_C=min(128, next_power_of_2(class_count)),
    )
    match = match_kernel.plan((images, gts), *numbers, **{**classes, **truths}, TOPK=rules.topk, BLOCK=_BLOCK)
    resolve = resolve_kernel.plan(grid, *numbers, **{**classes, **truths}, BLOCK=_BLOCK)
    boxes, cls, obj, points, strides, gt_boxes, gt_classes, mask, fg, marked, ints, planes = range(12)
    matched, iou, label, num_fg = range(12, 16)
    own = (gt_boxes, gt_classes, mask)
    return LaunchSequence(
        # Until the foreground is known, its place holds the candidates, where they are not given.
        *([] if has_candidates else [(near, (points, strides, gt_boxes, mask, fg))]),
        (listing, (marked, ints, num_fg)),
        (candidate, (boxes, cls, obj, points, strides, ints, planes)),
        (match, (cls, planes, *own, ints)),
        (resolve, (cls, planes, *own, ints, fg, matched, iou, label, num_fg)),
    )


def _in_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return [B, N, X] with its values side by side, and the distance of its rows: a slice of an output has one too."""
    if not tensor.is_contiguous():
        image, row, value = tensor.stride()
        if value == 1 and image == tensor.shape[1] * row:
            return tensor, row
        tensor = tensor.contiguous()
    return tensor, tensor.shape[2]


def _shared(tensor: Tensor | None, dims: int) -> tuple[Tensor | None, int]:
    """Return points or strides, and the anchors from one image's to the next: none where all share them."""
    if tensor is None:
        return None, 0
    return tensor.contiguous(), tensor.shape[1] if tensor.dim() > dims else 0


def assign(given: Given, rules: Rules, *, xyxy: bool) -> Assignment:
    """Assign with Triton kernels what has been checked."""
    boxes, cls, obj, points, strides, gt_boxes, gt_classes, gt_mask, candidates = given
    batch, count, classes = cls.shape
    (boxes, box_row), (cls, row), (gt_boxes, gt_row) = _in_rows(boxes), _in_rows(cls), _in_rows(gt_boxes)
    obj_row = 0 if obj is None else obj.stride(1)
    if obj is not None and obj.stride(0) != count * obj_row:
        obj, obj_row = obj.contiguous(), 1
    points, points_step = _shared(points, 2)
    strides, strides_step = _shared(strides, 1)
    gt_classes = gt_classes.contiguous()
    steps = (box_row, row, obj_row, gt_row, points_step, strides_step)
    has = (obj is not None, gt_mask is not None, candidates is not None)
    launch = _launches((batch, count, gt_boxes.shape[1], classes), steps, has, xyxy, rules)
    fg = boxes.new_empty(batch, count, dtype=torch.bool)
    ints = boxes.new_empty((_INTS * count + 1) * batch, dtype=torch.int32)
    planes = boxes.new_empty(_PLANES, batch, count, dtype=torch.float32)
    matched = boxes.new_empty(batch, count, dtype=torch.int64)
    iou = boxes.new_empty(batch, count, dtype=torch.float32)
    label = boxes.new_empty(batch, count, dtype=torch.int64)
    num_fg = boxes.new_empty(batch, dtype=torch.int64)
    launch(
        boxes,
        cls,
        obj,
        points,
        strides,
        gt_boxes,
        gt_classes,
        gt_classes if gt_mask is None else gt_mask.contiguous(),  # not read without a mask
        fg,
        fg if candidates is None else candidates.contiguous(),
        ints,
        planes,
        matched,
        iou,
        label,
        num_fg,
    )
    return Assignment(fg, matched, iou, label, num_fg)
