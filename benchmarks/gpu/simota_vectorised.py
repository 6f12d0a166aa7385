"""SimOTA for a whole batch in plain torch, in shapes that depend on no value: what one writes who has no kernels.

Ground truths are worked on in parts, so that no [B, G, A] tensor exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.simota.assign import overlap, regions_of
from accel.kernels.simota.inputs import INF_BITS, VARIANTS, Assignment, Boxes, Cells, cells_of, corners
from benchmarks.simota import Batch

_PAIRS = 1 << 23
_RULES = VARIANTS["yolox"]


def assign(batch: Batch) -> Assignment:
    """Assign a batch by the rules of YOLOX."""
    cells = Cells(*(t[:, None] for t in cells_of(batch.points, batch.strides, _RULES.radius, batch.boxes)))
    gts, predicted = corners(batch.gt_boxes, False), corners(batch.boxes, False)
    images, count = batch.obj.shape
    size = max(1, _PAIRS // (images * count))
    parts = [slice(start, start + size) for start in range(0, gts.x.shape[1], size)]
    valid = torch.zeros_like(batch.obj, dtype=torch.bool)
    for part in parts:
        valid |= regions_of(cells, _each(gts, part), _RULES)[0].any(1)
    table = _class_costs(batch, valid)
    predicted = predicted.map(lambda t: t.where(valid, 0)[:, None])  # others have no area
    best = torch.full_like(valid, torch.iinfo(torch.int32).max, dtype=torch.int32)
    cheapest, picked, is_taken = torch.zeros_like(best, dtype=torch.int64), [], []
    for part in parts:
        near, classes = _each(gts, part), batch.gt_classes[:, part]
        iou = overlap(near, predicted, _RULES.union_eps)
        k = iou.topk(_RULES.topk).values.sum(-1).to(torch.int32).clamp(1, _RULES.topk)
        own = table.gather(1, classes[..., None].expand(-1, -1, count))
        price = iou.add_(_RULES.log_eps).log_().mul_(-_RULES.iou_weight).add_(own).clamp_(min=0)
        inside = regions_of(cells, near, _RULES)[1] & valid[:, None]
        keys = torch.where(inside, -price, price).view(torch.int32)
        least, where = keys.min(dim=1)
        cheapest = torch.where(least < best, where + part.start, cheapest)
        best = torch.minimum(best, least)
        top = keys.to(torch.int64).bitwise_left_shift_(32).add_(torch.arange(count, device=keys.device))
        top = top.topk(_RULES.topk, largest=False).values
        rank = torch.arange(_RULES.topk, device=top.device)
        is_taken.append((rank < k[..., None]) & (top >> 32 < INF_BITS))
        picked.append(top & 0xFFFFFFFF)
    return _resolved(batch, gts, corners(batch.boxes, False), torch.cat(picked, 1), torch.cat(is_taken, 1), cheapest)


def _each(gts: Boxes, part: slice) -> Boxes:
    return gts.map(lambda t: t[:, part, None])


def _class_costs(batch: Batch, valid: Tensor) -> Tensor:
    """Return the costs of the classes of candidates [B, C, A], infinite for other anchors."""
    p = (batch.cls.float().sigmoid() * batch.obj.float().sigmoid()[..., None]).sqrt()
    absent = (-p).log1p().clamp(min=-100)
    own = (0 - p.log().clamp(min=-100)) + (absent - absent.sum(-1, keepdim=True)).clamp(min=0)
    return own.masked_fill(~valid[..., None], torch.inf).transpose(1, 2).contiguous()


def _resolved(
    batch: Batch, gts: Boxes, predicted: Boxes, picked: Tensor, is_taken: Tensor, cheapest: Tensor
) -> Assignment:
    """Give anchors that several ground truths take to the cheapest; `picked` and `is_taken` are [B, G, topk]."""
    images, count = batch.obj.shape
    flat = (picked.clamp(max=count - 1) + torch.arange(images, device=picked.device)[:, None, None] * count).flatten()
    numbers = torch.arange(picked.shape[1], device=picked.device)[None, :, None]
    zeros = flat.new_zeros(images * count)
    takers = zeros.scatter_add(0, flat, is_taken.flatten().long()).view(images, count)
    # Where there is one taker, the sum of the takers is that one.
    taker = zeros.scatter_add(0, flat, (is_taken * numbers).flatten()).view(images, count)
    gt, fg = torch.where(takers > 1, cheapest, taker), takers > 0
    iou = overlap(gts.map(lambda t: t.gather(1, gt)), predicted, _RULES.union_eps)
    classes = batch.gt_classes.gather(1, gt)
    return Assignment(fg, gt.masked_fill(~fg, -1), iou.masked_fill(~fg, 0), classes.masked_fill(~fg, -1), fg.sum(1))
