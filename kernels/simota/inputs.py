"""Inputs and outputs of a SimOTA assignment: types, the published variants' rules, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accel.profiler.errors import InvalidArgument

INF_BITS = 0x7F800000
"""Bit pattern of the fp32 infinity: the cost of masked pairs."""


NUMBERS = ("topk", "radius", "cls_weight", "iou_weight", "log_eps", "union_eps")
"""Fields of `Rules` that are numbers."""


class Assignment(NamedTuple):
    """Which anchor learns which box. Background: matched_gt and matched_class -1, matched_iou 0."""

    fg_mask: Tensor
    """[B, A] bool: the anchor learns a box."""
    matched_gt: Tensor
    """[B, A] int64: index of its ground truth."""
    matched_iou: Tensor
    """[B, A] fp32: IoU of its predicted box with that ground truth."""
    matched_class: Tensor
    """[B, A] int64: class of that ground truth."""
    num_fg: Tensor
    """[B] int64: anchors that learn a box."""


class Given(NamedTuple):
    """What is assigned, as `simota_assign` takes it."""

    boxes: Tensor
    cls: Tensor
    obj: Tensor | None
    points: Tensor | None
    strides: Tensor | None
    gt_boxes: Tensor
    gt_classes: Tensor
    gt_mask: Tensor | None
    candidates: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules in which published variants differ; `VARIANTS` names them."""

    region: str = "center"
    """The candidates, and the region of a ground truth. "center": within radius * stride of its middle, for both.
    "box": in the box or near its middle; in both. "given": the caller's mask; everywhere."""
    radius: float = 1.5
    """Reach of the centre region, in strides."""
    topk: int = 10
    """IoUs that are summed to the number of anchors; at most 16."""
    cls_weight: float = 1.0
    """Factor of the class cost."""
    iou_weight: float = 3.0
    """Factor of the IoU cost."""
    log_eps: float = 1e-8
    """Added to the IoU before its logarithm."""
    union_eps: float = 1e-30
    """Least area of a union; two boxes of no area have IoU 0 (NaN as published by YOLOX)."""

    def __post_init__(self) -> None:
        if self.region not in ("center", "box", "given"):
            raise InvalidArgument(f"region must be 'center', 'box' or 'given'. Found: {self.region!r}")
        if not 1 <= self.topk <= 16:
            raise InvalidArgument(f"topk must be 1 to 16. Found: {self.topk}")
        for name in NUMBERS:
            if not getattr(self, name) >= 0:
                raise InvalidArgument(f"{name} must not be negative. Found: {getattr(self, name)}")


VARIANTS = {
    "yolox": Rules(),
    "yolox-2021": Rules(region="box", radius=2.5),
    "yolov7": Rules(region="given"),
    "mmdet": Rules(region="box", radius=2.5, log_eps=1e-7, union_eps=1e-6),
}


class Boxes(NamedTuple):
    """Boxes of one shape, and their middles."""

    left: Tensor
    top: Tensor
    right: Tensor
    bottom: Tensor
    area: Tensor
    x: Tensor
    y: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Boxes:
        """Return the boxes with every tensor changed alike."""
        return Boxes(*map(change, self))


class Cells(NamedTuple):
    """Where the anchors stand, [B, N] or [1, N] each: the middle, and radius * stride."""

    x: Tensor
    y: Tensor
    reach: Tensor


class Predicted(NamedTuple):
    """What is predicted of the candidates of one image."""

    boxes: Tensor
    """[N, 4]."""
    cls: Tensor
    """[N, C] logits, or probabilities if `obj` is None."""
    obj: Tensor | None
    """[N] logits."""


def corners(boxes: Tensor, xyxy: bool) -> Boxes:
    """Return boxes [..., 4] as `Boxes`, in fp32."""
    if xyxy:
        left, top, right, bottom = boxes.float().unbind(-1)
        area = (right - left) * (bottom - top)
        return Boxes(left, top, right, bottom, area, (left + right) / 2, (top + bottom) / 2)
    x, y, width, height = boxes.float().unbind(-1)
    half_width, half_height = width / 2, height / 2
    return Boxes(x - half_width, y - half_height, x + half_width, y + half_height, width * height, x, y)


