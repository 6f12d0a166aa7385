"""Batched targets for the heads of MMDetection and MMDetection3D: `get_targets` in one pass instead of image by image.

    head.get_targets(points, batch_gt_instances_3d, batch_gt_instances)    FCOSMono3DHead, MMDetection3D 1.x
    head.get_targets(points, batch_gt_instances)                           FCOSHead, MMDetection 3.x

The same lists a level, of the same values; neither library is imported. One thing is better than published: FCOS3D's
yaw becomes the local one in a copy, where the published head turns the caller's boxes each time it is asked.
FCOS https://arxiv.org/abs/1904.01355, FCOS3D https://arxiv.org/abs/2104.10956.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from accel.kernels.fcos_targets import fcos3d_targets, fcos_targets
from accel.kernels.fcos_targets.inputs import Fcos3dGts, FcosConfig, FcosGts, FcosPoints
from accel.kernels.tables import kept
from accel.profiler.errors import InvalidArgument

_SIGNATURES = {
    ("points", "batch_gt_instances"): "fcos",
    ("points", "batch_gt_instances_3d", "batch_gt_instances"): "fcos3d",
}
_NEEDED = {
    "fcos": ("regress_ranges", "strides", "num_classes", "center_sampling", "center_sample_radius", "norm_on_bbox"),
    "fcos3d": (
        "regress_ranges", "strides", "background_label", "attr_background_label", "center_sampling",
        "center_sample_radius", "norm_on_bbox", "centerness_alpha", "bbox_code_size",
    ),
}  # fmt: skip

Levels = list[Tensor]


def patch_fcos_head(head: Any) -> Any:
    """Let a head assign its targets in one batched pass: the same values, without a loop over images.

    Args:
        head: an FCOSMono3DHead of MMDetection3D 1.x, an FCOSHead of MMDetection 3.x, or a head with their attributes
            and their `get_targets`. Its settings are read at each call.

    Returns:
        The head, changed in place; `unpatch_fcos_head` changes it back.

    Raises:
        InvalidArgument: if `get_targets` has another signature or an attribute is missing, as with heads that add
            targets of their own; the head is then as it was.

    Example:
        >>> patch_fcos_head(model.bbox_head)  # doctest: +SKIP

    FCOS, https://arxiv.org/abs/1904.01355, FCOS3D, https://arxiv.org/abs/2104.10956
    """
    kind = _kind(head)
    targets = _fcos_levels if kind == "fcos" else _fcos3d_levels
    unpatch_fcos_head(head)
    # Not by __setattr__ of modules: it is not part of the state, but copies and pickles of the head keep it.
    vars(head)["get_targets"] = functools.partial(targets, head)
    return head


def unpatch_fcos_head(head: Any) -> Any:
    """Restore a head's own `get_targets`; one that was not patched stays as it is."""
    ours = vars(head).get("get_targets")
    if isinstance(ours, functools.partial) and ours.func in (_fcos_levels, _fcos3d_levels):
        del vars(head)["get_targets"]
    return head


def _kind(head: Any) -> str:
    published = getattr(type(head), "get_targets", None)
    names = tuple(inspect.signature(published).parameters)[1:] if callable(published) else ()
    kind = _SIGNATURES.get(names)
    if kind is None:
        supported = " or ".join(f"get_targets({', '.join(signature)})" for signature in _SIGNATURES)
        raise InvalidArgument(
            f"patch_fcos_head: the head must have {supported}. Found: {type(head).__name__}, get_targets"
            f"({', '.join(names)}). Call accel.kernels.fcos_targets from its get_targets instead."
        )
    missing = [name for name in _NEEDED[kind] if not hasattr(head, name)]
    if missing or getattr(head, "pred_bbox2d", False):
        wrong = f"without {', '.join(missing)}" if missing else "with pred_bbox2d, whose targets hold 2D boxes as well"
        raise InvalidArgument(
            f"patch_fcos_head: the head must be set up as the published one. Found: {type(head).__name__} {wrong}. "
            "Call accel.kernels.fcos_targets from its get_targets instead."
        )
    return kind


def _fcos_levels(head: Any, points: Levels, batch_gt_instances: Sequence[Any]) -> tuple[Levels, Levels]:
    """Return labels and box targets of each level, [B·P] and [B·P, 4]."""
    gts = _padded(
        {"boxes": [_tensor(gt.bboxes) for gt in batch_gt_instances], "labels": [gt.labels for gt in batch_gt_instances]}
    )
    config = FcosConfig(
        background=head.num_classes,
        center_sampling=bool(head.center_sampling),
        radius=head.center_sample_radius,
        normalize=bool(head.norm_on_bbox),
    )
    targets = fcos_targets(_points(head, points), FcosGts(**gts), config)
    return _split(targets.labels, points), _split(targets.boxes, points)


