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
points near each box are looked at. Targets carry no gradient, so nothing is saved for backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.support import Cost, runs_triton

INF = 1e8
"""Cost of a box that is no candidate, as published: a box of a larger area loses to it."""
RELATIVE = 1.414
"""The published heads' √2 in FCOS3D's centerness."""


@dataclass(frozen=True, kw_only=True)
class FcosConfig:
    """How targets are assigned."""

    background: int
    """Label of a point without box; the published heads use the number of classes."""
    attr_background: int = -1
    """Attribute label of a point without box (FCOS3D)."""
    center_sampling: bool = True
    """Whether only points near a box's centre take it; FCOS3D needs it."""
    radius: float = 1.5
    """How near, in strides."""
    normalize: bool = True
    """Whether distances and offsets are divided by the stride (`norm_on_bbox`)."""
    centerness_alpha: float = 2.5
    """Decay of FCOS3D's centerness."""

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"FcosConfig: radius must be above 0 strides. Found: {self.radius}; 1.5 is published.")


class Grid(NamedTuple):
    """A level's points: (x·stride + stride // 2, y·stride + stride // 2), row after row."""

    height: int
    width: int
    stride: int
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class FcosPoints:
    """The points of all levels.

    Attributes:
        xy: [P, 2], floating, pixels.
        regress_range: [P, 2], of the same dtype, pixels: the least and the largest distance that a point may regress.
        stride: [P], of the same dtype, pixels.
        grids: the levels where the points are regular grids; then a CPU looks only at points near a box.
    """

    xy: Tensor
    regress_range: Tensor
    stride: Tensor
    grids: tuple[Grid, ...] = ()

    @classmethod
    def regular(
        cls,
        sizes: Sequence[tuple[int, int]],
        strides: Sequence[int],
        regress_ranges: Sequence[tuple[float, float]],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> FcosPoints:
        """Make the points of feature maps.

        Args:
            sizes: height and width of each level's map.
            strides: pixels between a level's points, whole numbers.
            regress_ranges: least and largest distance of each level, pixels.
            device: where to make them.
            dtype: of the tensors.
        """
        levels = list(zip(sizes, strides, regress_ranges, strict=True))
        if any(stride != int(stride) or stride < 1 for _, stride, _ in levels):
            raise ValueError(
                f"FcosPoints: strides must be whole pixels. Found: {list(strides)}. Give other points as xy tensors."
            )
        grids = tuple(Grid(h, w, int(s), float(low), float(high)) for (h, w), s, (low, high) in levels)
        parts = [_grid_points(grid, device, dtype) for grid in grids]
        if not parts:
            none = torch.zeros(0, 2, device=device, dtype=dtype)
            return cls(none, none, none[:, 0])
        xy, regress_range, stride = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return cls(xy, regress_range, stride, grids)


def _grid_points(grid: Grid, device: torch.device | str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    axes = (torch.arange(n, device=device) * grid.stride + grid.stride // 2 for n in (grid.height, grid.width))
    y, x = torch.meshgrid(*axes, indexing="ij")
    xy = torch.stack((x, y), -1).reshape(-1, 2).to(dtype)
    return xy, xy.new_tensor([grid.low, grid.high]).expand_as(xy), xy.new_full((len(xy),), grid.stride)


@dataclass(frozen=True, eq=False)
class FcosGts:
    """The boxes of a batch, padded to the same number.

    Attributes:
        boxes: [B, G, 4], floating, pixels: left, top, right, bottom.
        labels: [B, G], integers.
        valid: [B, G], bool: which are boxes. What stands elsewhere is not used, whatever it is.
    """

    boxes: Tensor
    labels: Tensor
    valid: Tensor


@dataclass(frozen=True, eq=False)
class Fcos3dGts(FcosGts):
    """The 3D boxes of a batch, padded to the same number.

    Attributes:
        boxes_3d: [B, G, C], C ≥ 3, floating: position, then what is regressed as it is (size, yaw, velocity).
        centers: [B, G, 2], pixels: the 3D centre on the image.
        depths: [B, G]: its distance.
        attr_labels: [B, G], integers.
    """

    boxes_3d: Tensor
    centers: Tensor
    depths: Tensor
    attr_labels: Tensor


class FcosTargets(NamedTuple):
    """What FCOS learns: labels [B, P], boxes [B, P, 4] (left, top, right, bottom), centerness [B, P]."""

    labels: Tensor
    boxes: Tensor
    centerness: Tensor


class Fcos3dTargets(NamedTuple):
    """What FCOS3D learns: labels [B, P], boxes_3d [B, P, C], centerness [B, P], attr_labels [B, P]."""

    labels: Tensor
    boxes_3d: Tensor
    centerness: Tensor
    attr_labels: Tensor


class Rule(NamedTuple):
    """What decides between boxes, in plain values that an op can take."""

    by_distance: bool
    center_sampling: bool
    radius: float


class Box(NamedTuple):
    """Boxes and the centres of their regions, all of one shape."""

    left: Tensor
    top: Tensor
    right: Tensor
    bottom: Tensor
    center_x: Tensor
    center_y: Tensor

    @classmethod
    def of(cls, boxes: Tensor, centers: Tensor | None) -> Box:
        """Split [B, G, 4] into [B, G]; without centres, those of the boxes are meant."""
        left, top, right, bottom = boxes.unbind(-1)
        if centers is None:
            return cls(left, top, right, bottom, (left + right) / 2, (top + bottom) / 2)
        return cls(left, top, right, bottom, *centers.unbind(-1))

    def area(self) -> Tensor:
        """Return their areas."""
        return (self.right - self.left) * (self.bottom - self.top)

    def over_points(self) -> Box:
        """Return them as [B, G, 1]."""
        return Box(*(side[..., None] for side in self))


# The search: what a box costs a point, and the cheapest box of each point


def _cost(x: Tensor, y: Tensor, limits: tuple[Tensor, Tensor, Tensor], box: Box, rule: Rule) -> Tensor:
    """Return what it costs a point to take a box, INF where it can't; all arguments broadcast.

    Comparisons stand where the published heads look at the sign of a difference: the same, also for inf and NaN.
    """
    low, high, reach = limits
    far = torch.maximum(torch.maximum(x - box.left, box.right - x), torch.maximum(y - box.top, box.bottom - y))
    low_x, low_y, high_x, high_y = _region(box, reach, rule)
    fits = (far >= low) & (far <= high) & (x > low_x) & (y > low_y) & (x < high_x) & (y < high_y)
    if rule.by_distance:
        cost = torch.sqrt((x - box.center_x) ** 2 + (y - box.center_y) ** 2)
    else:
        cost = box.area()
    return torch.where(fits, cost, INF)


def _region(box: Box, reach: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the edges within which points take the box."""
    if not (rule.by_distance or rule.center_sampling):
        return box.left, box.top, box.right, box.bottom
    low_x, low_y = box.center_x - reach, box.center_y - reach
    high_x, high_y = box.center_x + reach, box.center_y + reach
    if rule.by_distance:
        return low_x, low_y, high_x, high_y
    # Not maximum(): a box from -inf to inf has no centre, and the published head then takes the box.
    return (
        torch.where(low_x > box.left, low_x, box.left),
        torch.where(low_y > box.top, low_y, box.top),
        torch.where(high_x > box.right, box.right, high_x),
        torch.where(high_y > box.bottom, box.bottom, high_y),
    )


def _reach(stride: Tensor, radius: float) -> Tensor:
    """Return radius·stride, rounded once, as the product of Python numbers is."""
    return (stride.double() * radius).to(stride.dtype)


def _search(points: FcosPoints, box: Box, valid: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the best box [B, P] of each point, and whether it is a candidate."""
    x, y = points.xy.unbind(-1)
    low, high = points.regress_range.unbind(-1)
    limits = low, high, _reach(points.stride, rule.radius)
    images, count = valid.shape
    least = x.new_full((images, len(x)), math.inf)
    best = torch.zeros_like(least, dtype=torch.int64)
    for g in range(count):
        cost = _cost(x, y, limits, Box(*(side[:, g, None] for side in box)), rule)
        better = (cost < least) & valid[:, g, None]
        least = torch.where(better, cost, least)
        best = torch.where(better, g, best)
    return best, (least != INF) & valid.any(1, keepdim=True)


def fcos_targets_ref(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    """Assign FCOS targets in plain torch, for any points, without looking at a value from the host."""
    dtype = gts.boxes.dtype
    points, gts = _widened(points), FcosGts(_wide(gts.boxes), gts.labels, gts.valid)
    if gts.valid.shape[1] == 0:
        return _no_boxes(points, gts, config, dtype)
    best, found = _search(points, Box.of(gts.boxes, None), gts.valid, _rule(config, by_distance=False))
    labels = torch.where(found, gts.labels.gather(1, best), config.background)
    left, top, right, bottom = _rows(gts.boxes, best).unbind(-1)
    x, y = points.xy.unbind(-1)
    sides = torch.stack((x - left, y - top, right - x, bottom - y), -1)
    if config.normalize:
        sides = sides / points.stride[:, None]
    sides = torch.where(gts.valid.any(1)[:, None, None], sides, 0)
    return FcosTargets(labels, sides.to(dtype), torch.where(found, _centerness(sides), 0).to(dtype))


def fcos3d_targets_ref(points: FcosPoints, gts: Fcos3dGts, config: FcosConfig) -> Fcos3dTargets:
    """Assign FCOS3D targets in plain torch, for any points, without looking at a value from the host."""
    return Fcos3dTargets(*_fcos3d_ref(points, FcosGts(gts.boxes, gts.labels, gts.valid), *_codes(gts), config))


def _fcos3d_ref(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    points, boxes, wide = _widened(points), _wide(gts.boxes), _wide(code)
    if gts.valid.shape[1] == 0:
        none = _no_boxes(points, gts, config, code.dtype)
        targets = code.new_zeros(*none.labels.shape, code.shape[-1])
        return none.labels, targets, none.centerness, torch.full_like(none.labels, config.attr_background)
    best, found = _search(points, Box.of(boxes, wide[..., :2]), gts.valid, _rule(config, by_distance=True))
    some = gts.valid.any(1)[:, None]
    picked = _rows(wide, best)
    offset = points.xy - picked[..., :2]
    distance = torch.sqrt(torch.sum(offset**2, -1))
    relative = distance / (RELATIVE * _reach(points.stride, config.radius))
    centerness = torch.where(some, torch.exp(-config.centerness_alpha * relative), 0)
    if config.normalize:
        offset = offset / points.stride[:, None]
    targets = torch.where(some[..., None], torch.cat((offset, picked[..., 2:]), -1), 0)
    labels = torch.where(found, gts.labels.gather(1, best), config.background)
    attributes = torch.where(found, attrs.gather(1, best), config.attr_background)
    return labels, targets.to(code.dtype), centerness.to(code.dtype), attributes


def _rule(config: FcosConfig, *, by_distance: bool) -> Rule:
    return Rule(by_distance, config.center_sampling, config.radius)


def _codes(gts: Fcos3dGts) -> tuple[Tensor, Tensor]:
    """Return what is regressed, [B, G, C]: centre, depth and the box's columns from the fourth on; and attributes."""
    return torch.cat((gts.centers, gts.depths[..., None], gts.boxes_3d[..., 3:]), -1), gts.attr_labels


def _wide(t: Tensor) -> Tensor:
    """Return half precision as fp32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _widened(points: FcosPoints) -> FcosPoints:
    return FcosPoints(_wide(points.xy), _wide(points.regress_range), _wide(points.stride), points.grids)


def _rows(t_BGC: Tensor, best_BP: Tensor) -> Tensor:
    return t_BGC.gather(1, best_BP[..., None].expand(-1, -1, t_BGC.shape[-1]))


def _centerness(sides: Tensor) -> Tensor:
    left, top, right, bottom = sides.unbind(-1)
    across = torch.minimum(left, right) / torch.maximum(left, right)
    along = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    return torch.sqrt(across * along)


def _no_boxes(points: FcosPoints, gts: FcosGts, config: FcosConfig, dtype: torch.dtype) -> FcosTargets:
    shape = len(gts.valid), len(points.xy)
    zeros = gts.boxes.new_zeros(*shape, 4, dtype=dtype)
    return FcosTargets(gts.labels.new_full(shape, config.background), zeros, zeros[..., 0].clone())


# A CPU's way: only the points near each box


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


@functools.lru_cache(maxsize=16)
def _windows(grids: tuple[Grid, ...], rule: Rule) -> _Windows:
    columns = []
    begin = 0
    for grid in grids:
        reach = float(_reach(torch.tensor(float(grid.stride)), rule.radius))
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
    table = torch.tensor(columns, dtype=torch.float64).view(-1, 10)
    dx, dy, stride, offset, width, height, place = table[:, :7].t().contiguous()
    low, high, reach_K = table[:, 7:].t().float().contiguous()
    return _Windows(dx, dy, stride, offset, width, height, place, (low, high, reach_K))


class _Taken(NamedTuple):
    """Foreground, a row a point: its place in [B·P], its box in [B·G], where it lies."""

    point: Tensor
    box: Tensor
    xy: Tensor


def _near(points: FcosPoints, box: Box, valid: Tensor, rule: Rule) -> _Taken:
    """Return what `_search` finds, from the candidates alone.

    A key holds the bits of the cost, which order as the cost does since it is never negative, above the box's number:
    the least key of a point is the cheapest box, the lowest of equals, in whatever order the keys are compared.
    """
    found = [_candidates(points, box, valid, rule, begin, end) for begin, end in _chunks(valid, points.grids, rule)]
    point, taken, xy, cost = (torch.cat(parts) for parts in zip(*found, strict=True))
    key = (cost.view(torch.int32).long() << 32) | taken
    least = key.new_full((len(valid) * len(points.xy),), torch.iinfo(torch.int64).max)
    won = least.scatter_reduce_(0, point, key, "amin")[point] == key
    return _Taken(point[won], taken[won], xy[won])


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
    low_x, low_y, _, _ = _region(here, w.limits[2], rule)
    # In fp64: an edge just below a point, by one fp32 step, must not be rounded onto it.
    column = (((low_x.double() - w.offset) / w.stride).floor_() + 1).clamp_(min=0) + w.dx
    row = (((low_y.double() - w.offset) / w.stride).floor_() + 1).clamp_(min=0) + w.dy
    x, y = (column * w.stride + w.offset).float(), (row * w.stride + w.offset).float()
    cost = _cost(x, y, w.limits, here, rule)
    fits = (cost < INF) & (column < w.width) & (row < w.height) & valid[begin:end, :, None]
    at = fits.flatten().nonzero()[:, 0]
    taken = at // len(w.dx) + begin * valid.shape[1]
    inside = (w.begin + row * w.width + column).flatten()[at].long()
    point = inside + taken // valid.shape[1] * len(points.xy)
    return point, taken, torch.stack((x.flatten()[at], y.flatten()[at]), -1), cost.flatten()[at]


def _only_near(points: FcosPoints, boxes: Tensor, valid: Tensor, *, by_area: bool) -> bool:
    """Tell whether the candidates of these CPU tensors can be enumerated."""
    total = sum(grid.width * grid.height for grid in points.grids)
    if points.xy.dtype != torch.float32 or boxes.dtype == torch.float64 or total != len(points.xy) or total == 0:
        return False
    if valid.numel() == 0:
        return False
    # A box of 10⁸ square pixels loses, by what the published heads write, to boxes that are no candidates.
    return not (by_area and bool((Box.of(_wide(boxes), None).area() >= INF).logical_and_(valid).any()))


class _Plane(NamedTuple):
    """What depends on the points alone, made once: each of these would cost a tenth of a call."""

    x: Tensor
    y: Tensor
    stride: Tensor
    sides: Tensor
    """[P, 4]: x, y, −x, −y; less left, top, −right, −bottom it is the distances to the four sides."""
    four_strides: Tensor
    """[P, 4]."""
    scale: Tensor
    """1.414·radius·stride."""


@functools.lru_cache(maxsize=16)
def _plane(grids: tuple[Grid, ...], radius: float) -> _Plane:
    xy, _, stride = (torch.cat(t) for t in zip(*(_grid_points(g, "cpu", torch.float32) for g in grids), strict=True))
    x, y = xy.t().contiguous()
    four_strides = stride[:, None].repeat(1, 4)
    return _Plane(x, y, stride, torch.cat((xy, -xy), 1), four_strides, RELATIVE * _reach(stride, radius))


@functools.lru_cache(maxsize=16)
def _offsets(grids: tuple[Grid, ...], columns: int) -> Tensor:
    """Return [P, C]: x, y, and zeros for what is regressed as it is."""
    xy = torch.cat([_grid_points(grid, "cpu", torch.float32)[0] for grid in grids])
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
    return rows_BGC[torch.arange(len(valid)), valid.int().argmax(1)]


def _empty_images(valid: Tensor, *targets: Tensor) -> None:
    """Put zeros where an image has no box. Assigning through a mask would cost a fifth of a call."""
    for image in (~valid.any(1)).nonzero()[:, 0].tolist():
        for target in targets:
            target[image] = 0


def _fcos_near(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    """Assign FCOS targets on a CPU, on regular grids."""
    dtype, boxes = gts.boxes.dtype, _wide(gts.boxes)
    plane, shape = _plane(points.grids, config.radius), (len(gts.valid), len(points.xy))
    taken = _near(points, Box.of(boxes, None), gts.valid, _rule(config, by_distance=False))
    signed = boxes * boxes.new_tensor([1, 1, -1, -1])
    sides = _less(plane.sides, _first(signed, gts.valid))
    place = taken.point % shape[1]
    mine = plane.sides[place] - signed.flatten(0, 1)[taken.box]
    if config.normalize:
        sides /= plane.four_strides
        mine /= plane.four_strides[place]
    _empty_images(gts.valid, sides)
    sides.view(-1, 4).index_copy_(0, taken.point, mine)
    centerness = sides.new_zeros(shape)
    centerness.view(-1).index_copy_(0, taken.point, _centerness(mine))
    labels = _spread(gts.labels, taken, shape, config.background)
    return FcosTargets(labels, sides.to(dtype), centerness.to(dtype))


def _fcos3d_near(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Assign FCOS3D targets on a CPU, on regular grids."""
    dtype, boxes, code = code.dtype, _wide(gts.boxes), _wide(code)
    plane, shape = _plane(points.grids, config.radius), (len(gts.valid), len(points.xy))
    taken = _near(points, Box.of(boxes, code[..., :2]), gts.valid, _rule(config, by_distance=True))
    # What is regressed as it is has a base of 0, and the other sign: 0 − (−depth).
    first = _first(code, gts.valid)
    center_x, center_y = first[:, :1], first[:, 1:2]
    targets = _less(_offsets(points.grids, code.shape[-1]), torch.cat((first[:, :2], -first[:, 2:]), 1))
    offset_x, offset_y = (
        offset.view(-1).index_copy_(0, taken.point, mine).view(shape)
        for offset, mine in zip(
            (plane.x - center_x, plane.y - center_y),
            (taken.xy - code.flatten(0, 1)[taken.box, :2]).unbind(1),
            strict=True,
        )
    )
    targets.view(-1, code.shape[-1]).index_copy_(0, taken.point, code.flatten(0, 1)[taken.box])
    for column, offset in enumerate((offset_x, offset_y)):
        if config.normalize:
            torch.div(offset, plane.stride, out=targets[..., column])
        else:
            targets[..., column] = offset
    distance = offset_x.square_().add_(offset_y.square_()).sqrt_()
    centerness = _exp(distance.div_(plane.scale).mul_(-config.centerness_alpha))
    _empty_images(gts.valid, targets, centerness)
    labels = _spread(gts.labels, taken, shape, config.background)
    attributes = _spread(attrs, taken, shape, config.attr_background)
    return labels, targets.to(dtype), centerness.to(dtype), attributes


def _spread(values_BG: Tensor, taken: _Taken, shape: tuple[int, int], otherwise: int) -> Tensor:
    """Return values [B, P] of the box taken, and `otherwise` where none is."""
    out = values_BG.new_full((shape[0] * shape[1],), otherwise)
    return out.index_copy_(0, taken.point, values_BG.flatten()[taken.box]).view(shape)


# The ops: which path, and what torch.compile sees of it


def _fcos(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> FcosTargets:
    if runs_triton(gts.boxes):
        from accel.kernels import fcos_targets_triton

        return FcosTargets(*fcos_targets_triton.fcos(points, gts, config))
    if gts.boxes.device.type == "cpu" and _only_near(points, gts.boxes, gts.valid, by_area=True):
        return _fcos_near(points, gts, config)
    return fcos_targets_ref(points, gts, config)


def _fcos3d(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(gts.boxes):
        from accel.kernels import fcos_targets_triton

        return fcos_targets_triton.fcos3d(points, gts, code, attrs, config)
    if gts.boxes.device.type == "cpu" and _only_near(points, code, gts.valid, by_area=False):
        return _fcos3d_near(points, gts, code, attrs, config)
    return _fcos3d_ref(points, gts, code, attrs, config)


def _flat_grids(points: FcosPoints) -> list[float]:
    return [float(value) for grid in points.grids for value in grid]


def _points(xy: Tensor, regress_range: Tensor, stride: Tensor, grids: Sequence[float]) -> FcosPoints:
    rows = [grids[i : i + 5] for i in range(0, len(grids), 5)]
    return FcosPoints(
        xy, regress_range, stride, tuple(Grid(int(h), int(w), int(s), low, high) for h, w, s, low, high in rows)
    )


@torch.library.custom_op("accel::fcos_targets", mutates_args=())
def _fcos_op(
    xy: Tensor, regress_range: Tensor, stride: Tensor, grids: Sequence[float], boxes: Tensor, labels: Tensor,
    valid: Tensor, background: int, center_sampling: bool, radius: float, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    config = FcosConfig(background=background, center_sampling=center_sampling, radius=radius, normalize=normalize)
    return _fcos(_points(xy, regress_range, stride, grids), FcosGts(boxes, labels, valid), config)


@_fcos_op.register_fake
def _(
    xy: Tensor, regress_range: Tensor, stride: Tensor, grids: Sequence[float], boxes: Tensor, labels: Tensor,
    valid: Tensor, background: int, center_sampling: bool, radius: float, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = valid.shape[0], xy.shape[0]
    return labels.new_empty(shape), boxes.new_empty(*shape, 4), boxes.new_empty(shape)


@torch.library.custom_op("accel::fcos3d_targets", mutates_args=())
def _fcos3d_op(
    xy: Tensor, regress_range: Tensor, stride: Tensor, grids: Sequence[float], boxes: Tensor, labels: Tensor,
    valid: Tensor, code: Tensor, attrs: Tensor, background: int, attr_background: int, radius: float,
    normalize: bool, centerness_alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    config = FcosConfig(
        background=background,
        attr_background=attr_background,
        radius=radius,
        normalize=normalize,
        centerness_alpha=centerness_alpha,
    )
    points, gts = _points(xy, regress_range, stride, grids), FcosGts(boxes, labels, valid)
    return _fcos3d(points, gts, code, attrs, config)


@_fcos3d_op.register_fake
def _(
    xy: Tensor, regress_range: Tensor, stride: Tensor, grids: Sequence[float], boxes: Tensor, labels: Tensor,
    valid: Tensor, code: Tensor, attrs: Tensor, background: int, attr_background: int, radius: float,
    normalize: bool, centerness_alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape = valid.shape[0], xy.shape[0]
    targets, centerness = code.new_empty(*shape, code.shape[-1]), code.new_empty(shape)
    return labels.new_empty(shape), targets, centerness, attrs.new_empty(shape)


# The public functions


@torch.no_grad()
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
    _check("fcos_targets", points, gts)
    if not torch.compiler.is_compiling():
        return _fcos(points, gts, config)
    where = points.xy, points.regress_range, points.stride, _flat_grids(points)
    how = config.background, config.center_sampling, config.radius, config.normalize
    return FcosTargets(*_fcos_op(*where, gts.boxes, gts.labels, gts.valid, *how))


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
    _check("fcos3d_targets", points, gts)
    _check_3d(gts, config)
    code, attrs = _codes(gts)
    if not torch.compiler.is_compiling():
        return Fcos3dTargets(*_fcos3d(points, FcosGts(gts.boxes, gts.labels, gts.valid), code, attrs, config))
    where = points.xy, points.regress_range, points.stride, _flat_grids(points)
    how = config.background, config.attr_background, config.radius, config.normalize, config.centerness_alpha
    return Fcos3dTargets(*_fcos3d_op(*where, gts.boxes, gts.labels, gts.valid, code, attrs, *how))


def _check(op: str, points: FcosPoints, gts: FcosGts) -> None:
    total, pairs = points.xy.shape[0], gts.valid.shape
    shapes = {
        "points.xy": (points.xy, (total, 2)),
        "points.regress_range": (points.regress_range, (total, 2)),
        "points.stride": (points.stride, (total,)),
        "gts.valid": (gts.valid, (*pairs[:1], *pairs[1:2])),
        "gts.boxes": (gts.boxes, (*pairs, 4)),
        "gts.labels": (gts.labels, pairs),
    }
    _check_shapes(op, shapes, gts.boxes.device)
    if gts.valid.dtype != torch.bool:
        raise ValueError(
            f"{op}: gts.valid must be bool. Found: {gts.valid.dtype}. Compare it, e.g. arange(G) < counts."
        )
    if not gts.boxes.is_floating_point():
        raise ValueError(f"{op}: gts.boxes must be floating. Found: {gts.boxes.dtype}. Convert them with .float().")


def _check_3d(gts: Fcos3dGts, config: FcosConfig) -> None:
    pairs = gts.valid.shape
    shapes = {
        "gts.boxes_3d": (gts.boxes_3d, (*pairs, max(3, gts.boxes_3d.shape[-1]))),
        "gts.centers": (gts.centers, (*pairs, 2)),
        "gts.depths": (gts.depths, pairs),
        "gts.attr_labels": (gts.attr_labels, pairs),
    }
    _check_shapes("fcos3d_targets", shapes, gts.boxes.device)
    if not config.center_sampling:
        raise ValueError(
            "fcos3d_targets: center_sampling must be True, FCOS3D is defined with it alone. Found: False. "
            "Use fcos_targets for boxes without centre sampling."
        )


def _check_shapes(op: str, shapes: dict[str, tuple[Tensor, tuple[int, ...]]], device: torch.device) -> None:
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != torch.Size(shape):
            raise ValueError(
                f"{op}: {name} must be {list(shape)} with these points and gts.valid. Found: {list(tensor.shape)}. "
                "Pad the boxes of all images to one number."
            )
        if tensor.device != device:
            raise ValueError(f"{op}: {name} must be on {device}, as gts.boxes. Found: {tensor.device}. Move it.")


def cost(images: int, points: int, boxes: int, columns: int = 4, itemsize: int = 4) -> Cost:
    """Return what a call must do at least, on a device that looks at every pair of point and box.

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
