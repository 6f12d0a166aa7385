"""SimOTA as one operator for torch.compile, which is opaque to it: it traces neither launches nor shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.simota.assign import simota_assign
from accel.kernels.simota.inputs import Rules


def flat(rules: Rules) -> tuple[str, float, int, float, float, float, float]:
    """Return the fields of some rules, in their order."""
    weights = rules.cls_weight, rules.iou_weight, rules.log_eps, rules.union_eps
    return rules.region, rules.radius, rules.topk, *weights  # dataclasses.astuple copies: torch 2.11 can't trace that


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
    radius: float,
    topk: int,
    cls_weight: float,
    iou_weight: float,
    log_eps: float,
    union_eps: float,
    xyxy: bool,
    chunk: int | None,
    check: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `simota_assign` with the rules taken apart."""
    rules = Rules(
        region=region,
        radius=radius,
        topk=topk,
        cls_weight=cls_weight,
        iou_weight=iou_weight,
        log_eps=log_eps,
        union_eps=union_eps,
    )
    assignment = simota_assign(
        boxes,
        cls,
        obj,
        points,
        strides,
        gt_boxes,
        gt_classes,
        gt_mask,
        candidates=candidates,
        variant=rules,
        xyxy=xyxy,
        chunk=chunk,
        check=check,
    )
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