def _fcos3d_levels(
    head: Any, points: Levels, batch_gt_instances_3d: Sequence[Any], batch_gt_instances: Sequence[Any]
) -> tuple[Levels, Levels, Levels, Levels]:
    """Return labels, 3D box targets, centerness and attribute labels of each level."""
    flat, deep = batch_gt_instances, batch_gt_instances_3d
    device = points[0].device
    with_attributes = len(deep) > 0 and "attr_labels" in deep[0]
    gts = Fcos3dGts(
        **_padded(
            {
                "boxes": [_tensor(gt.bboxes) for gt in flat],
                "labels": [gt.labels_3d for gt in deep],
                "boxes_3d": [_tensor(gt.bboxes_3d).to(device) for gt in deep],
                "centers": [gt.centers_2d for gt in deep],
                "depths": [gt.depths for gt in deep],
                "attr_labels": [
                    gt.attr_labels if with_attributes else torch.full_like(gt.labels_3d, head.attr_background_label)
                    for gt in deep
                ],
            }
        )
    )
    config = FcosConfig(
        background=head.background_label,
        attr_background=head.attr_background_label,
        center_sampling=bool(head.center_sampling),
        radius=head.center_sample_radius,
        normalize=bool(head.norm_on_bbox),
        centerness_alpha=head.centerness_alpha,
    )
    targets = fcos3d_targets(_points(head, points), replace(gts, boxes_3d=_locally_turned(gts.boxes_3d)), config)
    labels, boxes_3d, centerness, attributes = (_split(per_image, points) for per_image in targets)
    return labels, boxes_3d, centerness, attributes


def _locally_turned(boxes_3d: Tensor) -> Tensor:
    """Return a copy whose yaw is the local one: less the angle under which the box is seen."""
    turned = boxes_3d.clone()
    turned[..., 6] = -torch.atan2(boxes_3d[..., 0], boxes_3d[..., 2]) + boxes_3d[..., 6]
    return turned


def _tensor(boxes: Any) -> Tensor:
    """Return the tensor, or the one within a box structure of the library."""
    tensor: Tensor = boxes if isinstance(boxes, Tensor) else boxes.tensor
    return tensor


def _padded(lists: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return each list of [n, ...] as one tensor [B, G, ...], and which rows of it are boxes."""
    valid = [boxes.new_ones(len(boxes), dtype=torch.bool) for boxes in lists["boxes"]]
    return {name: pad_sequence(parts, batch_first=True) for name, parts in {**lists, "valid": valid}.items()}


def _points(head: Any, points: Levels) -> FcosPoints:
    """Return the points of all levels; on a CPU, as regular grids where they are."""
    if len(points) != len(head.regress_ranges):
        raise InvalidArgument(
            f"get_targets: points must have one level for each regress range. Found: {len(points)} levels, "
            f"{len(head.regress_ranges)} ranges. Give the head as many ranges as the neck has levels."
        )
    strides = [_stride_of(stride) for stride in head.strides]
    ranges = [(float(low), float(high)) for low, high in head.regress_ranges]
    if all(level.device.type == "cpu" for level in points) and (regular := _regular(points, strides, ranges)):
        return regular
    return FcosPoints(
        torch.cat(points),
        torch.cat([xy.new_tensor(limits).expand_as(xy) for xy, limits in zip(points, ranges, strict=True)]),
        torch.cat([xy.new_full((len(xy),), stride) for xy, stride in zip(points, strides, strict=True)]),
    )


def _stride_of(stride: Any) -> float:
    """Return a level's stride; MMDetection may hold it once an axis."""
    return float(stride[0] if isinstance(stride, Sequence) else stride)


def _regular(points: Levels, strides: list[float], ranges: list[tuple[float, float]]) -> FcosPoints | None:
    """Return these CPU points as grids; None if they are not regular."""
    if not all(stride.is_integer() and stride >= 1 for stride in strides):
        return None
    sizes = []
    for xy in points:
        width = int((xy[:, 1] == xy[0, 1]).sum()) if len(xy) else 0
        if width == 0 or len(xy) % width:
            return None
        sizes.append((len(xy) // width, width))
    regular = _grids(tuple(sizes), tuple(int(stride) for stride in strides), tuple(ranges), points[0].dtype)
    return regular if torch.equal(torch.cat(points), regular.xy) else None


@kept(16)
def _grids(
    sizes: tuple[tuple[int, int], ...], strides: tuple[int, ...], ranges: tuple[tuple[float, float], ...],
    dtype: torch.dtype,
) -> FcosPoints:  # fmt: skip
    # Multi-scale training has a handful of map sizes; a level costs more to make than to compare.
    return FcosPoints.regular(sizes, strides, ranges, device="cpu", dtype=dtype)


def _split(targets: Tensor, points: Levels) -> Levels:
    """Return [B, P, ...] as one tensor a level, image after image."""
    return [part.flatten(0, 1) for part in torch.split_with_sizes(targets, [len(level) for level in points], 1)]
