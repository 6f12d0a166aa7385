"""SimOTA on a CPU for a few images: there the number of calls counts, not the amount of computation.

The rules, the arithmetic and its order are those of `simota`, whose batched path takes some 300 operators whatever the
batch; here an image takes about 80, and every shape follows from its candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.simota.assign import overlap, regions_of
from accel.kernels.simota.inputs import (
    INF_BITS,
    Anchors,
    Assignment,
    Boxes,
    Cells,
    Given,
    Rules,
    Truths,
    check_anchors,
    corners,
)

Predicted = tuple[Tensor, Tensor, Tensor | None]
"""Boxes [N, 4], cls [N, C] and obj [N] of the candidates of one image."""


def assign_few(given: Given, cells: Cells, rules: Rules, whole: Assignment, *, xyxy: bool, check: bool) -> Assignment:
    """Assign image by image.

    Args:
        given: what is assigned, checked.
        cells: where the anchors stand, [B, A] or [1, A] each.
        rules: of the variant.
        whole: an assignment without foreground, which is filled and returned.
        xyxy: boxes are left, top, right, bottom.
        check: look for what is not finite.
    """
    boxes, cls, obj, _, _, gt_boxes, gt_classes, gt_mask, candidates = given
    for image in range(len(boxes)):
        real = None if gt_mask is None else gt_mask[image].nonzero().flatten()
        own, classes = gt_boxes[image], gt_classes[image].long().clamp(0, cls.shape[2] - 1)
        if real is not None:
            own, classes = own.index_select(0, real), classes.index_select(0, real)
        gt = corners(own, xyxy).map(lambda t: t[:, None])
        here = Cells(*(t[image if len(t) > 1 else 0] for t in cells))
        index, inside = _near(here, gt, rules, None if candidates is None else candidates[image])
        if len(index) == 0 or len(classes) == 0:
            continue
        rows = boxes[image].index_select(0, index), cls[image].index_select(0, index)
        mine: Predicted = (*rows, None if obj is None else obj[image].index_select(0, index))
        near = corners(mine[0], xyxy)
        if check:
            _check(mine, near, gt, here, image)
        iou = overlap(gt, near, rules.union_eps)
        chosen, taker = _matched(_keys(iou, mine, classes, inside, rules), iou, rules)
        at = index.index_select(0, chosen)
        whole.fg_mask[image].index_fill_(0, at, True)
        whole.matched_gt[image].index_copy_(0, at, taker if real is None else real.index_select(0, taker))
        whole.matched_iou[image].index_copy_(0, at, iou[taker, chosen])
        whole.matched_class[image].index_copy_(0, at, classes.index_select(0, taker))
        whole.num_fg[image] = len(chosen)
    return whole


def _near(cells: Cells, gt: Boxes, rules: Rules, candidates: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the candidates [N], and which of them are in the region of each ground truth [G, N]; None: all."""
    if rules.region == "given":
        assert candidates is not None
        return candidates.nonzero().flatten(), None
    near, inside = regions_of(cells, gt, rules)
    index = (near.any(0) if candidates is None else candidates).nonzero().flatten()
    return index, inside.index_select(1, index)


def _check(mine: Predicted, near: Boxes, gt: Boxes, cells: Cells, image: int) -> None:
    boxes, cls, obj = mine
    total = boxes.sum() + cls.sum() if obj is None else boxes.sum() + cls.sum() + obj.sum()
    if obj is not None and total.isfinite():
        return
    everywhere = torch.ones_like(near.area, dtype=torch.bool)[None]
    anchors = Anchors(near.map(lambda t: t[None]), cls[None], None if obj is None else obj[None], cells, everywhere)
    check_anchors(anchors, Truths(gt.map(lambda t: t.T), everywhere, everywhere), image)


def _keys(iou: Tensor, mine: Predicted, classes: Tensor, inside: Tensor | None, rules: Rules) -> Tensor:
    """Return the costs as integers of the same order [G, N], negative in the region."""
    _, cls, obj = mine
    p = cls.to(torch.float32)  # a copy already
    if obj is not None:
        p = p.sigmoid_().mul_(obj.float().sigmoid()[:, None]).sqrt_()
    own = 0 - p.index_select(1, classes).log_().clamp_(min=-100)
    absent = p.neg_().log1p_().clamp_(min=-100)
    own += absent.index_select(1, classes).sub_(absent.sum(-1, keepdim=True)).clamp_(min=0)
    own = own.mul_(rules.cls_weight).T
    price = iou.add(rules.log_eps).log_().mul_(-rules.iou_weight).add_(own).clamp_(min=0)
    return (price if inside is None else torch.where(inside, -price, price)).view(torch.int32)


def _matched(keys: Tensor, iou: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return the candidates that learn a box, in their order, and the ground truth of each."""
    most = min(rules.topk, keys.shape[1])
    k = iou.topk(most).values.sum(-1).to(torch.int32).clamp_(1, rules.topk)
    places = torch.arange(keys.shape[1], device=keys.device)
    top = keys.to(torch.int64).bitwise_left_shift_(32).add_(places).topk(most, largest=False).values
    gt, rank = ((places[:most] < k[:, None]) & (top >> 32 < INF_BITS)).nonzero().unbind(1)
    picked = top[gt, rank] & 0xFFFFFFFF
    takers = picked.bincount(minlength=keys.shape[1])
    taker = torch.zeros_like(takers).index_copy_(0, picked, gt)
    if len(keys) > 1:
        taker = torch.where(takers > 1, keys.min(0).indices, taker)
    chosen = takers.nonzero().flatten()
    return chosen, taker.index_select(0, chosen)