def cells_of(points: Tensor | None, strides: Tensor | None, radius: float, boxes: Tensor) -> Cells:
    if points is None or strides is None:
        nothing = torch.zeros(1, boxes.shape[1], device=boxes.device)
        return Cells(nothing, nothing, nothing)
    x, y = points.float().reshape(-1, *points.shape[-2:]).unbind(-1)
    return Cells(x, y, strides.float().reshape(-1, strides.shape[-1]) * radius)


def rules_of(variant: str | Rules) -> Rules:
    if isinstance(variant, Rules):
        return variant
    if variant not in VARIANTS:
        raise InvalidArgument(
            f"simota_assign: variant must be one of {', '.join(VARIANTS)}, or Rules. Found: {variant!r}"
        )
    return VARIANTS[variant]


def _fits(given: Given, rules: Rules) -> bool:
    """Return whether a usual call is surely right, each property read once: the checks one by one take 2 µs more."""
    boxes, cls, obj, points, strides, gt_boxes, gt_classes, gt_mask, candidates = given
    if obj is None or points is None or strides is None or candidates is not None:
        return False
    shape, pairs, device = boxes.shape, gt_classes.shape, boxes.device
    anchors = shape[:2]
    return (
        len(shape) == 3
        and len(pairs) == 2
        and shape[2] == 4
        and cls.shape[:2] == anchors
        and cls.dim() == 3
        and cls.shape[2] > 0
        and obj.shape == anchors
        and points.shape == (anchors[1], 2)
        and strides.shape == anchors[1:]
        and gt_boxes.shape == (*pairs, 4)
        and pairs[0] == anchors[0]
        and cls.device == device
        and obj.device == device
        and points.device == device
        and strides.device == device
        and gt_boxes.device == device
        and gt_classes.device == device
        and (gt_mask is None or (gt_mask.shape == pairs and gt_mask.device == device and gt_mask.dtype is torch.bool))
        and boxes.is_floating_point()
        and cls.is_floating_point()
        and gt_classes.dtype in (torch.int64, torch.int32)
        and rules.region != "given"
    )


def validate(given: Given, rules: Rules) -> None:
    if _fits(given, rules):
        return
    boxes, cls, _, points, strides, gt_boxes, gt_classes, gt_mask, candidates = given
    if boxes.ndim != 3 or boxes.shape[2] != 4:
        raise InvalidArgument(f"simota_assign: boxes must be [B, A, 4]. Found: {list(boxes.shape)}")
    if gt_boxes.ndim != 3:
        raise InvalidArgument(f"simota_assign: gt_boxes must be [B, G, 4], padded. Found: {list(gt_boxes.shape)}")
    device, (batch, count, _), gts = boxes.device, boxes.shape, gt_boxes.shape[1]
    of_anchors, of_truths = (batch, count), (batch, gts)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "cls": ((batch, count, cls.shape[-1]),),
        "obj": (of_anchors,),
        "points": ((count, 2), (batch, count, 2)),
        "strides": ((count,), of_anchors),
        "gt_boxes": ((batch, gts, 4),),
        "gt_classes": (of_truths,),
        "gt_mask": (of_truths,),
        "candidates": (of_anchors,),
    }
    for name, allowed in shapes.items():
        tensor = getattr(given, name)
        if tensor is None:
            continue
        own = tensor.shape
        if own not in allowed:
            expected = " or ".join(str(list(each)) for each in allowed)
            raise InvalidArgument(f"simota_assign: {name} must be {expected}, as boxes are. Found: {list(own)}")
        if tensor.device != device:
            raise InvalidArgument(f"simota_assign: {name} must be on {device}, as boxes are. Found: {tensor.device}")
    for name, mask in (("gt_mask", gt_mask), ("candidates", candidates)):
        if mask is not None and mask.dtype != torch.bool:
            raise InvalidArgument(f"simota_assign: {name} must be bool; compare it with 0. Found: {mask.dtype}")
    if not (boxes.is_floating_point() and cls.is_floating_point()):
        raise InvalidArgument(f"simota_assign: boxes and cls must be floating. Found: {boxes.dtype} and {cls.dtype}")
    if gt_classes.is_floating_point() or gt_classes.dtype == torch.bool:
        raise InvalidArgument(f"simota_assign: gt_classes must be integers; call .long(). Found: {gt_classes.dtype}")
    if cls.shape[2] == 0:
        raise InvalidArgument(f"simota_assign: cls must have at least one class. Found: {list(cls.shape)}")
    if rules.region == "given" and candidates is None:
        raise InvalidArgument("simota_assign: the region 'given' needs candidates, a bool mask [B, A]. Found: None")
    if rules.region != "given" and (points is None or strides is None):
        raise InvalidArgument(f"simota_assign: the region {rules.region!r} needs points and strides. Found: None")


