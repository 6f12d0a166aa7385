"""SimOTA on a GPU: five kernels from the predictions to the assignment, in fixed shapes, without a [B, G, A] tensor.

What they compute stands in simota.py. Shapes: B images, A anchors, G ground truths, C classes, K = 16 places for the
cheapest anchors of a ground truth, of which the rules use `topk`.

    near       [B, A]     is an anchor near any ground truth (not run where the caller gives the candidates)
    list       [B, A]     the candidates, in order; [B] how many
    absent     [B, A]     sum_c log(1 - p_c) of the candidates
    match      [B, G]     one program per ground truth: its cheapest k candidates -> takers [B, A], counted atomically
    resolve    [B, A]     who was taken by several goes to the cheapest of all

The lists are read up to lengths that stay on the device. Atomics add and take the largest of integers: every run gives
the same bits. Costs of a pair are computed where they are needed, twice at most, and not stored.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from accel.kernels.launching import PlannedKernel, ceil_div, next_power_of_2
from accel.kernels.simota.inputs import INF_BITS, Anchors, Assignment, Rules, Truths

_BLOCK = 256
_REGIONS = {"center": 0, "box": 1, "given": 2}
_INF_BITS = tl.constexpr(INF_BITS)
_LEAST = tl.constexpr(-(2**63))
_MOST = tl.constexpr(2**63 - 1)


@triton.jit
def _log(x):
    # Without a logarithm of 0, at which the interpreter warns.
    return tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), float("-inf"))


@triton.jit
def _log1p(x):
    # tl has no log1p; this is right to a few units in the last place (Kahan), log(1 + x) alone is not.
    u = 1.0 + x
    return tl.where(u == 1.0, x, _log(u) * tl.math.div_rn(x, tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _sigmoid(x):
    # exp(-x) overflows beyond -88.7228, to a sigmoid of 0. div_rn rounds as the plain path does.
    safe = tl.maximum(x.to(tl.float32), -88.7228)
    return tl.where(x < -88.7228, 0.0, tl.math.div_rn(1.0 + tl.zeros_like(safe), 1.0 + tl.exp(-safe)))


@triton.jit
def _probability(cls, obj, HAS_OBJ: tl.constexpr):
    if HAS_OBJ:
        p = tl.math.sqrt_rn(_sigmoid(cls) * _sigmoid(obj))
    else:
        p = cls.to(tl.float32)
    return p


@triton.jit
def _region(x, y, reach, gl, gt, gr, gb, gx, gy, REGION: tl.constexpr):
    # Whether an anchor is near a ground truth, and in its region.
    near = (x > gx - reach) & (x < gx + reach) & (y > gy - reach) & (y < gy + reach)
    inside = near
    if REGION == 1:
        within = (x > gl) & (x < gr) & (y > gt) & (y < gb)
        inside = near & within
        near = near | within
    return near, inside


@triton.jit
def _iou(boxes_ptr, at, stride, ok, gl, gt, gr, gb, garea, union_eps):
    left = tl.load(boxes_ptr + at, mask=ok, other=0.0)
    top = tl.load(boxes_ptr + stride + at, mask=ok, other=0.0)
    right = tl.load(boxes_ptr + 2 * stride + at, mask=ok, other=0.0)
    bottom = tl.load(boxes_ptr + 3 * stride + at, mask=ok, other=0.0)
    area = tl.load(boxes_ptr + 4 * stride + at, mask=ok, other=0.0)
    width = tl.maximum(tl.minimum(gr, right) - tl.maximum(gl, left), 0.0)
    height = tl.maximum(tl.minimum(gb, bottom) - tl.maximum(gt, top), 0.0)
    both = width * height
    return tl.math.div_rn(both, tl.maximum(garea + area - both, union_eps))


@triton.jit
def _keys(
    cls_ptr, obj_ptr, absent_ptr, cells_ptr, at, row, stride, ok, iou, label, gl, gt, gr, gb, gx, gy,
    cls_weight, iou_weight, log_eps,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    # The costs as integers of the same order, negative in the region.
    obj = iou
    if HAS_OBJ:
        obj = tl.load(obj_ptr + at, mask=ok, other=0.0)
    p = _probability(tl.load(cls_ptr + at * row + label, mask=ok, other=0.0), obj, HAS_OBJ)
    # 0 - log p, and no IoU above 1 makes a cost negative: its sign bit is the region's.
    own = 0.0 - tl.maximum(_log(p), -100.0)
    others = tl.maximum(tl.maximum(_log1p(-p), -100.0) - tl.load(absent_ptr + at, mask=ok, other=0.0), 0.0)
    price = tl.maximum((own + others) * cls_weight - iou_weight * _log(iou + log_eps), 0.0)
    keys = price.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if REGION != 2:
        x = tl.load(cells_ptr + at, mask=ok, other=0.0)
        y = tl.load(cells_ptr + stride + at, mask=ok, other=0.0)
        reach = tl.load(cells_ptr + 2 * stride + at, mask=ok, other=0.0)
        _, inside = _region(x, y, reach, gl, gt, gr, gb, gx, gy, REGION)
        keys = tl.where(inside, keys | -0x80000000, keys)
    return tl.where(ok, keys, 0x7FFFFFFF)


@triton.jit
def _truth(gts_ptr, at, stride):
    # left, top, right, bottom, area, x, y of one ground truth.
    return (
        tl.load(gts_ptr + at), tl.load(gts_ptr + stride + at), tl.load(gts_ptr + 2 * stride + at),
        tl.load(gts_ptr + 3 * stride + at), tl.load(gts_ptr + 4 * stride + at), tl.load(gts_ptr + 5 * stride + at),
        tl.load(gts_ptr + 6 * stride + at),
    )  # fmt: skip


@PlannedKernel
@triton.jit
def _near_kernel(
    cells_ptr,  # [3, B, A] fp32: x, y, reach
    gts_ptr,  # [7, B, G] fp32
    near_ptr,  # [B, A] int8, written
    B, A, G,
    REGION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < A
    at = image * A + cols
    x = tl.load(cells_ptr + at, mask=ok, other=float("inf"))
    y = tl.load(cells_ptr + B * A + at, mask=ok, other=float("inf"))
    reach = tl.load(cells_ptr + 2 * B * A + at, mask=ok, other=0.0)
    is_candidate = tl.zeros([BLOCK], tl.int32)
    for g in range(G):
        gl, gt, gr, gb, _, gx, gy = _truth(gts_ptr, image * G + g, B * G)
        near, _ = _region(x, y, reach, gl, gt, gr, gb, gx, gy, REGION)
        is_candidate = is_candidate | near.to(tl.int32)
    tl.store(near_ptr + at, is_candidate.to(tl.int8), mask=ok)


@PlannedKernel
@triton.jit
def _list_kernel(
    near_ptr,  # [B, A] int8
    list_ptr,  # [B, A] int32, written up to the length
    length_ptr,  # [B] int32, written
    A,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    count = tl.zeros([], tl.int32)
    for start in range(0, A, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        near = tl.load(near_ptr + image * A + cols, mask=cols < A, other=0).to(tl.int32)
        place = count + tl.cumsum(near, 0) - 1
        tl.store(list_ptr + image * A + place, cols, mask=near > 0)
        count += tl.sum(near, 0)
    tl.store(length_ptr + image, count)


@PlannedKernel
@triton.jit
def _absent_kernel(
    cls_ptr,  # [B, A, C], `row` from anchor to anchor
    obj_ptr,  # [B, A]
    list_ptr,  # [B, A] int32
    length_ptr,  # [B] int32
    absent_ptr,  # [B, A] fp32, written for the candidates
    A, row,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok = rows < tl.load(length_ptr + image)
    at = image * A + tl.load(list_ptr + image * A + rows, mask=ok, other=0)
    obj = tl.zeros([ROWS], tl.float32)
    if HAS_OBJ:
        obj = tl.load(obj_ptr + at, mask=ok, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, C, BLOCK_C):
        classes = start + tl.arange(0, BLOCK_C)
        in_range = ok[:, None] & (classes < C)[None, :]
        p = _probability(
            tl.load(cls_ptr + at[:, None] * row + classes[None, :], mask=in_range, other=0.0), obj[:, None], HAS_OBJ
        )
        total += tl.sum(tl.where(in_range, tl.maximum(_log1p(-p), -100.0), 0.0), 1)
    tl.store(absent_ptr + at, total, mask=ok)


@triton.jit
def _smallest(best, keys, TOPK: tl.constexpr, LARGEST_FILL: tl.constexpr):
    # The smallest TOPK of `best` [16] and `keys` [BLOCK]; no two keys are equal, but those that fill.
    place = tl.arange(0, 16)
    for _ in range(TOPK):
        least = tl.min(keys, 0)
        worst = tl.max(tl.where(place < TOPK, best, _LEAST), 0)
        keys = tl.where(keys == least, LARGEST_FILL, keys)
        # Of several that fill, only the first gives way.
        first = tl.min(tl.where((best == worst) & (place < TOPK), place, 16), 0)
        best = tl.where((place == first) & (least < worst), least, best)
    return best


@PlannedKernel
@triton.jit
def _match_kernel(
    boxes_ptr,  # [5, B, A] fp32: left, top, right, bottom, area
    cls_ptr,  # [B, A, C], `row` from anchor to anchor
    obj_ptr,  # [B, A]
    absent_ptr,  # [B, A] fp32
    cells_ptr,  # [3, B, A] fp32
    gts_ptr,  # [7, B, G] fp32
    labels_ptr,  # [B, G] int64, C where padded
    list_ptr,  # [B, A] int32
    length_ptr,  # [B] int32
    takers_ptr,  # [B, A] int32, added to
    taker_ptr,  # [B, A] int32, the largest taker is kept
    B, A, G, row, cls_weight, iou_weight, log_eps, union_eps,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, REGION: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    label = tl.load(labels_ptr + image * G + g)
    length = tl.where(label < C, tl.load(length_ptr + image), 0)
    gl, gt, gr, gb, garea, gx, gy = _truth(gts_ptr, image * G + g, B * G)
    best = tl.full([16], _MOST, tl.int64)
    most = tl.full([16], _MOST, tl.int64)
    for start in range(0, length, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        ok = rows < length
        anchors = tl.load(list_ptr + image * A + rows, mask=ok, other=0)
        at = image * A + anchors
        iou = _iou(boxes_ptr, at, B * A, ok, gl, gt, gr, gb, garea, union_eps)
        keys = _keys(
            cls_ptr, obj_ptr, absent_ptr, cells_ptr, at, row, B * A, ok, iou, label, gl, gt, gr, gb, gx, gy,
            cls_weight, iou_weight, log_eps, C, HAS_OBJ, REGION,
        )  # fmt: skip
        best = _smallest(best, tl.where(ok, (keys.to(tl.int64) << 32) | anchors.to(tl.int64), _MOST), TOPK, _MOST)
        # The largest IoUs are the smallest of the negated bits.
        bits = -(iou.to(tl.int32, bitcast=True).to(tl.int64))
        most = _smallest(most, tl.where(ok, (bits << 32) | anchors.to(tl.int64), _MOST), TOPK, _MOST)
    ious = (-(most >> 32)).to(tl.int32).to(tl.float32, bitcast=True)
    total = tl.sum(tl.where(most < _MOST, ious, 0.0), 0)
    k = tl.minimum(tl.maximum(total.to(tl.int32), 1), TOPK)
    # A key's rank: how many are smaller.
    rank = tl.sum((best[None, :] < best[:, None]).to(tl.int32), 1)
    is_taken = (rank < k) & ((best >> 32) < _INF_BITS)
    at = image * A + tl.where(is_taken, best & 0xFFFFFFFF, 0)
    tl.atomic_add(takers_ptr + at, 1, mask=is_taken)
    tl.atomic_max(taker_ptr + at, g, mask=is_taken)


@PlannedKernel
@triton.jit
def _resolve_kernel(
    boxes_ptr,  # [5, B, A] fp32
    cls_ptr,  # [B, A, C], `row` from anchor to anchor
    obj_ptr,  # [B, A]
    absent_ptr,  # [B, A] fp32
    cells_ptr,  # [3, B, A] fp32
    gts_ptr,  # [7, B, G] fp32
    labels_ptr,  # [B, G] int64
    takers_ptr,  # [B, A] int32
    taker_ptr,  # [B, A] int32
    fg_ptr,  # [B, A] bool, written
    matched_ptr,  # [B, A] int64, written
    iou_ptr,  # [B, A] fp32, written
    class_ptr,  # [B, A] int64, written
    B, A, G, row, cls_weight, iou_weight, log_eps, union_eps,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, REGION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < A
    at = image * A + cols
    takers = tl.load(takers_ptr + at, mask=ok, other=0)
    matched = tl.load(taker_ptr + at, mask=ok, other=-1)
    several = takers > 1
    best = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for g in range(tl.where(tl.max(takers, 0) > 1, G, 0)):
        label = tl.load(labels_ptr + image * G + g)
        gl, gt, gr, gb, garea, gx, gy = _truth(gts_ptr, image * G + g, B * G)
        real = several & (label < C + tl.zeros_like(cols))
        iou = _iou(boxes_ptr, at, B * A, real, gl, gt, gr, gb, garea, union_eps)
        keys = _keys(
            cls_ptr, obj_ptr, absent_ptr, cells_ptr, at, row, B * A, real, iou, label, gl, gt, gr, gb, gx, gy,
            cls_weight, iou_weight, log_eps, C, HAS_OBJ, REGION,
        )  # fmt: skip
        matched = tl.where(several & (keys < best), g, matched)
        best = tl.minimum(best, keys)
    fg = takers > 0
    own = image * G + tl.where(fg, matched, 0)
    left = tl.load(gts_ptr + own, mask=fg, other=0.0)
    top = tl.load(gts_ptr + B * G + own, mask=fg, other=0.0)
    right = tl.load(gts_ptr + 2 * B * G + own, mask=fg, other=0.0)
    bottom = tl.load(gts_ptr + 3 * B * G + own, mask=fg, other=0.0)
    area = tl.load(gts_ptr + 4 * B * G + own, mask=fg, other=0.0)
    iou = _iou(boxes_ptr, at, B * A, fg, left, top, right, bottom, area, union_eps)
    tl.store(fg_ptr + at, fg, mask=ok)
    tl.store(matched_ptr + at, tl.where(fg, matched, -1).to(tl.int64), mask=ok)
    tl.store(iou_ptr + at, tl.where(fg, iou, 0.0), mask=ok)
    tl.store(class_ptr + at, tl.load(labels_ptr + own, mask=fg, other=-1), mask=ok)


def assign(anchors: Anchors, truths: Truths, rules: Rules, *, candidates_given: bool) -> Assignment:
    """Assign with Triton kernels; `given`: anchors.valid holds the candidates."""
    batch, count = anchors.valid.shape
    gts, region = truths.mask.shape[1], _REGIONS[rules.region]
    cls = anchors.cls
    if cls.stride(2) != 1 or cls.stride(0) != count * cls.stride(1):
        cls = cls.contiguous()
    row, obj = cls.stride(1), cls if anchors.obj is None else anchors.obj.contiguous()
    boxes = torch.stack(anchors.boxes[:5])
    cells = torch.stack([cell.expand(batch, count) for cell in anchors.cells])
    table, labels = torch.stack(tuple(truths.boxes)), truths.classes.contiguous()
    near = anchors.valid.to(torch.int8) if candidates_given else torch.empty_like(anchors.valid, dtype=torch.int8)
    listed = torch.empty(batch, count, dtype=torch.int32, device=cls.device)
    length = torch.empty(batch, dtype=torch.int32, device=cls.device)
    absent = torch.empty(batch, count, dtype=torch.float32, device=cls.device)
    takers, taker = torch.zeros_like(listed), torch.full_like(listed, -1)
    grid = (batch, ceil_div(count, _BLOCK))
    if not candidates_given:
        _near_kernel[grid](cells, table, near, batch, count, gts, REGION=region, BLOCK=_BLOCK)
    _list_kernel[(batch,)](near, listed, length, count, BLOCK=1024)
    # Products are not fused with sums, so that an IoU has the bits of the published one.
    form: dict[str, Any] = {"C": cls.shape[2], "HAS_OBJ": anchors.obj is not None, "enable_fp_fusion": False}
    _absent_kernel[(batch, ceil_div(count, 16))](
        cls,
        obj,
        listed,
        length,
        absent,
        count,
        row,
        **form,
        ROWS=16,
        BLOCK_C=min(128, next_power_of_2(cls.shape[2])),
    )
    read = (boxes, cls, obj, absent, cells, table, labels)
    sizes = (batch, count, gts, row, rules.cls_weight, rules.iou_weight, rules.log_eps, rules.union_eps)
    form["REGION"] = region
    _match_kernel[(batch, gts)](*read, listed, length, takers, taker, *sizes, **form, TOPK=rules.topk, BLOCK=_BLOCK)
    result = (
        torch.empty_like(anchors.valid),
        torch.empty_like(listed, dtype=torch.int64),
        torch.empty_like(absent),
        torch.empty_like(listed, dtype=torch.int64),
    )
    _resolve_kernel[grid](*read, takers, taker, *result, *sizes, **form, BLOCK=_BLOCK)
    return Assignment(*result, result[0].sum(1))
