"""The published target assignment, one image at a time: what `accel.kernels.fcos_targets` must equal.

Written from the papers (FCOS arXiv:1904.01355, FCOS3D arXiv:2104.10956) and from what the heads of MMDetection and
MMDetection3D do: every quantity is a [P, G] tensor, the best gt is the first minimum over G, and a row is picked with
`t[range(P), index]`. `index="arange"` picks it with a tensor index instead: the honest second baseline.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from accel.kernels.fcos_targets.inputs import Fcos3dGts, FcosConfig, FcosGts, FcosPoints

INF = 1e8
Index = Literal["range", "arange"]


def pick(t: Tensor, best: Tensor, index: Index) -> Tensor:
    """Return t[p, best[p]] for each p."""
    if index == "range":
        return t[range(len(t)), best]
    return t[torch.arange(len(t), device=t.device), best]


def sides(x: Tensor, y: Tensor, boxes: Tensor) -> Tensor:
    """Return the distances of each point to the left, top, right and bottom of each box, [P, G, 4]."""
    boxes = boxes[None].expand(len(x), -1, -1)
    return torch.stack((x - boxes[..., 0], y - boxes[..., 1], boxes[..., 2] - x, boxes[..., 3] - y), -1)


def in_range(distances: Tensor, regress_range: Tensor) -> Tensor:
    """Tell whether the largest distance lies in the point's range, [P, G]."""
    far = distances.amax(-1)
    return (far >= regress_range[:, :1]) & (far <= regress_range[:, 1:])


def fcos_single(
    points: FcosPoints, boxes: Tensor, labels: Tensor, config: FcosConfig, index: Index = "arange"
) -> tuple[Tensor, Tensor]:
    """Return labels [P] and box targets [P, 4] of one image with boxes [G, 4]."""
    total, count = len(points.xy), len(boxes)
    if count == 0:
        return labels.new_full((total,), config.background), boxes.new_zeros(total, 4)
    areas = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))[None].repeat(total, 1)
    x, y = (points.xy[:, axis, None].expand(total, count) for axis in (0, 1))
    distances = sides(x, y, boxes)
    inside = distances
    if config.center_sampling:
        reach = (points.stride * config.radius)[:, None]
        center_x, center_y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
        lows = [(center_x - reach, boxes[:, 0]), (center_y - reach, boxes[:, 1])]
        highs = [(center_x + reach, boxes[:, 2]), (center_y + reach, boxes[:, 3])]
        low_x, low_y = (torch.where(near > edge, near, edge) for near, edge in lows)
        high_x, high_y = (torch.where(near > edge, edge, near) for near, edge in highs)
        inside = torch.stack((x - low_x, y - low_y, high_x - x, high_y - y), -1)
    areas[~(inside.amin(-1) > 0)] = INF
    areas[~in_range(distances, points.regress_range)] = INF
    least, best = areas.min(dim=1)
    picked = labels[best]
    picked[least == INF] = config.background
    targets = pick(distances, best, index)
    return picked, targets / points.stride[:, None] if config.normalize else targets


def centerness_2d(targets: Tensor) -> Tensor:
    """Return the centerness of box targets [N, 4] of foreground points."""
    across, along = targets[:, [0, 2]], targets[:, [1, 3]]
    return torch.sqrt((across.amin(-1) / across.amax(-1)) * (along.amin(-1) / along.amax(-1)))


def fcos3d_single(
    points: FcosPoints, gts: dict[str, Tensor], config: FcosConfig, index: Index = "arange"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return labels [P], box targets [P, C], centerness [P] and attribute labels [P] of one image.

    `gts` holds boxes [G, 4], labels [G], boxes_3d [G, C], centers [G, 2], depths [G] and attr_labels [G].
    """
    total, count = len(points.xy), len(gts["boxes"])
    boxes_3d, centers = gts["boxes_3d"], gts["centers"]
    if count == 0:
        return (
            gts["labels"].new_full((total,), config.background),
            boxes_3d.new_zeros(total, boxes_3d.shape[-1]),
            boxes_3d.new_zeros(total),
            gts["attr_labels"].new_full((total,), config.attr_background),
        )
    x, y = (points.xy[:, axis, None].expand(total, count) for axis in (0, 1))
    distances = sides(x, y, gts["boxes"])
    deltas = torch.stack((x - centers[:, 0], y - centers[:, 1]), -1)
    depths = gts["depths"][None, :, None].expand(total, count, 1)
    targets = torch.cat((deltas, depths, boxes_3d[None, :, 3:].expand(total, -1, -1)), -1)
    reach = (points.stride * config.radius)[:, None]
    low, high = [(centers[:, axis] - reach, centers[:, axis] + reach) for axis in (0, 1)], (x, y)
    inside = torch.stack([d for (a, b), v in zip(low, high, strict=True) for d in (v - a, b - v)], -1).amin(-1) > 0
    dists = torch.sqrt(torch.sum(deltas**2, dim=-1))
    dists[~inside] = INF
    dists[~in_range(distances, points.regress_range)] = INF
    least, best = dists.min(dim=1)
    labels, attrs = gts["labels"][best], gts["attr_labels"][best]
    labels[least == INF] = config.background
    attrs[least == INF] = config.attr_background
    pick(distances, best, index)  # the published head picks the 2D targets as well, and drops them
    targets = pick(targets, best, index)
    relative = torch.sqrt(torch.sum(targets[..., :2] ** 2, dim=-1)) / (1.414 * reach[:, 0])
    if config.normalize:
        targets[:, :2] = targets[:, :2] / points.stride[:, None]
    return labels, targets, torch.exp(-config.centerness_alpha * relative), attrs


def fcos_batch(
    points: FcosPoints, gts: FcosGts, config: FcosConfig, index: Index = "arange"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels [B, P], box targets [B, P, 4] and centerness [B, P], image after image."""
    found = [
        fcos_single(points, boxes[valid], labels[valid], config, index)
        for boxes, labels, valid in zip(gts.boxes, gts.labels, gts.valid, strict=True)
    ]
    labels, targets = (torch.stack(parts) for parts in zip(*found, strict=True))
    centerness = torch.zeros_like(targets[..., 0])
    foreground = labels != config.background
    centerness[foreground] = centerness_2d(targets[foreground])
    return labels, targets, centerness


def fcos3d_batch(
    points: FcosPoints, gts: Fcos3dGts, config: FcosConfig, index: Index = "arange"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return labels [B, P], box targets [B, P, C], centerness [B, P] and attribute labels [B, P]."""
    names = ("boxes", "labels", "boxes_3d", "centers", "depths", "attr_labels")
    found = [
        fcos3d_single(points, {name: getattr(gts, name)[image][valid] for name in names}, config, index)
        for image, valid in enumerate(gts.valid)
    ]
    labels, targets, centerness, attrs = (torch.stack(parts) for parts in zip(*found, strict=True))
    return labels, targets, centerness, attrs