def check_truths(gt_boxes: Tensor, gt_classes: Tensor, gt_mask: Tensor | None, classes: int, xyxy: bool) -> None:
    if gt_classes.numel() == 0:
        return
    low, high = torch.aminmax(gt_classes)  # of all, padding too: mostly that settles it
    if bool(gt_boxes.sum().isfinite()) and int(low) >= 0 and int(high) < classes:
        return
    gt_mask = torch.ones_like(gt_classes, dtype=torch.bool) if gt_mask is None else gt_mask
    bad = ~gt_boxes.isfinite().all(-1) & gt_mask
    if bad.any() and bool((bad := bad & ~is_a_box(corners(gt_boxes, xyxy))).any()):
        image, gt = bad.nonzero()[0].tolist()
        raise InvalidArgument(
            f"simota_assign: gt_boxes must be finite, but for their sides. Found: {gt_boxes[image, gt].tolist()} in "
            f"image {image}; drop that box, or set its gt_mask to False"
        )
    bad = ((gt_classes < 0) | (gt_classes >= classes)) & gt_mask
    if bad.any():
        image, gt = bad.nonzero()[0].tolist()
        raise InvalidArgument(
            f"simota_assign: gt_classes must be 0 to {classes - 1}. Found: {gt_classes[image, gt].item()} in image "
            f"{image}; set gt_mask to False where gt_boxes are padded"
        )


def is_a_box(boxes: Boxes) -> Tensor:
    """Return which boxes can be compared: sides may be infinite, as an exponential makes them; IoUs then are 0."""
    lies = (boxes.left < torch.inf) & (boxes.top < torch.inf) & (boxes.right > -torch.inf) & (boxes.bottom > -torch.inf)
    return lies & (boxes.area > -torch.inf)


def check_predicted(mine: Predicted, near: Boxes, gt: Boxes, image: int) -> None:
    """Raise InvalidArgument for predictions of an image that are not finite; `near` are their boxes."""
    total = mine.boxes.sum() + mine.cls.sum()
    if mine.obj is not None and (total + mine.obj.sum()).isfinite():
        return
    # x, y and the area are finite if and only if the box is; a sum over classes only overflows where one is near to.
    for name, values in (("boxes", near.x + near.y + near.area), ("cls", mine.cls.sum(-1)), ("obj", mine.obj)):
        if values is None:
            continue
        bad = ~values.isfinite()
        if name == "boxes" and gt.area.isfinite().all():
            bad &= ~is_a_box(near)
        if bad.any():
            raise InvalidArgument(
                f"simota_assign: predictions must be finite. Found: NaN or infinity in {name} of {int(bad.sum())} "
                f"anchors of image {image}; skip this step, or look for the learning rate or loss scale that made them"
            )
    if mine.obj is None and bool(((mine.cls < 0) | (mine.cls > 1)).any()):
        raise InvalidArgument("simota_assign: without obj, cls must hold probabilities, 0 to 1; pass obj with logits")
