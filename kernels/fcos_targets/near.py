"""FCOS and FCOS3D targets on a CPU, on regular grids: only the few points near each box are examined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.fcos_targets.inputs import (
    INF,
    RELATIVE,
    Box,
    FcosConfig,
    FcosGts,
    FcosPoints,
    FcosTargets,
    Grid,
    Rule,
    box_cost,
    centerness_of,
    grid_points,
    reach_of,
    region,
    rule_of,
    widen,
)
from accel.kernels.tables import kept


@dataclass(frozen=True, eq=False)
class _Windows:
    """The points that one box may reach on all levels, [K]: the window's place is the box's, its shape is not."""

    dx: Tensor
    dy: Tensor
    stride: Tensor
    offset: Tensor
    width: Tensor
    height: Tensor
    begin: Tensor
    limits: tuple[Tensor, Tensor, Tensor]


@kept(16)
def _windows(grids: tuple[Grid, ...], rule: Rule) -> _Windows:
    columns = []
    begin = 0
    for grid in grids:
        stride = torch.tensor(grid.stride, dtype=torch.float32, device="cpu")
        reach = float(reach_of(stride, rule.radius))
        # An open interval of length n holds at most ceil(n) whole numbers.
        if rule.by_distance or rule.center_sampling:
            size = math.ceil(2 * reach / grid.stride)
        else:
            size = math.ceil(min(2 * grid.high / grid.stride, max(grid.width, grid.height))) + 1
        for dy in range(min(size, grid.height)):
            for dx in range(min(size, grid.width)):
                columns.append(
                    (dx, dy, grid.stride, grid.stride // 2, grid.width, grid.height, begin, grid.low, grid.high, reach)
                )
        begin += grid.width * grid.height
    table = torch.tensor(columns, dtype=torch.float64, device="cpu").view(-1, 10)
    dx, dy, stride, offset, width, height, place = table[:, :7].t().contiguous()
    low, high, reach_K = table[:, 7:].t().float().contiguous()
    return _Windows(dx, dy, stride, offset, width, height, place, (low, high, reach_K))


class _Foreground(NamedTuple):
    """The foreground points: index in [B·P], index of the box in [B·G], and coordinates."""

    point: Tensor
    box: Tensor
    xy: Tensor


def _near(points: FcosPoints, boxes: Box, valid: Tensor, rule: Rule) -> _Foreground:
    """Return the foreground that the reference assigns, from the candidates alone.

    A key holds the bits of the cost, which order as the cost does since it is never negative, above the box's number:
    the least key of a point is the cheapest box, the lowest of equals, in whatever order the keys are compared.
    """
    candidates = [
        _candidates(points, boxes, valid, rule, begin, end) for begin, end in _chunks(valid, points.grids, rule)
    ]
    point, box_index, xy, cost = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    key = (cost.view(torch.int32).long() << 32) | box_index
    least = key.new_full((len(valid) * len(points.xy),), torch.iinfo(torch.int64).max)
    won = least.scatter_reduce_(0, point, key, "amin")[point] == key
    return _Foreground(point[won], box_index[won], xy[won])


def _chunks(valid: Tensor, grids: tuple[Grid, ...], rule: Rule) -> list[tuple[int, int]]:
    """Cut the batch so that no more than 2²¹ pairs of box and point are held."""
    images, count = valid.shape
    step = max(1, 2**21 // max(1, count * len(_windows(grids, rule).dx)))
    return [(begin, min(begin + step, images)) for begin in range(0, images, step)]


def _candidates(
    points: FcosPoints, box: Box, valid: Tensor, rule: Rule, begin: int, end: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return point, box, place and cost of each candidate of these images."""
    w = _windows(points.grids, rule)
    here = Box(*(side[begin:end] for side in box)).over_points()
    low_x, low_y, _, _ = region(here, w.limits[2], rule)
    # In fp64: an edge just below a point, by one fp32 step, must not be rounded onto it.
    column = (((low_x.double() - w.offset) / w.stride).floor_() + 1).clamp_(min=0) + w.dx
    row = (((low_y.double() - w.offset) / w.stride).floor_() + 1).clamp_(min=0) + w.dy
    x, y = (column * w.stride + w.offset).float(), (row * w.stride + w.offset).float()
    cost = box_cost(x, y, w.limits, here, rule)
    fits = (cost < INF) & (column < w.width) & (row < w.height) & valid[begin:end, :, None]
    at = fits.flatten().nonzero()[:, 0]
    box_index = at // len(w.dx) + begin * valid.shape[1]
    inside = (w.begin + row * w.width + column).flatten()[at].long()
    point = inside + box_index // valid.shape[1] * len(points.xy)
    return point, box_index, torch.stack((x.flatten()[at], y.flatten()[at]), -1), cost.flatten()[at]


def only_near(points: FcosPoints, boxes: Tensor, valid: Tensor, *, by_area: bool) -> bool:
    """Return whether the candidates of these CPU tensors can be enumerated."""
    total = sum(grid.width * grid.height for grid in points.grids)
    if points.xy.dtype != torch.float32 or boxes.dtype == torch.float64 or total != len(points.xy) or total == 0:
        return False
    if valid.numel() == 0:
        return False
    # A box of 10⁸ square pixels loses, by what the published heads write, to boxes that are no candidates.
    return not (by_area and bool((Box.of(widen(boxes), None).area() >= INF).logical_and_(valid).any()))


class _Plane(NamedTuple):
    """Tensors that depend on the points alone, made once: each would cost a tenth of a call."""

    x: Tensor
    y: Tensor
    stride: Tensor
    sides: Tensor
    """[P, 4]: x, y, −x, −y; less left, top, −right, −bottom it is the distances to the four sides."""
    four_strides: Tensor
    """[P, 4]."""
    scale: Tensor
    """1.414·radius·stride."""


