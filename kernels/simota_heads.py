"""Batched SimOTA in the heads people have: YOLOX's own, and the place of an assigner in MMDetection's.

Neither is imported: YOLOX's head is known by its methods, MMDetection's containers by their attributes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel.kernels.simota import simota_assign
from accel.kernels.simota.inputs import VARIANTS, Assignment, Rules
from accel.profiler.errors import InvalidArgument

# A head's method → the variant that its matching is.
_VARIANT_BY_METHOD = {"get_geometry_constraint": "yolox", "get_in_boxes_info": "yolox-2021"}


def patch_yolox_head(head: nn.Module, *, variant: str | Rules | None = None) -> nn.Module:
    """Make a YOLOX head assign its whole batch at once, in place.

    `get_losses` runs the batched assignment before its loop over images, and `get_assignments`, which the loop calls,
    returns its results. Losses, parameters, state_dict, copies and pickles are as before; two waits for the device
    are left where each ground truth had one, besides those of get_losses itself. A call to get_assignments from
    outside get_losses runs the head's own.

    Args:
        head: has `get_losses(imgs, x_shifts, y_shifts, expanded_strides, labels, outputs, ...)`, calling
            `self.get_assignments(batch_idx, num_gt, ...)` per image, as YOLOXHead has.
        variant: as for `simota_assign`; None: by the head's methods, "yolox" with get_geometry_constraint and
            "yolox-2021" with get_in_boxes_info.

    Returns:
        The head.

    Raises:
        InvalidArgument: if the head lacks these methods.

    Example:
        patch_yolox_head(model.head)  # then train as before
    """
    for name in ("get_losses", "get_assignments"):
        if not callable(getattr(head, name, None)):
            raise InvalidArgument(f"patch_yolox_head: the head must have {name}(). Found: {type(head).__name__}")
    if variant is None:
        variant = next((rules for method, rules in _VARIANT_BY_METHOD.items() if hasattr(head, method)), None)
    if variant is None:
        raise InvalidArgument(
            f"patch_yolox_head: a head has {' or '.join(_VARIANT_BY_METHOD)}(). "
            f"Found: {type(head).__name__} with neither; "
            "name its rules: variant='yolox'"
        )
    unpatch_yolox_head(head)
    # Not by __setattr__ of modules: it is not part of the state, but copies and pickles of the head keep it.
    vars(head)["get_losses"] = functools.partial(_get_losses, head, variant)
    return head


def unpatch_yolox_head(head: nn.Module) -> nn.Module:
    """Undo `patch_yolox_head`, in place."""
    ours = vars(head).get("get_losses")
    if isinstance(ours, functools.partial) and ours.func is _get_losses:
        del vars(head)["get_losses"]
    return head


def _get_losses(
    head: Any,
    variant: str | Rules,
    imgs: Any,
    x_shifts: Sequence[Tensor],
    y_shifts: Sequence[Tensor],
    expanded_strides: Sequence[Tensor],
    labels: Tensor,
    outputs: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    """Assign the batch, then run the head's own loop over images on what was assigned."""
    strides = torch.cat(list(expanded_strides), 1)[0]
    shifts = torch.cat([torch.cat(list(x_shifts), 1), torch.cat(list(y_shifts), 1)])
    points = ((shifts + 0.5) * strides).T
    assignments = _per_image(_assigned(outputs, labels, points, strides, variant), labels.dtype)
    own = copy.copy(head)  # replicas of `nn.DataParallel` share this head, each in a thread of its own
    vars(own)["get_assignments"] = lambda batch_idx, *_, **__: assignments[batch_idx]
    return type(head).get_losses(own, imgs, x_shifts, y_shifts, expanded_strides, labels, outputs, *rest, **options)


def _assigned(outputs: Tensor, labels: Tensor, points: Tensor, strides: Tensor, variant: str | Rules) -> Assignment:
    """Assign outputs [B, A, 5 + C] to labels [B, G, 5] of (class, x, y, width, height), padded with zeros."""
    real = (labels.sum(2) > 0).sum(1)  # YOLOX's own count: it takes as many from the front
    mask = torch.arange(labels.shape[1], device=labels.device) < real[:, None]
    return simota_assign(
        outputs[..., :4],
        outputs[..., 5:],
        outputs[..., 4],
        points,
        strides,
        labels[..., 1:5],
        labels[..., 0].long(),
        mask,
        variant=variant,
    )


