"""Target assignment of FCOS and FCOS3D for a whole batch in one pass.

For image b, point p and box g, with distances l, t, r, b of the point to the box's sides:

    candidate(b,p,g) = inside the centre region, and low(p) ≤ max(l,t,r,b) ≤ high(p)
    FCOS:    centre region = box ∩ (box centre ± radius·stride(p));   best = argmin_g area(g)
    FCOS3D:  centre region = projected centre ± radius·stride(p);     best = argmin_g √(Δx² + Δy²)

over the candidates; of equals the lowest g wins. A point without candidate is background: its label is the background
label, its other targets are those of the image's first box, as in the published heads, and zeros in an image without
boxes. B: images, P: points of all levels, G: padded boxes, C: columns of a 3D box.

FCOS https://arxiv.org/abs/1904.01355, FCOS3D https://arxiv.org/abs/2104.10956. The heads of MMDetection build about 40
tensors [P, G, 4..9] an image and pick from them with a Python range; here nothing of that size is made. On CUDA one
kernel holds the best box of each point in registers. On a CPU, where the points are the usual grids, only the few
points near each box are examined. Targets carry no gradient, so nothing is saved for backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from accel.kernels.fcos_targets.inputs import (
    INF,
    RELATIVE,
    Box,
    Fcos3dGts,
    Fcos3dTargets,
    FcosConfig,
    FcosGts,
    FcosPoints,
    FcosTargets,
    Grid,
    Rule,
    box_cost,
    centerness_of,
    check,
    check_3d,
    reach_of,
    rule_of,
    widen,
)
from accel.kernels.fcos_targets.near import fcos3d_near, fcos_near, only_near
from accel.kernels.support import Cost, runs_triton

# The reference: every box of every point


def _search(points: FcosPoints, box: Box, valid: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the best box [B, P] of each point, and whether it is a candidate."""
    x, y = points.xy.unbind(-1)
    low, high = points.regress_range.unbind(-1)
    limits = low, high, reach_of(points.stride, rule.radius)
    images, count = valid.shape
    least = x.new_full((images, len(x)), math.inf)
    best = torch.zeros_like(least, dtype=torch.int64)
    for g in range(count):
        cost = box_cost(x, y, limits, Box(*(side[:, g, None] for side in box)), rule)
        better = (cost < least) & valid[:, g, None]
        least = torch.where(better, cost, least)
        best = torch.where(better, g, best)
    return best, (least != INF) & valid.any(1, keepdim=True)


