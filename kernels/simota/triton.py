"""SimOTA on a GPU: five kernels from the predictions to the assignment, in fixed shapes, without a [B, G, A] tensor.

What they compute stands in assign.py. Shapes: B images, A anchors, G ground truths, C classes. The inputs are read as
they are, slices of a head's output too; torch makes no tensor from them before.

    near       [B, A]     is an anchor near any ground truth (not run where the caller gives the candidates)
    list       [B, A]     the candidates, in order; [B] how many. The place of one in the list is its rank.
    candidate  [B, A]     boxes, cells, sigmoid(obj) and sum_c log(1 - p_c) of the candidates, by rank
    match      [B, G]     one program per ground truth: its cheapest k candidates -> takers by rank, counted atomically
    resolve    [B, A]     who was taken by several goes to the cheapest of all

The lists are read up to lengths that stay on the device. Atomics add and take the largest of integers: every run gives
the same bits. Costs of a pair are computed where they are needed, twice at most, and not stored.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from accel.kernels.launching import PlannedKernel
from accel.kernels.simota.inputs import INF_BITS

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
def _probability(cls, scored, HAS_OBJ: tl.constexpr):
    # `scored` is sigmoid(obj).
    if HAS_OBJ:
        p = tl.math.sqrt_rn(_sigmoid(cls) * scored)
    else:
        p = cls.to(tl.float32)
    return p


@triton.jit
def _region(x, y, reach, truth, REGION: tl.constexpr):
    # Whether an anchor is near a ground truth, and in its region.
    left, top, right, bottom, _, middle_x, middle_y = truth
    near = (x > middle_x - reach) & (x < middle_x + reach) & (y > middle_y - reach) & (y < middle_y + reach)
    inside = near
    if REGION == 1:
        within = (x > left) & (x < right) & (y > top) & (y < bottom)
        inside = near & within
        near = near | within
    return near, inside


@triton.jit
def _corners(boxes_ptr, ok, XYXY: tl.constexpr):
    # left, top, right, bottom, area, x, y of the boxes at some addresses.
    a = tl.load(boxes_ptr, mask=ok, other=0).to(tl.float32)
    b = tl.load(boxes_ptr + 1, mask=ok, other=0).to(tl.float32)
    c = tl.load(boxes_ptr + 2, mask=ok, other=0).to(tl.float32)
    d = tl.load(boxes_ptr + 3, mask=ok, other=0).to(tl.float32)
    if XYXY:
        left, top, right, bottom, area = a, b, c, d, (c - a) * (d - b)
        x, y = (a + c) * 0.5, (b + d) * 0.5
    else:
        half_width, half_height = c * 0.5, d * 0.5
        left, top, right, bottom, area = a - half_width, b - half_height, a + half_width, b + half_height, c * d
        x, y = a, b
    return left, top, right, bottom, area, x, y


@triton.jit
def _truths(gts_ptr, mask_ptr, at, row, ok, HAS_MASK: tl.constexpr, XYXY: tl.constexpr):
    # left, top, right, bottom, area, x, y of ground truths; hidden ones have no area, and their middle at infinity.
    left, top, right, bottom, area, x, y = _corners(gts_ptr + at * row, ok, XYXY)
    if HAS_MASK:
        real = tl.load(mask_ptr + at, mask=ok, other=0).to(tl.int32) != 0
        left, top = tl.where(real, left, 0.0), tl.where(real, top, 0.0)
        right, bottom = tl.where(real, right, 0.0), tl.where(real, bottom, 0.0)
        area = tl.where(real, area, 0.0)
        x, y = tl.where(real, x, float("inf")), tl.where(real, y, float("inf"))
    return left, top, right, bottom, area, x, y


@triton.jit
def _labels(labels_ptr, mask_ptr, at, ok, C: tl.constexpr, HAS_MASK: tl.constexpr):
    # The classes of ground truths, C of hidden ones. Out of range they would read past the classes; `check` raises.
    label = tl.load(labels_ptr + at, mask=ok, other=0).to(tl.int64)
    label = tl.minimum(tl.maximum(label, 0), C - 1)
    if HAS_MASK:
        label = tl.where(tl.load(mask_ptr + at, mask=ok, other=0).to(tl.int32) != 0, label, C)
    return label


@triton.jit
def _cells(points_ptr, strides_ptr, at_point, at_stride, radius, ok):
    # x, y and reach of anchors.
    x = tl.load(points_ptr + at_point * 2, mask=ok, other=0).to(tl.float32)
    y = tl.load(points_ptr + at_point * 2 + 1, mask=ok, other=0).to(tl.float32)
    return x, y, tl.load(strides_ptr + at_stride, mask=ok, other=0).to(tl.float32) * radius


@triton.jit
def _planes(planes_ptr, first: tl.constexpr, count: tl.constexpr, at, stride, ok):
    # What is known of candidates, from the plane `first` on.
    known = ()
    for plane in tl.static_range(first, first + count):
        known += (tl.load(planes_ptr + plane * stride + at, mask=ok, other=0.0),)
    return known


@triton.jit
def _iou(planes_ptr, at, stride, ok, truth, union_eps):
    left, top, right, bottom, area = _planes(planes_ptr, 0, 5, at, stride, ok)
    gl, gt, gr, gb, garea, _, _ = truth
    width = tl.maximum(tl.minimum(gr, right) - tl.maximum(gl, left), 0.0)
    height = tl.maximum(tl.minimum(gb, bottom) - tl.maximum(gt, top), 0.0)
    both = width * height
    return tl.math.div_rn(both, tl.maximum(garea + area - both, union_eps))


@triton.jit
def _keys(
    cls_ptr, planes_ptr, at_class, at, stride, ok, iou, truth, cls_weight, iou_weight, log_eps,
    HAS_OBJ: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    # The costs as integers of the same order, negative in the region.
    scored, absent = _planes(planes_ptr, 8, 2, at, stride, ok)
    p = _probability(tl.load(cls_ptr + at_class, mask=ok, other=0.0), scored, HAS_OBJ)
    # 0 - log p, and no IoU above 1 makes a cost negative: its sign bit is the region's.
    own = 0.0 - tl.maximum(_log(p), -100.0)
    others = tl.maximum(tl.maximum(_log1p(-p), -100.0) - absent, 0.0)
    price = tl.maximum((own + others) * cls_weight - iou_weight * _log(iou + log_eps), 0.0)
    keys = price.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if REGION != 2:
        x, y, reach = _planes(planes_ptr, 5, 3, at, stride, ok)
        _, inside = _region(x, y, reach, truth, REGION)
        keys = tl.where(inside, keys | -0x80000000, keys)
    return tl.where(ok, keys, 0x7FFFFFFF)


@PlannedKernel
@triton.jit
def near_kernel(
    points_ptr,  # [., A, 2]
    strides_ptr,  # [., A]
    gts_ptr,  # [B, G, 4], `gt_row` from one to the next
    mask_ptr,  # [B, G] bool
    near_ptr,  # [B, A] bool, written
    A, G, gt_row, points_step, strides_step, radius,
    HAS_MASK: tl.constexpr, XYXY: tl.constexpr, REGION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < A
    at_point, at_stride = image * points_step + cols, image * strides_step + cols
    x, y, reach = _cells(points_ptr, strides_ptr, at_point, at_stride, radius, ok)
    is_candidate = tl.zeros([BLOCK], tl.int32)
    for g in range(G):
        truth = _truths(gts_ptr, mask_ptr, image * G + g, gt_row, True, HAS_MASK, XYXY)
        near, _ = _region(x, y, reach, truth, REGION)
        is_candidate = is_candidate | near.to(tl.int32)
    tl.store(near_ptr + image * A + cols, is_candidate != 0, mask=ok)


@PlannedKernel
@triton.jit
def list_kernel(
    near_ptr,  # [B, A] bool
    ints_ptr,  # [4, B, A] int32, written: the list up to its length, the ranks (-1: none), no takers; [B] the length
    count_ptr,  # [B] int64, written: no foreground
    A,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * A
    count = tl.zeros([], tl.int32)
    for start in range(0, A, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        ok = cols < A
        at = ints_ptr + image * A
        near = tl.load(near_ptr + image * A + cols, mask=ok, other=0).to(tl.int32)
        place = count + tl.cumsum(near, 0) - 1
        tl.store(at + place, cols, mask=near > 0)
        tl.store(at + stride + cols, tl.where(near > 0, place, -1), mask=ok)
        tl.store(at + 2 * stride + cols, tl.zeros_like(cols), mask=ok)
        tl.store(at + 3 * stride + cols, tl.zeros_like(cols) - 1, mask=ok)
        count += tl.sum(near, 0)
    tl.store(ints_ptr + 4 * stride + image, count)
    tl.store(count_ptr + image, tl.zeros([], tl.int64))


@PlannedKernel
@triton.jit
def candidate_kernel(
    boxes_ptr,  # [B, A, 4], `box_row` from anchor to anchor
    cls_ptr,  # [B, A, C], `row` from anchor to anchor
    obj_ptr,  # [B, A], `obj_row` from anchor to anchor
    points_ptr,  # [., A, 2]
    strides_ptr,  # [., A]
    ints_ptr,  # [4, B, A] and [B] int32
    planes_ptr,  # [10, B, A] fp32, written up to the length
    A, box_row, row, obj_row, points_step, strides_step, radius,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, XYXY: tl.constexpr, REGION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * A
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok = rows < tl.load(ints_ptr + 4 * stride + image)
    anchors = tl.load(ints_ptr + image * A + rows, mask=ok, other=0)
    at = image * A + anchors
    planes = planes_ptr + image * A + rows
    box = _corners(boxes_ptr + at * box_row, ok, XYXY)
    for plane in tl.static_range(5):
        tl.store(planes + plane * stride, box[plane], mask=ok)
    if REGION != 2:
        at_point, at_stride = image * points_step + anchors, image * strides_step + anchors
        cell = _cells(points_ptr, strides_ptr, at_point, at_stride, radius, ok)
        for plane in tl.static_range(3):
            tl.store(planes + (5 + plane) * stride, cell[plane], mask=ok)
    scored = tl.zeros([ROWS], tl.float32)
    if HAS_OBJ:
        scored = _sigmoid(tl.load(obj_ptr + at * obj_row, mask=ok, other=0.0))
    tl.store(planes + 8 * stride, scored, mask=ok)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, C, BLOCK_C):
        classes = start + tl.arange(0, BLOCK_C)
        in_range = ok[:, None] & (classes < C)[None, :]
        p = _probability(
            tl.load(cls_ptr + at[:, None] * row + classes[None, :], mask=in_range, other=0.0), scored[:, None], HAS_OBJ
        )
        total += tl.sum(tl.where(in_range, tl.maximum(_log1p(-p), -100.0), 0.0), 1)
    tl.store(planes + 9 * stride, total, mask=ok)


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
def match_kernel(
    cls_ptr,  # [B, A, C], `row` from anchor to anchor
    planes_ptr,  # [10, B, A] fp32
    gts_ptr,  # [B, G, 4], `gt_row` from one to the next
    labels_ptr,  # [B, G]
    mask_ptr,  # [B, G] bool
    ints_ptr,  # [4, B, A] and [B] int32: how many took a candidate is added to, and the largest taker kept
    A, G, row, gt_row, cls_weight, iou_weight, log_eps, union_eps,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, HAS_MASK: tl.constexpr, XYXY: tl.constexpr, REGION: tl.constexpr,
    TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * A
    g = tl.program_id(1)
    label = _labels(labels_ptr, mask_ptr, image * G + g, True, C, HAS_MASK)
    length = tl.where(label < C, tl.load(ints_ptr + 4 * stride + image), 0)
    truth = _truths(gts_ptr, mask_ptr, image * G + g, gt_row, True, HAS_MASK, XYXY)
    best = tl.full([16], _MOST, tl.int64)
    most = tl.full([16], _MOST, tl.int64)
    for start in range(0, length, BLOCK):
        ranks = start + tl.arange(0, BLOCK)
        ok = ranks < length
        at = image * A + ranks
        iou = _iou(planes_ptr, at, stride, ok, truth, union_eps)
        at_class = (image * A + tl.load(ints_ptr + at, mask=ok, other=0)) * row + label
        keys = _keys(
            cls_ptr, planes_ptr, at_class, at, stride, ok, iou, truth, cls_weight, iou_weight, log_eps, HAS_OBJ, REGION
        )
        # Ranks are in the order of anchors: of equals the first is taken.
        best = _smallest(best, tl.where(ok, (keys.to(tl.int64) << 32) | ranks.to(tl.int64), _MOST), TOPK, _MOST)
        # The largest IoUs are the smallest of the negated bits.
        bits = -(iou.to(tl.int32, bitcast=True).to(tl.int64))
        most = _smallest(most, tl.where(ok, (bits << 32) | ranks.to(tl.int64), _MOST), TOPK, _MOST)
    ious = (-(most >> 32)).to(tl.int32).to(tl.float32, bitcast=True)
    total = tl.sum(tl.where(most < _MOST, ious, 0.0), 0)
    k = tl.minimum(tl.maximum(total.to(tl.int32), 1), TOPK)
    # The place of a key: how many are smaller.
    place = tl.sum((best[None, :] < best[:, None]).to(tl.int32), 1)
    is_taken = (place < k) & ((best >> 32) < _INF_BITS)
    at = image * A + tl.where(is_taken, best & 0xFFFFFFFF, 0)
    tl.atomic_add(ints_ptr + 2 * stride + at, 1, mask=is_taken)
    tl.atomic_max(ints_ptr + 3 * stride + at, g, mask=is_taken)


@PlannedKernel
@triton.jit
def resolve_kernel(
    cls_ptr,  # [B, A, C], `row` from anchor to anchor
    planes_ptr,  # [10, B, A] fp32
    gts_ptr,  # [B, G, 4], `gt_row` from one to the next
    labels_ptr,  # [B, G]
    mask_ptr,  # [B, G] bool
    ints_ptr,  # [4, B, A] and [B] int32
    fg_ptr,  # [B, A] bool, written
    matched_ptr,  # [B, A] int64, written
    iou_ptr,  # [B, A] fp32, written
    class_ptr,  # [B, A] int64, written
    count_ptr,  # [B] int64, added to
    A, G, row, gt_row, cls_weight, iou_weight, log_eps, union_eps,
    C: tl.constexpr, HAS_OBJ: tl.constexpr, HAS_MASK: tl.constexpr, XYXY: tl.constexpr, REGION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * A
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < A
    anchor = image * A + cols
    rank = tl.load(ints_ptr + stride + anchor, mask=ok, other=-1)
    at = image * A + tl.maximum(rank, 0)
    takers = tl.load(ints_ptr + 2 * stride + at, mask=rank >= 0, other=0)
    matched = tl.load(ints_ptr + 3 * stride + at, mask=rank >= 0, other=-1)
    several = takers > 1
    best = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for g in range(tl.where(tl.max(takers, 0) > 1, G, 0)):
        label = _labels(labels_ptr, mask_ptr, image * G + g, True, C, HAS_MASK)
        truth = _truths(gts_ptr, mask_ptr, image * G + g, gt_row, True, HAS_MASK, XYXY)
        real = several & (label < C + tl.zeros_like(cols))
        iou = _iou(planes_ptr, at, stride, real, truth, union_eps)
        keys = _keys(
            cls_ptr, planes_ptr, anchor * row + label, at, stride, real, iou, truth,
            cls_weight, iou_weight, log_eps, HAS_OBJ, REGION,
        )  # fmt: skip
        matched = tl.where(several & (keys < best), g, matched)
        best = tl.minimum(best, keys)
    fg = takers > 0
    own = image * G + tl.where(fg, matched, 0)
    truth = _truths(gts_ptr, mask_ptr, own, gt_row, fg, HAS_MASK, XYXY)
    iou = _iou(planes_ptr, at, stride, fg, truth, union_eps)
    label = _labels(labels_ptr, mask_ptr, own, fg, C, HAS_MASK)
    tl.store(fg_ptr + anchor, fg, mask=ok)
    tl.store(matched_ptr + anchor, tl.where(fg, matched, -1).to(tl.int64), mask=ok)
    tl.store(iou_ptr + anchor, tl.where(fg, iou, 0.0), mask=ok)
    tl.store(class_ptr + anchor, tl.where(fg, label, -1), mask=ok)
    tl.atomic_add(count_ptr + image, tl.sum(fg.to(tl.int64), 0))
