# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The kernels of FCOS and FCOS3D target assignment: a program owns a block of points of one image.

It walks over boxes with the cheapest one so far in registers, then reads that box once more and writes all targets of
its points: every output element is written once, nothing else is. Its points lie in few rows of one level, and most
boxes are away from all of them: those cost 1e8 everywhere, and of them only the first counts. Which ones are near is
computed for 64 boxes at a time. A program is one warp, as all that is done for a box and not for a point is done by
each warp: on an H200 a walk over all boxes by four warps took 0.5 µs a box. fp32 within (fp64 for fp64 boxes).
Fused multiply-adds are off, and roots and divisions round as IEEE says, as torch's do on CUDA: so costs, and with them
labels, have the bits of the published head there. (On a CPU torch's own root is one unit off in 18 % of all numbers.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.fcos_targets.inputs import FcosConfig, FcosGts, FcosPoints
from accel.kernels.launching import PLANS, LaunchPlan, PlannedKernel, ceil_div

_BLOCK = 64
"""Points of a program."""
_BLOCK_3D = 32
"""The same of FCOS3D, whose targets have nine columns."""
_BOXES = 64
"""Boxes that are looked at together."""
_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def _root(x):
    """Return √x to the last bit."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _quotient(a, b):
    """Return a ÷ b to the last bit."""
    return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def _points(BLOCK: tl.constexpr):
    """Return the numbers of a program's points. The last come first: most boxes are near to those of coarse levels."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _point(xy, regress_range, stride, p, there, RADIUS: tl.constexpr, WORK: tl.constexpr):
    """Return place, range, stride and reach of the points `p`."""
    x = tl.load(xy + 2 * p, mask=there, other=0).to(WORK)
    y = tl.load(xy + 2 * p + 1, mask=there, other=0).to(WORK)
    low = tl.load(regress_range + 2 * p, mask=there, other=0).to(WORK)
    high = tl.load(regress_range + 2 * p + 1, mask=there, other=0).to(WORK)
    step = tl.load(stride + p, mask=there, other=1).to(WORK)
    # Rounded once, from fp64: what a product of Python numbers is.
    return x, y, low, high, step, (step.to(tl.float64) * RADIUS).to(WORK)


@triton.jit
def _in_range(x, y, low, high, left, top, right, bottom):
    """Tell whether the largest distance to a side lies in the point's range."""
    west, north, east, south = x - left, y - top, right - x, bottom - y
    far = tl.maximum(tl.maximum(west, east), tl.maximum(north, south))
    # A maximum may drop a NaN; the published heads' does not, and such a box fits nowhere.
    number = (west == west) & (north == north) & (east == east) & (south == south)
    return (far >= low) & (far <= high) & number


@triton.jit
def _extent(x, there):
    """Return the least and the largest of the coordinates that are there, but for NaN, which no box fits."""
    least = tl.min(tl.where(there & (x == x), x, float("inf")), 0)
    return least, tl.max(tl.where(there & (x == x), x, float("-inf")), 0)


@triton.jit
def _cheaper(least, best, cost, g):
    """Return the cheaper of two boxes and its cost; the first of those that cost alike."""
    better = (cost < least) | ((cost == least) & (g < best))
    return tl.where(better, cost, least), tl.where(better, g, best)


@triton.jit
def _first(chosen, g, G):
    """Return the least of the numbers `g` that are chosen; G if none is."""
    return tl.min(tl.where(chosen, g, G), 0)


@triton.jit
def _cost(x, y, low, high, reach, box, center, NEAREST: tl.constexpr, CENTER: tl.constexpr, WORK: tl.constexpr):
    """Return what a box costs each point, 1e8 where it does not fit: its area, or the distance to its centre."""
    left, top = tl.load(box).to(WORK), tl.load(box + 1).to(WORK)
    right, bottom = tl.load(box + 2).to(WORK), tl.load(box + 3).to(WORK)
    fits = _in_range(x, y, low, high, left, top, right, bottom)
    if NEAREST:
        center_x, center_y = tl.load(center).to(WORK), tl.load(center + 1).to(WORK)
        fits = fits & (x > center_x - reach) & (x < center_x + reach)
        fits = fits & (y > center_y - reach) & (y < center_y + reach)
        cost = _root((x - center_x) * (x - center_x) + (y - center_y) * (y - center_y))
    else:
        if CENTER:
            center_x, center_y = (left + right) * 0.5, (top + bottom) * 0.5
            low_x = tl.where(center_x - reach > left, center_x - reach, left)
            low_y = tl.where(center_y - reach > top, center_y - reach, top)
            high_x = tl.where(center_x + reach > right, right, center_x + reach)
            high_y = tl.where(center_y + reach > bottom, bottom, center_y + reach)
            fits = fits & (x > low_x) & (y > low_y) & (x < high_x) & (y < high_y)
        else:
            fits = fits & (x > left) & (y > top) & (x < right) & (y < bottom)
        cost = (right - left) * (bottom - top)
    return tl.where(fits, cost, 1e8)


@triton.jit
def _best_box(
    x, y, low, high, reach, there, boxes, centers, valid, image, G, C: tl.constexpr,
    NEAREST: tl.constexpr, CENTER: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """Return the cheapest box of each point, G where the image has none, and its cost; `centers` has rows of C."""
    west, east = _extent(x, there)
    north, south = _extent(y, there)
    furthest = tl.max(tl.where(there, reach, 0.0), 0)
    least = tl.full([BLOCK], float("inf"), WORK)
    best = tl.full([BLOCK], 0, tl.int32) + G
    first = G
    for start in range(0, G, BOXES):
        n = start + tl.arange(0, BOXES)
        here = tl.load(valid + image * G + n, mask=n < G, other=0).to(tl.int32) != 0
        # What fits lies strictly inside of each bound: rounding keeps the order of what it rounds.
        if NEAREST:
            center = centers + (image * G + n) * C
            center_x = tl.load(center, mask=here, other=0).to(WORK)
            center_y = tl.load(center + 1, mask=here, other=0).to(WORK)
            away = (east <= center_x - furthest) | (west >= center_x + furthest)
            away = away | (south <= center_y - furthest) | (north >= center_y + furthest)
        else:
            box = boxes + (image * G + n) * 4
            left, top = tl.load(box, mask=here, other=0).to(WORK), tl.load(box + 1, mask=here, other=0).to(WORK)
            right, bottom = tl.load(box + 2, mask=here, other=0).to(WORK), tl.load(box + 3, mask=here, other=0).to(WORK)
            away = (east <= left) | (west >= right) | (south <= top) | (north >= bottom)
            if CENTER:
                center_x, center_y = (left + right) * 0.5, (top + bottom) * 0.5
                away = away | (east <= center_x - furthest) | (west >= center_x + furthest)
                away = away | (south <= center_y - furthest) | (north >= center_y + furthest)
        first = tl.minimum(first, _first(here & away, n, G))
        g = _first(here & (away == 0), n, G)
        while g < G:
            at = image * G + g
            cost = _cost(x, y, low, high, reach, boxes + at * 4, centers + at * C, NEAREST, CENTER, WORK)
            least, best = _cheaper(least, best, cost, g)
            g = _first(here & (away == 0) & (n > g), n, G)
    return _cheaper(least, best, tl.where(first < G, 1e8, float("inf")).to(WORK), first)


@PlannedKernel
@triton.jit
def _fcos_kernel(
    xy,  # [P, 2]
    regress_range,  # [P, 2]
    stride,  # [P]
    boxes,  # [B, G, 4]
    gt_labels,  # [B, G]
    valid,  # [B, G]
    labels,  # [B, P]
    sides,  # [B, P, 4]
    centerness,  # [B, P]
    P,
    G,
    BACKGROUND: tl.constexpr,
    RADIUS: tl.constexpr,
    CENTER: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WORK: tl.constexpr,
    BLOCK: tl.constexpr,
    BOXES: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    p = _points(BLOCK)
    there = p < P
    x, y, low, high, step, reach = _point(xy, regress_range, stride, p, there, RADIUS, WORK)
    least, best = _best_box(
        x, y, low, high, reach, there, boxes, boxes, valid, image, G, 4, False, CENTER, WORK, BLOCK, BOXES,
    )  # fmt: skip
    has_box = there & (best < G)
    foreground = has_box & (least != 1e8)
    row = image * G + best
    label = tl.load(gt_labels + row, mask=foreground, other=BACKGROUND)
    left = x - tl.load(boxes + row * 4, mask=has_box, other=0).to(WORK)
    top = y - tl.load(boxes + row * 4 + 1, mask=has_box, other=0).to(WORK)
    right = tl.load(boxes + row * 4 + 2, mask=has_box, other=0).to(WORK) - x
    bottom = tl.load(boxes + row * 4 + 3, mask=has_box, other=0).to(WORK) - y
    if NORMALIZE:
        left, top = _quotient(left, step), _quotient(top, step)
        right, bottom = _quotient(right, step), _quotient(bottom, step)
    across = _quotient(tl.minimum(left, right), tl.where(foreground, tl.maximum(left, right), 1.0))
    along = _quotient(tl.minimum(top, bottom), tl.where(foreground, tl.maximum(top, bottom), 1.0))
    score = _root(tl.where(foreground, across * along, 0.0))
    out = image * P + p
    tl.store(labels + out, label, mask=there)
    tl.store(centerness + out, score, mask=there)
    # A point's four sides are written at once.
    four = tl.join(tl.join(left, right), tl.join(top, bottom)).reshape([BLOCK, 4])
    at = (out * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(sides + at, tl.where(has_box[:, None], four, 0.0), mask=there[:, None])


@PlannedKernel
@triton.jit
def _fcos3d_kernel(
    xy,  # [P, 2]
    regress_range,  # [P, 2]
    stride,  # [P]
    boxes,  # [B, G, 4]
    code,  # [B, G, C]: centre, depth and what is regressed as it is
    gt_labels,  # [B, G]
    gt_attributes,  # [B, G]
    valid,  # [B, G]
    labels,  # [B, P]
    targets,  # [B, P, C]
    centerness,  # [B, P]
    attributes,  # [B, P]
    P,
    G,
    C: tl.constexpr,
    BACKGROUND: tl.constexpr,
    ATTR_BACKGROUND: tl.constexpr,
    RADIUS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ALPHA: tl.constexpr,
    WORK: tl.constexpr,
    BLOCK: tl.constexpr,
    BOXES: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    p = _points(BLOCK)
    there = p < P
    x, y, low, high, step, reach = _point(xy, regress_range, stride, p, there, RADIUS, WORK)
    least, best = _best_box(
        x, y, low, high, reach, there, boxes, code, valid, image, G, C, True, True, WORK, BLOCK, BOXES,
    )  # fmt: skip
    has_box = there & (best < G)
    foreground = has_box & (least != 1e8)
    row = image * G + best
    label = tl.load(gt_labels + row, mask=foreground, other=BACKGROUND)
    attribute = tl.load(gt_attributes + row, mask=foreground, other=ATTR_BACKGROUND)
    dx = x - tl.load(code + row * C, mask=has_box, other=0).to(WORK)
    dy = y - tl.load(code + row * C + 1, mask=has_box, other=0).to(WORK)
    relative = _quotient(_root(dx * dx + dy * dy), 1.414 * reach)
    score = tl.where(has_box, tl.exp(-ALPHA * relative), 0.0)
    if NORMALIZE:
        dx, dy = _quotient(dx, step), _quotient(dy, step)
    out = image * P + p
    tl.store(labels + out, label, mask=there)
    tl.store(attributes + out, attribute, mask=there)
    tl.store(centerness + out, score, mask=there)
    # Rows of targets lie one after another: four columns at a time fill more of a sector than one.
    for from_column in tl.static_range(0, C, 4):
        column = (from_column + tl.arange(0, 4))[None, :]
        value = tl.load(code + (row * C)[:, None] + column, mask=has_box[:, None] & (column < C), other=0)
        if from_column == 0:
            moved = tl.where(column == 0, dx[:, None], dy[:, None]).to(value.dtype)
            value = tl.where((column < 2) & has_box[:, None], moved, value)
        tl.store(targets + (out * C)[:, None] + column, value, mask=there[:, None] & (column < C))


def _in_order(points: FcosPoints) -> tuple[Tensor, Tensor, Tensor]:
    return points.xy.contiguous(), points.regress_range.contiguous(), points.stride.contiguous()


def fcos(points: FcosPoints, gts: FcosGts, config: FcosConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the FCOS kernel."""
    (images, count), (total,) = gts.valid.shape, points.stride.shape
    labels = gts.labels.new_empty(images, total)
    sides, centerness = gts.boxes.new_empty(images, total, 4), gts.boxes.new_empty(images, total)
    if images == 0 or total == 0:
        return labels, sides, centerness
    _plan(images, total, count, 0, sides.dtype, config)(
        *_in_order(points),
        gts.boxes.contiguous(),
        gts.labels.contiguous(),
        gts.valid.contiguous(),
        labels,
        sides,
        centerness,
    )
    return labels, sides, centerness


def fcos3d(
    points: FcosPoints, gts: FcosGts, code: Tensor, attrs: Tensor, config: FcosConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the FCOS3D kernel."""
    (images, count), (total,) = gts.valid.shape, points.stride.shape
    labels, attributes = gts.labels.new_empty(images, total), attrs.new_empty(images, total)
    targets, centerness = code.new_empty(images, total, code.shape[-1]), code.new_empty(images, total)
    if images == 0 or total == 0:
        return labels, targets, centerness, attributes
    _plan(images, total, count, code.shape[-1], targets.dtype, config)(
        *_in_order(points),
        gts.boxes.contiguous(),
        code.contiguous(),
        gts.labels.contiguous(),
        attrs.contiguous(),
        gts.valid.contiguous(),
        labels,
        targets,
        centerness,
        attributes,
    )
    return labels, targets, centerness, attributes


@functools.lru_cache(PLANS)
def _plan(images: int, total: int, count: int, columns: int, dtype: torch.dtype, config: FcosConfig) -> LaunchPlan:
    """Return the launch for targets of so many columns: FCOS3D's, or FCOS's for 0."""
    kernel, block = (_fcos3d_kernel, _BLOCK_3D) if columns else (_fcos_kernel, _BLOCK)
    own: dict[str, Any] = {"CENTER": config.center_sampling}
    if columns:
        own = {"C": columns, "ATTR_BACKGROUND": config.attr_background, "ALPHA": config.centerness_alpha}
    return kernel.plan(
        (ceil_div(total, block), images),
        total,
        count,
        BACKGROUND=config.background,
        RADIUS=config.radius,
        NORMALIZE=config.normalize,
        WORK=tl.float64 if dtype == torch.float64 else tl.float32,
        BLOCK=block,
        BOXES=_BOXES,
        **own,
        **_ONE_WARP,
    )