@kept(16)
def _plane(grids: tuple[Grid, ...], radius: float) -> _Plane:
    xy, _, stride = (torch.cat(t) for t in zip(*(grid_points(g, "cpu", torch.float32) for g in grids), strict=True))
    x, y = xy.t().contiguous()
    four_strides = stride[:, None].repeat(1, 4)
    return _Plane(x, y, stride, torch.cat((xy, -xy), 1), four_strides, RELATIVE * reach_of(stride, radius))


@kept(16)
def _offsets(grids: tuple[Grid, ...], columns: int) -> Tensor:
    """Return [P, C]: x, y, and zeros for the columns that are regressed unchanged."""
    xy = torch.cat([grid_points(grid, "cpu", torch.float32)[0] for grid in grids])
    return torch.cat((xy, xy.new_zeros(len(xy), columns - 2)), 1)


_TILE = 64


def _less(base_PC: Tensor, rows_BC: Tensor) -> Tensor:
    """Return base − row of each image, [B, P, C], in loops of 64·C elements: 3-6 times as fast as in those of C."""
    (points, columns), images = base_PC.shape, len(rows_BC)
    out = base_PC.new_empty(images, points, columns)
    tiles = points // _TILE
    cut, size = tiles * _TILE, _TILE * columns
    many = out.view(images, points * columns)[:, : cut * columns].view(images, tiles, size)
    torch.sub(base_PC[:cut].view(tiles, size), rows_BC.repeat(1, _TILE)[:, None], out=many)
    torch.sub(base_PC[cut:], rows_BC[:, None], out=out[:, cut:])
    return out


def _exp(exponent: Tensor) -> Tensor:
    """Return the exponential of numbers ≤ 0, in place. Subnormal results, 30 times as slow, are 0."""
    return torch.threshold_(exponent.clamp_(min=-87).exp_(), 1.7e-38, 0)  # exp(-87) = 1.65e-38


def _first(rows_BGC: Tensor, valid: Tensor) -> Tensor:
    """Return the row of each image's first box, [B, C]."""
    return rows_BGC[torch.arange(len(valid), device=valid.device), valid.int().argmax(1)]


def _empty_images(valid: Tensor, *targets: Tensor) -> None:
    """Write zeros where an image has no box. Assigning through a mask would cost a fifth of a call."""
    for image in (~valid.any(1)).nonzero()[:, 0].tolist():
        for target in targets:
            target[image] = 0


def fcos_near(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    """Assign FCOS targets on a CPU, on regular grids."""
    dtype, boxes = gts.boxes.dtype, widen(gts.boxes)
    plane, shape = _plane(points.grids, config.radius), (len(gts.valid), len(points.xy))
    foreground = _near(points, Box.of(boxes, None), gts.valid, rule_of(config, by_distance=False))
    signed = boxes * boxes.new_tensor([1, 1, -1, -1])
    sides = _less(plane.sides, _first(signed, gts.valid))
    place = foreground.point % shape[1]
    mine = plane.sides[place] - signed.flatten(0, 1)[foreground.box]
    if config.normalize:
        sides /= plane.four_strides
        mine /= plane.four_strides[place]
    _empty_images(gts.valid, sides)
    sides.view(-1, 4).index_copy_(0, foreground.point, mine)
    centerness = sides.new_zeros(shape)
    centerness.view(-1).index_copy_(0, foreground.point, centerness_of(mine))
    labels = _spread(gts.labels, foreground, shape, config.background)
    return FcosTargets(labels, sides.to(dtype), centerness.to(dtype))


def fcos3d_near(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Assign FCOS3D targets on a CPU, on regular grids."""
    dtype, boxes, code = code.dtype, widen(gts.boxes), widen(code)
    plane, shape = _plane(points.grids, config.radius), (len(gts.valid), len(points.xy))
    foreground = _near(points, Box.of(boxes, code[..., :2]), gts.valid, rule_of(config, by_distance=True))
    # Columns that are regressed unchanged have a base of 0 and the opposite sign: 0 − (−depth).
    first = _first(code, gts.valid)
    center_x, center_y = first[:, :1], first[:, 1:2]
    targets = _less(_offsets(points.grids, code.shape[-1]), torch.cat((first[:, :2], -first[:, 2:]), 1))
    offset_x, offset_y = (
        offset.view(-1).index_copy_(0, foreground.point, mine).view(shape)
        for offset, mine in zip(
            (plane.x - center_x, plane.y - center_y),
            (foreground.xy - code.flatten(0, 1)[foreground.box, :2]).unbind(1),
            strict=True,
        )
    )
    targets.view(-1, code.shape[-1]).index_copy_(0, foreground.point, code.flatten(0, 1)[foreground.box])
    for column, offset in enumerate((offset_x, offset_y)):
        if config.normalize:
            torch.div(offset, plane.stride, out=targets[..., column])
        else:
            targets[..., column] = offset
    distance = offset_x.square_().add_(offset_y.square_()).sqrt_()
    centerness = _exp(distance.div_(plane.scale).mul_(-config.centerness_alpha))
    _empty_images(gts.valid, targets, centerness)
    labels = _spread(gts.labels, foreground, shape, config.background)
    attributes = _spread(attrs, foreground, shape, config.attr_background)
    return labels, targets.to(dtype), centerness.to(dtype), attributes


def _spread(values_BG: Tensor, foreground: _Foreground, shape: tuple[int, int], otherwise: int) -> Tensor:
    """Return values [B, P] of each point's box, and `otherwise` for background."""
    out = values_BG.new_full((shape[0] * shape[1],), otherwise)
    return out.index_copy_(0, foreground.point, values_BG.flatten()[foreground.box]).view(shape)
