"""SimOTA as published, one image and one ground truth at a time: what the batched assignment is compared with.

Written from the papers and the published descriptions of YOLOX (https://arxiv.org/abs/2107.08430), YOLOv7
(https://arxiv.org/abs/2207.02696) and MMDetection (https://arxiv.org/abs/1906.07155), which has the candidates of the
first YOLOX, adds 1e-7 in the logarithm, and takes unions as 1e-6 at least. It builds the [G, A, C] class cost, adds 1e6
to pairs outside the region and loops over the ground truths for their cheapest anchors, as those do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = 1e-4
"""In fp64, of an image that may be assigned otherwise: costs are below 100, and this a few of their fp32 roundings."""


@dataclass
class Image:
    """What one image is assigned from; boxes are (x, y, width, height)."""

    boxes: Tensor
    cls: Tensor
    obj: Tensor
    points: Tensor
    strides: Tensor
    gt_boxes: Tensor
    gt_classes: Tensor
    candidates: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Image:
        """Return it in another precision."""
        return Image(
            self.boxes.to(dtype),
            self.cls.to(dtype),
            self.obj.to(dtype),
            self.points.to(dtype),
            self.strides.to(dtype),
            self.gt_boxes.to(dtype),
            self.gt_classes,
            self.candidates,
        )


@dataclass
class Found:
    """fg_mask, matched_gt (-1: background) and matched_iou, each [A]; pairs of the candidates beside."""

    fg_mask: Tensor
    matched_gt: Tensor
    matched_iou: Tensor
    margin: float = float("inf")
    """Least distance of a decision from the opposite one, ties apart; only with `ties="lowest"`."""


@torch.no_grad()
def assign(image: Image, variant: str = "yolox", ties: str = "lowest") -> Found:
    """Assign one image.

    Args:
        image: what to assign, in the precision to compute in.
        variant: "yolox", "yolox-2021", "yolov7" or "mmdet".
        ties: "torch": torch.topk on the costs plus 1e6, as published. "lowest": by (outside, cost, index).
    """
    anchors, gts = len(image.boxes), len(image.gt_boxes)
    device = image.boxes.device
    mask = torch.zeros(anchors, dtype=torch.bool, device=device)
    nothing = Found(mask, torch.full((anchors,), -1, device=device), image.boxes.new_zeros(anchors))
    if gts == 0:
        return nothing
    mask, inside = geometry(image, variant)
    if not mask.any():
        return nothing
    log_eps, least_union = (1e-7, 1e-6) if variant == "mmdet" else (1e-8, 0.0)
    ious = pairwise_iou(image.gt_boxes, image.boxes[mask], least_union)
    cost = class_cost(image.cls[mask], image.obj[mask], image.gt_classes, variant) - 3.0 * torch.log(ious + log_eps)
    matching, margin = (_matched_torch if ties == "torch" else _matched_lowest)(cost, ious, inside)
    fg = matching.sum(0) > 0
    mask[mask.clone()] = fg
    nothing.fg_mask, nothing.margin = mask, margin
    nothing.matched_gt[mask] = matching[:, fg].to(torch.uint8).argmax(0)
    nothing.matched_iou[mask] = (matching * ious).sum(0)[fg]
    return nothing


def geometry(image: Image, variant: str) -> tuple[Tensor, Tensor]:
    """Return the candidates [A], and for each ground truth which of them are in its region [G, N]."""
    if variant == "yolov7":
        assert image.candidates is not None
        mask = image.candidates.clone()
        return mask, torch.ones(len(image.gt_boxes), int(mask.sum()), dtype=torch.bool, device=mask.device)
    reach = {"yolox": 1.5, "yolox-2021": 2.5, "mmdet": 2.5}[variant] * image.strides
    near = _between(image, image.gt_boxes[:, None, :2] - reach[:, None], image.gt_boxes[:, None, :2] + reach[:, None])
    if variant == "yolox":
        mask, inside = near.any(0), near
    else:
        half = 0.5 * image.gt_boxes[:, None, 2:]
        within = _between(image, image.gt_boxes[:, None, :2] - half, image.gt_boxes[:, None, :2] + half)
        mask, inside = near.any(0) | within.any(0), near & within
    mask = mask if image.candidates is None else image.candidates.clone()
    return mask, inside[:, mask]


def _between(image: Image, low: Tensor, high: Tensor) -> Tensor:
    deltas = torch.cat([image.points - low, high - image.points], dim=-1)
    return deltas.min(-1).values > 0


def pairwise_iou(one: Tensor, other: Tensor, least_union: float) -> Tensor:
    """Return the IoU [G, N] of boxes by middle and size."""
    low = torch.max(one[:, None, :2] - one[:, None, 2:] / 2, other[:, :2] - other[:, 2:] / 2)
    high = torch.min(one[:, None, :2] + one[:, None, 2:] / 2, other[:, :2] + other[:, 2:] / 2)
    both = (high - low).prod(-1) * (low < high).all(-1)
    return both / (one[:, 2:].prod(-1)[:, None] + other[:, 2:].prod(-1) - both).clamp(min=least_union)


def class_cost(cls: Tensor, obj: Tensor, gt_classes: Tensor, variant: str) -> Tensor:
    """Return the summed binary cross-entropy [G, N], by way of [G, N, C]."""
    p = (cls.sigmoid() * obj.sigmoid()[:, None]).sqrt()
    targets = F.one_hot(gt_classes, cls.shape[1]).to(cls.dtype)[:, None].repeat(1, len(cls), 1)
    p = p[None].repeat(len(gt_classes), 1, 1)
    if variant == "yolov7":
        return F.binary_cross_entropy_with_logits(torch.log(p / (1 - p)), targets, reduction="none").sum(-1)
    return F.binary_cross_entropy(p, targets, reduction="none").sum(-1)


def _dynamic_k(ious: Tensor) -> tuple[list[int], Tensor]:
    sums = ious.topk(min(10, ious.shape[1]), dim=1).values.sum(1)
    return sums.int().clamp(min=1).tolist(), sums


def _matched_torch(cost: Tensor, ious: Tensor, inside: Tensor) -> tuple[Tensor, float]:
    cost = cost + 1e6 * ~inside
    matching = torch.zeros_like(cost, dtype=torch.uint8)
    ks, _ = _dynamic_k(ious)
    for gt, k in enumerate(ks):
        matching[gt, cost[gt].topk(k, largest=False).indices] = 1
    several = matching.sum(0) > 1
    if several.any():
        best = cost[:, several].min(0).indices
        matching[:, several] = 0
        matching[best, several] = 1
    return matching, float("inf")


def _matched_lowest(cost: Tensor, ious: Tensor, inside: Tensor) -> tuple[Tensor, float]:
    matching = torch.zeros_like(cost, dtype=torch.uint8)
    ks, sums = _dynamic_k(ious)
    # Sums near an integer decide by rounding, but for those below 1, which give 1 all the same, and exact ones.
    nearest = [abs(s - round(s)) for s in sums.tolist() if s > 1.5]
    margin = min([gap for gap in nearest if gap > 0], default=float("inf"))
    ranks = [
        [(not near, c) for c, near in zip(*pair, strict=True)]
        for pair in zip(cost.tolist(), inside.tolist(), strict=True)
    ]
    for gt, k in enumerate(ks):
        order = sorted(range(len(ranks[gt])), key=lambda a, gt=gt: (ranks[gt][a], a))  # type: ignore[misc]
        matching[gt, order[:k]] = 1
        if k < len(order):
            margin = min(margin, _gap(ranks[gt][order[k - 1]], ranks[gt][order[k]]))
    for anchor in (matching.sum(0) > 1).nonzero().flatten().tolist():
        order = sorted(range(len(ranks)), key=lambda g, a=anchor: (ranks[g][a], g))  # type: ignore[misc]
        matching[:, anchor] = 0
        matching[order[0], anchor] = 1
        margin = min(margin, _gap(ranks[order[0]][anchor], ranks[order[1]][anchor]))
    return matching, margin


def _gap(one: tuple[bool, float], other: tuple[bool, float]) -> float:
    """Return how far apart two neighbours are; ties and pairs of different regions are decided without the cost."""
    gap = abs(one[1] - other[1])
    return gap if one[0] == other[0] and gap > 0 else float("inf")
