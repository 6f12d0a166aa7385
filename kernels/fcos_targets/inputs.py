"""Inputs and outputs of an FCOS assignment: types, their checks, and the cost of a box for a point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accel.profiler.errors import InvalidArgument

INF = 1e8
"""Cost of a box that is no candidate, as published: a box of a larger area loses to it."""
RELATIVE = 1.414
"""The published heads' √2 in FCOS3D's centerness."""
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
            raise InvalidArgument(
                f"FcosConfig: radius must be above 0 strides. Found: {self.radius}; 1.5 is published."
            )


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
            raise InvalidArgument(
                f"FcosPoints: strides must be whole pixels. Found: {list(strides)}. Give other points as xy tensors."
            )
        grids = tuple(Grid(h, w, int(s), float(low), float(high)) for (h, w), s, (low, high) in levels)
        parts = [grid_points(grid, device, dtype) for grid in grids]
        if not parts:
            none = torch.zeros(0, 2, device=device, dtype=dtype)
            return cls(none, none, none[:, 0])
        xy, regress_range, stride = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return cls(xy, regress_range, stride, grids)


def grid_points(grid: Grid, device: torch.device | str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
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
    """The targets of FCOS: labels [B, P], boxes [B, P, 4] (left, top, right, bottom), centerness [B, P]."""

    labels: Tensor
    boxes: Tensor
    centerness: Tensor


class Fcos3dTargets(NamedTuple):
    """The targets of FCOS3D: labels [B, P], boxes_3d [B, P, C], centerness [B, P], attr_labels [B, P]."""

    labels: Tensor
    boxes_3d: Tensor
    centerness: Tensor
    attr_labels: Tensor


class Rule(NamedTuple):
    """The rules that choose between boxes, as plain values that an op can take."""

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


def rule_of(config: FcosConfig, *, by_distance: bool) -> Rule:
    return Rule(by_distance, config.center_sampling, config.radius)


def box_cost(x: Tensor, y: Tensor, limits: tuple[Tensor, Tensor, Tensor], box: Box, rule: Rule) -> Tensor:
    """Return the cost of a box for a point, INF where it is no candidate; all arguments broadcast.

    Comparisons replace the published heads' tests of a difference's sign: the same result, also for inf and NaN.
    """
    low, high, reach = limits
    far = torch.maximum(torch.maximum(x - box.left, box.right - x), torch.maximum(y - box.top, box.bottom - y))
    low_x, low_y, high_x, high_y = region(box, reach, rule)
    fits = (far >= low) & (far <= high) & (x > low_x) & (y > low_y) & (x < high_x) & (y < high_y)
    if rule.by_distance:
        cost = torch.sqrt((x - box.center_x) ** 2 + (y - box.center_y) ** 2)
    else:
        cost = box.area()
    return torch.where(fits, cost, INF)


def region(box: Box, reach: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def reach_of(stride: Tensor, radius: float) -> Tensor:
    """Return radius·stride, rounded once, as the product of Python numbers is."""
    return (stride.double() * radius).to(stride.dtype)


def centerness_of(sides: Tensor) -> Tensor:
    left, top, right, bottom = sides.unbind(-1)
    across = torch.minimum(left, right) / torch.maximum(left, right)
    along = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    return torch.sqrt(across * along)


def widen(t: Tensor) -> Tensor:
    """Return half precision as fp32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _fits(points: FcosPoints, gts: FcosGts) -> bool:
    """Return whether all is surely right, each property read once: the checks one by one take three times as long."""
    pairs, total, device = gts.valid.shape, points.xy.shape[:1], gts.boxes.device
    return (
        len(pairs) == 2
        and points.xy.shape == (*total, 2)
        and points.regress_range.shape == (*total, 2)
        and points.stride.shape == total
        and gts.boxes.shape == (*pairs, 4)
        and gts.labels.shape == pairs
        and points.xy.device == device
        and points.regress_range.device == device
        and points.stride.device == device
        and gts.valid.device == device
        and gts.labels.device == device
        and gts.valid.dtype is torch.bool
        and gts.labels.dtype in _LABELS
        and gts.boxes.is_floating_point()
    )


def check(op: str, points: FcosPoints, gts: FcosGts) -> None:
    if _fits(points, gts):
        return
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
        raise InvalidArgument(
            f"{op}: gts.valid must be bool. Found: {gts.valid.dtype}. Compare it, e.g. arange(G) < counts."
        )
    if not gts.boxes.is_floating_point():
        raise InvalidArgument(
            f"{op}: gts.boxes must be floating. Found: {gts.boxes.dtype}. Convert them with .float()."
        )
    _check_labels(op, "gts.labels", gts.labels)


def _check_labels(op: str, name: str, labels: Tensor) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidArgument(f"{op}: {name} must be integers. Found: {labels.dtype}. Convert them with .long().")


def _fits_3d(gts: Fcos3dGts, config: FcosConfig) -> bool:
    """Return the same of what FCOS3D takes beside that."""
    pairs, device, columns = gts.valid.shape, gts.boxes.device, gts.boxes_3d.shape[-1:]
    return (
        config.center_sampling
        and gts.boxes_3d.shape == (*pairs, *columns)
        and columns[0] >= 3
        and gts.centers.shape == (*pairs, 2)
        and gts.depths.shape == pairs
        and gts.attr_labels.shape == pairs
        and gts.boxes_3d.device == device
        and gts.centers.device == device
        and gts.depths.device == device
        and gts.attr_labels.device == device
        and gts.attr_labels.dtype in _LABELS
        and gts.boxes_3d.is_floating_point()
        and gts.centers.is_floating_point()
        and gts.depths.is_floating_point()
    )


def check_3d(gts: Fcos3dGts, config: FcosConfig) -> None:
    if _fits_3d(gts, config):
        return
    pairs = gts.valid.shape
    shapes = {
        "gts.boxes_3d": (gts.boxes_3d, (*pairs, max(3, gts.boxes_3d.shape[-1]))),
        "gts.centers": (gts.centers, (*pairs, 2)),
        "gts.depths": (gts.depths, pairs),
        "gts.attr_labels": (gts.attr_labels, pairs),
    }
    _check_shapes("fcos3d_targets", shapes, gts.boxes.device)
    _check_labels("fcos3d_targets", "gts.attr_labels", gts.attr_labels)
    for name, tensor in (("gts.boxes_3d", gts.boxes_3d), ("gts.centers", gts.centers), ("gts.depths", gts.depths)):
        if not tensor.is_floating_point():
            raise InvalidArgument(
                f"fcos3d_targets: {name} must be floating. Found: {tensor.dtype}. Convert with .float()."
            )
    if not config.center_sampling:
        raise InvalidArgument(
            "fcos3d_targets: center_sampling must be True, FCOS3D is defined with it alone. Found: False. "
            "Use fcos_targets for boxes without centre sampling."
        )


def _check_shapes(op: str, shapes: dict[str, tuple[Tensor, tuple[int, ...]]], device: torch.device) -> None:
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != torch.Size(shape):
            raise InvalidArgument(
                f"{op}: {name} must be {list(shape)} with these points and gts.valid. Found: {list(tensor.shape)}. "
                "Pad the boxes of all images to one number."
            )
        if tensor.device != device:
            raise InvalidArgument(f"{op}: {name} must be on {device}, as gts.boxes. Found: {tensor.device}. Move it.")
