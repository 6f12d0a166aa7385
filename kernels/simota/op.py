"""SimOTA as one operator for torch.compile, which is opaque to it: it traces neither launches nor shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.simota.assign import simota_assign
from accel.kernels.simota.inputs import Rules

_NUMBERS = ("radius", "cls_weight", "iou_weight", "log_eps", "union_eps")


def flat(rules: Rules) -> tuple[str, int, list[float]]:
    """Return the fields of some rules: dataclasses.astuple copies, which torch 2.11 can't trace."""
    return rules.region, rules.topk, [getattr(rules, name) for name in _NUMBERS]


@torch.library.custom_op("accel::simota_assign", mutates_args=())
def assign(
    boxes: Tensor,
    cls: Tensor,
    obj: Tensor | None,
    points: Tensor | None,
    strides: Tensor | None,
    gt_boxes: Tensor,
    gt_classes: Tensor,
    gt_mask: Tensor | None,
    candidates: Tensor | None,
    region: str,
    topk: int,
    numbers: list[float],
    xyxy: bool,
    chunk: int | None,
    check: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `simota_assign` with the rules taken apart."""
    tensors = (boxes, cls, obj, points, strides, gt_boxes, gt_classes, gt_mask)
    rules = Rules(region=region, topk=topk, **dict(zip(_NUMBERS, numbers, strict=True)))
    options = {"xyxy": xyxy, "chunk": chunk, "check": check}
    assignment = simota_assign(*tensors, candidates=candidates, variant=rules, **options)  # type: ignore[arg-type]
    return tuple(assignment)  # type: ignore[return-value]


@assign.register_fake
def _(boxes: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = boxes.shape[:2]
    return (
        boxes.new_empty(shape, dtype=torch.bool),
        boxes.new_empty(shape, dtype=torch.int64),
        boxes.new_empty(shape, dtype=torch.float32),
        boxes.new_empty(shape, dtype=torch.int64),
        boxes.new_empty(shape[:1], dtype=torch.int64),
    )