def _per_image(assignment: Assignment, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Return what get_assignments returns for each image: classes, mask, IoUs, ground truths, how many."""
    chosen = assignment.fg_mask.flatten().nonzero().flatten()
    counts = assignment.num_fg.tolist()

    def split(values: Tensor) -> Sequence[Tensor]:
        return torch.split(values.flatten().index_select(0, chosen), counts)

    classes, ious, gts = (
        split(assignment.matched_class.to(dtype)),
        split(assignment.matched_iou),
        split(assignment.matched_gt),
    )
    return list(zip(classes, assignment.fg_mask.unbind(), ious, gts, counts, strict=True))


@dataclasses.dataclass
class AssignResult:
    """The fields that MMDetection's samplers read."""

    num_gts: int
    gt_inds: Tensor
    """[A] int64: 0 background, i + 1 for ground truth i."""
    max_overlaps: Tensor
    """[A] fp32: IoU with that ground truth; background -100000, or 0 in an image without foreground."""
    labels: Tensor
    """[A] int64: class; background -1."""


class BatchedSimOTAAssigner:
    """SimOTA in the place of MMDetection's SimOTAAssigner, for one image or a batch.

    Args:
        center_radius: reach of the centre region, in strides.
        candidate_topk: IoUs that are summed to the number of anchors.
        iou_weight: factor of the IoU cost.
        cls_weight: factor of the class cost.
        result: makes the result of an image from num_gts, gt_inds, max_overlaps and labels; pass MMDetection's own
            AssignResult where its type is asked for.

    Example:
        >>> from types import SimpleNamespace as Instances
        >>> predicted = Instances(
        ...     bboxes=torch.tensor([[20.0, 20.0, 40.0, 40.0], [0.0, 0.0, 8.0, 8.0]]),
        ...     scores=torch.tensor([[0.5], [0.5]]),
        ...     priors=torch.tensor([[28.0, 28.0, 8.0, 8.0], [4.0, 4.0, 8.0, 8.0]]),
        ... )
        >>> truth = Instances(bboxes=torch.tensor([[20.0, 20.0, 40.0, 40.0]]), labels=torch.tensor([0]))
        >>> BatchedSimOTAAssigner().assign(predicted, truth).gt_inds
        tensor([1, 0])
    """

    def __init__(
        self,
        center_radius: float = 2.5,
        candidate_topk: int = 10,
        iou_weight: float = 3.0,
        cls_weight: float = 1.0,
        result: Callable[..., Any] = AssignResult,
    ) -> None:
        self.rules = dataclasses.replace(
            VARIANTS["mmdet"], radius=center_radius, topk=candidate_topk, iou_weight=iou_weight, cls_weight=cls_weight
        )
        self._result = result

    def assign(self, pred_instances: Any, gt_instances: Any, gt_instances_ignore: Any = None, **_: Any) -> Any:
        """Assign one image; the arguments are those of MMDetection 3, `gt_instances_ignore` is not used there either.

        Args:
            pred_instances: bboxes [A, 4] (left, top, right, bottom); scores [A, C], the joint probabilities; priors
                [A, 4] (x, y, stride, stride) with (x, y) the middle of the cell.
            gt_instances: bboxes [G, 4] and labels [G].

        Returns:
            What `result` makes.
        """
        return self.assign_batch([pred_instances], [gt_instances])[0]

    @torch.no_grad()
    def assign_batch(self, pred_instances: Sequence[Any], gt_instances: Sequence[Any]) -> list[Any]:
        """Assign all images of a batch at once; an argument per image as for `assign`, with one number of priors."""
        if len(pred_instances) != len(gt_instances):
            raise InvalidArgument(
                f"assign_batch: as many gt_instances as pred_instances are needed. Found: {len(gt_instances)} and "
                f"{len(pred_instances)}"
            )
        if not pred_instances:
            return []
        boxes = torch.stack([image.bboxes for image in pred_instances])
        priors = torch.stack([image.priors for image in pred_instances])
        counts = [len(image.labels) for image in gt_instances]
        gt_boxes = nn.utils.rnn.pad_sequence([image.bboxes for image in gt_instances], batch_first=True)
        labels = nn.utils.rnn.pad_sequence([image.labels for image in gt_instances], batch_first=True)
        real = [torch.ones_like(image.labels, dtype=torch.bool) for image in gt_instances]
        assignment = simota_assign(
            boxes,
            torch.stack([image.scores for image in pred_instances]),
            None,
            priors[..., :2],
            priors[..., 2],
            gt_boxes,
            labels,
            nn.utils.rnn.pad_sequence(real, batch_first=True),  # a tensor of lengths would wait for its copy
            variant=self.rules,
            xyxy=True,
        )
        overlaps = assignment.matched_iou.masked_fill(
            ~assignment.fg_mask & assignment.fg_mask.any(1, keepdim=True), -100000.0
        )
        parts = zip(counts, assignment.matched_gt + 1, overlaps, assignment.matched_class, strict=True)
        return [self._result(count, gts, ious, classes) for count, gts, ious, classes in parts]