def fcos_targets_ref(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    """Assign FCOS targets in plain torch, for any points, without reading a value on the host."""
    dtype = gts.boxes.dtype
    points, gts = _widened(points), FcosGts(widen(gts.boxes), gts.labels, gts.valid)
    if gts.valid.shape[1] == 0:
        return _no_boxes(points, gts, config, dtype)
    best, foreground = _search(points, Box.of(gts.boxes, None), gts.valid, rule_of(config, by_distance=False))
    labels = torch.where(foreground, gts.labels.gather(1, best), config.background)
    left, top, right, bottom = _rows(gts.boxes, best).unbind(-1)
    x, y = points.xy.unbind(-1)
    sides = torch.stack((x - left, y - top, right - x, bottom - y), -1)
    if config.normalize:
        sides = sides / points.stride[:, None]
    sides = torch.where(gts.valid.any(1)[:, None, None], sides, 0)
    return FcosTargets(labels, sides.to(dtype), torch.where(foreground, centerness_of(sides), 0).to(dtype))


def fcos3d_targets_ref(points: FcosPoints, gts: Fcos3dGts, config: FcosConfig) -> Fcos3dTargets:
    """Assign FCOS3D targets in plain torch, for any points, without reading a value on the host."""
    return Fcos3dTargets(*_fcos3d_ref(points, gts, *_codes(gts), config))


def _fcos3d_ref(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    points, boxes, wide = _widened(points), widen(gts.boxes), widen(code)
    if gts.valid.shape[1] == 0:
        none = _no_boxes(points, gts, config, code.dtype)
        targets = code.new_zeros(*none.labels.shape, code.shape[-1])
        return none.labels, targets, none.centerness, torch.full_like(none.labels, config.attr_background)
    best, foreground = _search(points, Box.of(boxes, wide[..., :2]), gts.valid, rule_of(config, by_distance=True))
    some = gts.valid.any(1)[:, None]
    picked = _rows(wide, best)
    offset = points.xy - picked[..., :2]
    distance = torch.sqrt(torch.sum(offset**2, -1))
    relative = distance / (RELATIVE * reach_of(points.stride, config.radius))
    centerness = torch.where(some, torch.exp(-config.centerness_alpha * relative), 0)
    if config.normalize:
        offset = offset / points.stride[:, None]
    targets = torch.where(some[..., None], torch.cat((offset, picked[..., 2:]), -1), 0)
    labels = torch.where(foreground, gts.labels.gather(1, best), config.background)
    attributes = torch.where(foreground, attrs.gather(1, best), config.attr_background)
    return labels, targets.to(code.dtype), centerness.to(code.dtype), attributes


def _codes(gts: Fcos3dGts) -> tuple[Tensor, Tensor]:
    """Return regressed columns [B, G, C]: centre, depth and the box's columns from the fourth on; and attributes."""
    return torch.cat((gts.centers, gts.depths[..., None], gts.boxes_3d[..., 3:]), -1), gts.attr_labels


def _widened(points: FcosPoints) -> FcosPoints:
    return FcosPoints(widen(points.xy), widen(points.regress_range), widen(points.stride), points.grids)


def _rows(t_BGC: Tensor, best_BP: Tensor) -> Tensor:
    return t_BGC.gather(1, best_BP[..., None].expand(-1, -1, t_BGC.shape[-1]))


def _no_boxes(points: FcosPoints, gts: FcosGts, config: FcosConfig, dtype: torch.dtype) -> FcosTargets:
    shape = len(gts.valid), len(points.xy)
    zeros = gts.boxes.new_zeros(*shape, 4, dtype=dtype)
    return FcosTargets(gts.labels.new_full(shape, config.background), zeros, zeros[..., 0].clone())


# The ops: the choice of the path, opaque to torch.compile


def _fcos(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    if runs_triton(gts.boxes):
        from accel.kernels.fcos_targets import triton as fcos_targets_triton

        return FcosTargets(*fcos_targets_triton.fcos(points, gts, config))
    with torch.no_grad():
        if gts.boxes.device.type == "cpu" and only_near(points, gts.boxes, gts.valid, by_area=True):
            return fcos_near(points, gts, config)
        return fcos_targets_ref(points, gts, config)


def _fcos3d(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(gts.boxes):
        from accel.kernels.fcos_targets import triton as fcos_targets_triton

        return fcos_targets_triton.fcos3d(points, gts, code, attrs, config)
    if gts.boxes.device.type == "cpu" and only_near(points, code, gts.valid, by_area=False):
        return fcos3d_near(points, gts, code, attrs, config)
    return _fcos3d_ref(points, gts, code, attrs, config)


def _flat(points: FcosPoints, config: FcosConfig) -> tuple[list[Tensor], list[float], list[float]]:
    """Return points and settings as an operator takes them: tensors, the numbers of grids, and those of settings."""
    tensors = [points.xy, points.regress_range, points.stride]
    grids = [float(value) for grid in points.grids for value in grid]
    return tensors, grids, [float(getattr(config, name)) for name in _SETTINGS]


_SETTINGS = {
    **{"background": int, "attr_background": int, "center_sampling": bool},
    **{"radius": float, "normalize": bool, "centerness_alpha": float},
}


def _whole(tensors: list[Tensor], grids: list[float], settings: list[float]) -> tuple[FcosPoints, FcosConfig]:
    rows = [grids[i : i + 5] for i in range(0, len(grids), 5)]
    levels = tuple(Grid(*map(int, row[:3]), *row[3:]) for row in rows)
    kinds = zip(_SETTINGS.items(), settings, strict=True)
    config = FcosConfig(**{name: kind(value) for (name, kind), value in kinds})
    xy, regress_range, stride = tensors
    return FcosPoints(xy, regress_range, stride, levels), config


@torch.library.custom_op("accel::fcos_targets", mutates_args=())
def _fcos_op(
    points: list[Tensor], grids: list[float], settings: list[float], gts: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    where, config = _whole(points, grids, settings)
    return _fcos(where, FcosGts(*gts), config)


@_fcos_op.register_fake
def _(points: list[Tensor], _grids: Any, _settings: Any, gts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    boxes, labels, valid = gts
    shape = valid.shape[0], points[0].shape[0]
    return labels.new_empty(shape), boxes.new_empty(*shape, 4), boxes.new_empty(shape)


@torch.library.custom_op("accel::fcos3d_targets", mutates_args=())
def _fcos3d_op(
    points: list[Tensor], grids: list[float], settings: list[float], gts: list[Tensor], code: Tensor, attrs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    where, config = _whole(points, grids, settings)
    return _fcos3d(where, FcosGts(*gts), code, attrs, config)


@_fcos3d_op.register_fake
def _(
    points: list[Tensor], _grids: Any, _settings: Any, gts: list[Tensor], code: Tensor, attrs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = attrs.shape[0], points[0].shape[0]
    targets, centerness = code.new_empty(*shape, code.shape[-1]), code.new_empty(shape)
    return gts[1].new_empty(shape), targets, centerness, attrs.new_empty(shape)


# The public functions


def fcos_targets(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    """Assign each point of each image its FCOS target: the smallest box whose centre region it lies in.

        candidate = in box ∩ (centre ± radius·stride) and low ≤ max(l, t, r, b) ≤ high;  box = argmin area
        centerness = √(min(l, r) ÷ max(l, r) · min(t, b) ÷ max(t, b))

    One pass over the batch: no loop over images, no index from the host, no wait for the device, fixed shapes. Labels
    are those of the published head bit for bit, of areas that are equal the lowest box wins.

    Args:
        points: the P points of all levels; `FcosPoints.regular` makes the usual ones, which a CPU assigns faster.
        gts: the boxes of B images, padded to G; G and B may be 0.
        config: what the head is set to.

    Returns:
        labels: [B, P], of the labels' dtype; `config.background` where no box is.
        boxes: [B, P, 4], left, top, right, bottom distances, in pixels or, with `config.normalize`, strides, of the
            boxes' dtype; of a background point they are those to its image's first box, as published, or 0.
        centerness: [B, P], 0 on background.

    Raises:
        ValueError: if shapes, dtypes or devices don't fit.

    Example:
        >>> points = FcosPoints.regular([(2, 2)], [8], [(-1, 64)])
        >>> gts = FcosGts(torch.tensor([[[0.0, 0, 8, 8]]]), torch.tensor([[3]]), torch.tensor([[True]]))
        >>> fcos_targets(points, gts, FcosConfig(background=10)).labels
        tensor([[ 3, 10, 10, 10]])

    FCOS, https://arxiv.org/abs/1904.01355
    """
    check("fcos_targets", points, gts)
    if not torch.compiler.is_compiling():
        return _fcos(points, gts, config)
    with torch.no_grad():
        return FcosTargets(*_fcos_op(*_flat(points, config), [gts.boxes, gts.labels, gts.valid]))


@torch.no_grad()
def fcos3d_targets(points: FcosPoints, gts: Fcos3dGts, config: FcosConfig) -> Fcos3dTargets:
    """Assign each point of each image its FCOS3D target: the nearest projected centre in reach.

        candidate = in centre ± radius·stride and low ≤ max(l, t, r, b) ≤ high;  box = argmin √(Δx² + Δy²)
        boxes_3d = (Δx, Δy, depth, boxes_3d[3:])    centerness = exp(−alpha · √(Δx² + Δy²) ÷ (1.414 · radius · stride))

    One pass over the batch: no loop over images, no index from the host, no wait for the device, fixed shapes. Labels
    are those of the published head bit for bit, of distances that are equal the lowest box wins.

    Args:
        points: the P points of all levels; `FcosPoints.regular` makes the usual ones, which a CPU assigns faster.
        gts: the boxes of B images, padded to G; G and B may be 0. The yaw is taken as it is: turn it to the local one
            first, as the published head does.
        config: what the head is set to; `center_sampling` must be True.

    Returns:
        labels: [B, P], of the labels' dtype; `config.background` where no box is.
        boxes_3d: [B, P, C], of the 3D boxes' dtype; Δ in pixels or, with `config.normalize`, strides; of a background
            point they are those of its image's first box, as published, or 0.
        centerness: [B, P]; on background that of the first box, or 0.
        attr_labels: [B, P]; `config.attr_background` where no box is.

    Raises:
        ValueError: if shapes, dtypes or devices don't fit, or without centre sampling.

    Example:
        >>> points = FcosPoints.regular([(2, 2)], [8], [(-1, 64)])
        >>> box, one = torch.tensor([[[0.0, 0, 8, 8]]]), torch.tensor([[1]])
        >>> gts = Fcos3dGts(box, one, one > 0, torch.zeros(1, 1, 9), torch.tensor([[[0.0, 0]]]), torch.ones(1, 1), one)
        >>> fcos3d_targets(points, gts, FcosConfig(background=10)).labels
        tensor([[ 1, 10, 10, 10]])

    FCOS3D, https://arxiv.org/abs/2104.10956
    """
    check("fcos3d_targets", points, gts)
    check_3d(gts, config)
    code, attrs = _codes(gts)
    if not torch.compiler.is_compiling():
        return Fcos3dTargets(*_fcos3d(points, gts, code, attrs, config))
    return Fcos3dTargets(*_fcos3d_op(*_flat(points, config), [gts.boxes, gts.labels, gts.valid], code, attrs))


def cost(images: int, points: int, boxes: int, columns: int = 4, itemsize: int = 4) -> Cost:
    """Return the least work of a call, on a device that examines every pair of point and box.

    Args:
        images: B.
        points: P.
        boxes: G.
        columns: C of the 3D box, or 4 for FCOS.
        itemsize: bytes of a target's element.
    """
    read = points * 5 * itemsize + images * boxes * ((4 + columns) * itemsize + 17)
    written = images * points * ((columns + 1) * itemsize + 16)
    return Cost(flops=24 * images * points * boxes, bytes=read + written)
