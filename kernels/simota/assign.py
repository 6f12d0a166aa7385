"""SimOTA label assignment for a whole batch: which anchor learns which ground truth.

For ground truth g and anchor a of one image, p the joint probabilities sqrt(sigmoid(cls) * sigmoid(obj)):

    cost[g, a] = sum_c BCE(p[a, c], c == class[g]) - 3 log(IoU[g, a] + 1e-8)
    k[g]       = max(1, int(sum of the 10 largest IoU[g, :]))

over the candidates, the anchors near any ground truth. Each ground truth takes its k cheapest candidates, those in its
own region first; a candidate taken more than once goes to the ground truth, of all, for which it is cheapest.
OTA: https://arxiv.org/abs/2103.14259, YOLOX: https://arxiv.org/abs/2107.08430, YOLOv7:
https://arxiv.org/abs/2207.02696.

Shapes: B images, A anchors, G padded ground truths, C classes, N anchors at work (all, or the candidates).

The class cost is split, exactly, into a term per anchor and a term per (anchor, class), so that no [G, A, C] exists:

    sum_c BCE = -sum_c log(1 - p_c) + log(1 - p_g) - log p_g, each logarithm held above -100 as in torch's own BCE

The order is (outside the region, cost, index), compared as one integer: the published code adds 1e6 (or 1e5) to the
cost of what is outside, which in fp32 leaves steps of 0.0625 and so ties that torch.topk breaks in no set order. The
order here is one of those that the published one allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels import support
from accel.kernels.simota.inputs import (
    INF_BITS,
    NUMBERS,
    Anchors,
    Assignment,
    Boxes,
    Cells,
    Given,
    Rules,
    Truths,
    anchors_of,
    cells_of,
    check_anchors,
    check_truths,
    rules_of,
    truths_of,
    validate,
)

# Pairs held at once. 16 images, 50 boxes each, two cores: 17 ms with 2**18, 24 ms with 2**19, 32 ms with 2**15.
_PAIRS_CPU, _PAIRS_CUDA = 1 << 18, 1 << 23
_FEW = 4
"""Images up to which a CPU takes one at a time."""


def simota_assign(
    boxes: Tensor,
    cls: Tensor,
    obj: Tensor | None,
    points: Tensor | None,
    strides: Tensor | None,
    gt_boxes: Tensor,
    gt_classes: Tensor,
    gt_mask: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    variant: str | Rules = "yolox",
    xyxy: bool = False,
    chunk: int | None = None,
    check: bool | None = None,
) -> Assignment:
    """Assign every anchor of a batch to a ground truth or to the background, by SimOTA.

    The formula stands at the top of this module. On CUDA nothing waits for the device and every shape is fixed, so the
    call can be captured in a CUDA graph; memory is O(B * A * (chunk + C)), never G * A. With triton it runs as
    five kernels that hold no [B, G, A] either. All arithmetic is fp32 whatever the inputs are, and nothing is
    differentiated, as published. Equal costs go to the lowest anchor, then to the lowest ground truth; in this, and
    where two costs differ by less than fp32 rounds, the result may differ from the published code. An image whose
    ground truths have no candidate has no foreground; the published code fails on it.

    Args:
        boxes: [B, A, 4] predicted boxes in pixels, (x, y, width, height) with (x, y) the middle.
        cls: [B, A, C] class logits.
        obj: [B, A] objectness logits; None if `cls` already holds the joint probabilities, in [0, 1].
        points: [A, 2] or [B, A, 2] middles of the anchors' cells in pixels. None: for the region "given" only.
        strides: [A] or [B, A] strides of the anchors' levels in pixels. None as for `points`.
        gt_boxes: [B, G, 4] ground truths in pixels, padded to a common G; G may be 0.
        gt_classes: [B, G] their classes, 0 to C - 1.
        gt_mask: [B, G] bool, False where padded; None: all are real.
        candidates: [B, A] bool; takes the place of the rule for candidates. YOLOv7's variant needs it: the mask of its
            anchor-based matching. Its list may name one anchor several times; to keep that, pass the rows of the list
            as the anchors.
        variant: "yolox" (as YOLOX is now), "yolox-2021" (as it came out), "yolov7", "mmdet", or `Rules`. YOLOv7's BCE
            of the logit of p is the BCE of p; where p is 0 or 1 its published form is NaN and this one is not.
        xyxy: all boxes are (left, top, right, bottom) instead.
        chunk: ground truths worked on at once by the plain path; None: as many as make 2**18 pairs on a CPU and 2**23
            on CUDA.
        check: look for NaN and infinities (on a CPU in the candidates only) and for wrong classes. Sides may be
            infinite, of predictions or of ground truths: such a box overlaps with none, as published. This waits for
            the device. None: on a CPU only. Unchecked, they give a meaningless assignment, never a crash.

    Returns:
        `Assignment`: fg_mask, matched_gt, matched_iou, matched_class [B, A] and num_fg [B].

    Raises:
        ValueError: for a shape, dtype, device or option that doesn't fit, or for values that `check` rejects.

    Example:
        >>> import torch
        >>> from accel.kernels.simota import simota_assign
        >>> points = torch.tensor([[4.0, 4.0], [12.0, 4.0]])
        >>> strides = torch.tensor([8.0, 8.0])
        >>> boxes = torch.tensor([[[4.0, 4.0, 8.0, 8.0], [12.0, 4.0, 8.0, 8.0]]])
        >>> truth = torch.tensor([[[12.0, 4.0, 8.0, 8.0]]])
        >>> logits = torch.zeros(1, 2, 3)
        >>> simota_assign(boxes, logits, torch.zeros(1, 2), points, strides, truth, torch.tensor([[2]])).matched_gt
        tensor([[-1,  0]])
    """
    rules = rules_of(variant)
    given = Given(boxes, cls, obj, points, strides, gt_boxes, gt_classes, gt_mask, candidates)
    if torch.compiler.is_compiling():
        with torch.no_grad():  # torch gives an operator a backward pass, which this one has not
            return Assignment(*assign_op(list(given), *flat(rules), xyxy, chunk, check))
    validate(given, rules, chunk)
    check = boxes.is_cpu if check is None else check
    if support.runs_triton(boxes) and not check and 0 not in boxes.shape and 0 not in gt_boxes.shape:
        from accel.kernels.simota import launchers

        return launchers.assign(given, rules, xyxy=xyxy)
    return _assign(given, rules, xyxy=xyxy, chunk=chunk, check=check)


@torch.no_grad()
def _assign(given: Given, rules: Rules, *, xyxy: bool, chunk: int | None, check: bool) -> Assignment:
    """Assign what needs a look at the values, or torch's operators."""
    boxes, cls, obj, points, strides, gt_boxes, gt_classes, gt_mask, candidates = given
    if check:
        check_truths(gt_boxes, gt_classes, gt_mask, cls.shape[2], xyxy)
    if 0 in (*boxes.shape[:2], gt_boxes.shape[1]):
        return _background(boxes)
    cells = cells_of(points, strides, rules.radius, boxes)
    runs_triton, pairs = support.runs_triton(boxes), boxes.shape[1] * gt_boxes.shape[1]
    if boxes.is_cpu and len(boxes) <= _FEW and pairs <= _PAIRS_CPU and chunk is None and not runs_triton:
        from accel.kernels.simota import small_batch as simota_few

        return simota_few.assign_few(given, cells, rules, _background(boxes), xyxy=xyxy, check=check)
    mask = torch.ones_like(gt_classes, dtype=torch.bool) if gt_mask is None else gt_mask
    truths = truths_of(gt_boxes, gt_classes, mask, cls.shape[2], xyxy)
    if boxes.is_cpu and not runs_triton:
        valid = _grid_candidates(cells, truths, rules, chunk) if candidates is None else candidates
        return _assign_compact((boxes, cls, obj), cells, valid, truths, rules, xyxy=xyxy, chunk=chunk, check=check)
    valid = torch.ones_like(boxes[..., 0], dtype=torch.bool) if candidates is None else candidates
    anchors = anchors_of(boxes, cls, obj, cells, valid, xyxy)
    if check:
        check_anchors(anchors, truths)
    if runs_triton:
        from accel.kernels.simota import launchers

        return launchers.assign(given, rules, xyxy=xyxy)
    if candidates is None:
        anchors = anchors._replace(valid=_candidates(cells, truths, rules, chunk))
    return assign_fixed(anchors, truths, rules, chunk)


def _assign_compact(
    predicted: tuple[Tensor, Tensor, Tensor | None],
    cells: Cells,
    valid: Tensor,
    truths: Truths,
    rules: Rules,
    *,
    xyxy: bool,
    chunk: int | None,
    check: bool,
) -> Assignment:
    """Assign on a CPU, where shapes may depend on values: some images at a time, their candidates only."""
    whole, flat = _background(valid), valid.flatten().nonzero().flatten()
    image = flat // valid.shape[1]
    ends = valid.sum(1).cumsum(0)
    rank = torch.arange(len(flat), device=flat.device) - (ends - valid.sum(1))[image]
    most, begin = int(rank.max()) + 1 if len(rank) else 1, 0
    images = max(1, _PAIRS_CPU // (most * truths.mask.shape[1]))
    for start in range(0, len(valid), images):
        at = slice(start, start + images)
        mine, end = truths.map(lambda t, at=at: t[at]), int(ends[at][-1])  # type: ignore[misc]
        slot = (image[begin:end] - start) * most + rank[begin:end]  # candidates go to the front, in their order
        index = flat.new_full((len(mine.mask) * most,), start * valid.shape[1]).index_copy_(0, slot, flat[begin:end])
        is_valid = valid.new_zeros(len(index)).index_fill_(0, slot, True).view(-1, most)
        where = Cells(*(_rows(t.expand(valid.shape), index, most) for t in cells))
        boxes, cls, obj = (None if t is None else _rows(t, index, most) for t in predicted)
        assert boxes is not None and cls is not None
        anchors = anchors_of(boxes, cls, obj, where, is_valid, xyxy)
        if check:
            check_anchors(anchors, mine, start)
        assignment = assign_fixed(anchors, mine, rules, chunk)
        for to, values in zip(whole[:4], assignment[:4], strict=True):
            to.view(-1).index_copy_(0, flat[begin:end], values.flatten().index_select(0, slot))
        whole.num_fg[at], begin = assignment.num_fg, end
    return whole


def _rows(tensor: Tensor, index: Tensor, each: int) -> Tensor:
    """Return the rows of [B, A, ...] at an index into B * A, as [., each, ...]."""
    return tensor.flatten(0, 1).index_select(0, index).view(-1, each, *tensor.shape[2:])


def assign_fixed(anchors: Anchors, truths: Truths, rules: Rules, chunk: int | None) -> Assignment:
    """Assign with shapes that depend on no value, and without waiting for the device."""
    count = anchors.valid.shape[1]
    if 0 in (*anchors.valid.shape, truths.mask.shape[1]):
        return _background(anchors.valid)
    table = _class_costs(anchors, rules)
    anchors = _hidden(anchors)
    best = torch.full_like(anchors.valid, torch.iinfo(torch.int32).max, dtype=torch.int32)
    cheapest = torch.zeros_like(best, dtype=torch.int64)
    picked, is_taken = [], []
    for part, start in _parts(truths, len(best) * count, chunk):
        keys, k = _keys(anchors, part, table, rules)
        least, where = keys.min(dim=1)  # the first of equals: documented by torch.min
        cheapest = torch.where(least < best, where + start, cheapest)
        best = torch.minimum(best, least)
        top = keys.to(torch.int64).bitwise_left_shift_(32).add_(torch.arange(count, device=keys.device))
        top = top.topk(min(rules.topk, count), largest=False).values
        rank = torch.arange(top.shape[2], device=top.device)
        is_taken.append((rank < k[..., None]) & (top >> 32 < INF_BITS))
        picked.append(top & 0xFFFFFFFF)
    return _resolve(anchors, truths, torch.cat(picked, 1), torch.cat(is_taken, 1), cheapest, rules)


def _keys(anchors: Anchors, truths: Truths, table: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return the costs as integers of the same order [B, G, N], negative in the region, and how many to take [B, G]."""
    near = truths.boxes.map(lambda t: t[..., None])
    iou = overlap(near, anchors.boxes.map(lambda t: t[:, None]), rules.union_eps)
    k = iou.topk(min(rules.topk, iou.shape[2])).values.sum(-1).to(torch.int32).clamp(1, rules.topk)
    images = torch.arange(len(table), device=table.device)[:, None] * table.shape[1]
    own = table.flatten(0, 1).index_select(0, (images + truths.classes).flatten()).view_as(iou)
    # An IoU that rounds to above 1 must not make a cost negative: its sign bit is the region's.
    price = iou.add_(rules.log_eps).log_().mul_(-rules.iou_weight).add_(own).clamp_(min=0)
    if rules.region != "given":
        _, inside = regions_of(Cells(*(t[:, None] for t in anchors.cells)), near, rules)
        price = torch.where(inside, -price, price)
    return price.view(torch.int32), k * truths.mask


def _resolve(
    anchors: Anchors, truths: Truths, picked: Tensor, is_taken: Tensor, cheapest: Tensor, rules: Rules
) -> Assignment:
    """Resolve anchors that several ground truths take; `picked` and `is_taken` are [B, G, topk]."""
    batch, count = anchors.valid.shape
    offset = torch.arange(batch, device=picked.device)[:, None, None] * count
    flat = (picked.clamp(max=count - 1) + offset).flatten()
    gts = torch.arange(picked.shape[1], device=picked.device)[None, :, None]
    zeros = flat.new_zeros(batch * count)
    takers = zeros.scatter_add(0, flat, is_taken.flatten().long()).view(batch, count)
    # Where there is one taker, the sum of the takers is that one.
    taker = zeros.scatter_add(0, flat, (is_taken * gts).flatten()).view(batch, count)
    gt = torch.where(takers > 1, cheapest, taker)
    own = truths.boxes.map(lambda t: t.gather(1, gt))
    iou, fg = overlap(own, anchors.boxes, rules.union_eps), takers > 0
    return Assignment(
        fg,
        gt.masked_fill(~fg, -1),
        iou.masked_fill(~fg, 0),
        truths.classes.gather(1, gt).masked_fill(~fg, -1),
        fg.sum(1),
    )


def overlap(a: Boxes, b: Boxes, union_eps: float) -> Tensor:
    """Return the IoU of boxes whose shapes broadcast."""
    width = (torch.minimum(a.right, b.right) - torch.maximum(a.left, b.left)).clamp_(min=0)
    height = (torch.minimum(a.bottom, b.bottom) - torch.maximum(a.top, b.top)).clamp_(min=0)
    both = width.mul_(height)
    return both.div((a.area + b.area).sub_(both).clamp_(min=union_eps))


def regions_of(cells: Cells, gt: Boxes, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return (makes a candidate, in the region) of cells and ground truths whose shapes broadcast."""
    x, y, reach = cells
    near = _between(x, gt.x, reach) & _between(y, gt.y, reach)
    if rules.region == "center":
        return near, near
    within = (x > gt.left) & (x < gt.right) & (y > gt.top) & (y < gt.bottom)
    return near | within, near & within


def _between(x: Tensor, middle: Tensor, reach: Tensor) -> Tensor:
    # x > middle - reach rounds like the published x - (middle - reach) > 0; |x - middle| < reach would not.
    return (x > middle - reach) & (x < middle + reach)


def _grid_candidates(cells: Cells, truths: Truths, rules: Rules, chunk: int | None) -> Tensor:
    """Return the result of `_candidates`, from the few columns and rows of a grid: 10 times as fast on a CPU.

    A cell is near some ground truth if its column and its row are near the same one: a product of two matrices.
    """
    if len(cells.x) > 1 or len(cells.reach) > 1:
        return _candidates(cells, truths, rules, chunk)
    columns, column = _packed(cells.x[0], cells.reach[0])
    rows, row = _packed(cells.y[0], cells.reach[0])
    if len(columns) * len(rows) > 8 * len(column):
        return _candidates(cells, truths, rules, chunk)
    gt = truths.boxes.map(lambda t: t[..., None])
    across, wide = _unpacked(columns)
    down, high = _unpacked(rows)
    near = _both(_between(across, gt.x, wide), _between(down, gt.y, high))
    if rules.region == "box":
        near |= _both((across > gt.left) & (across < gt.right), (down > gt.top) & (down < gt.bottom))
    return near.flatten(1).index_select(1, column * len(rows) + row)


def _packed(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct pairs of two fp32 as integers, and the index of each pair among them."""
    bits = low.contiguous().view(torch.int32).long()
    pairs: tuple[Tensor, Tensor] = torch.unique(
        high.contiguous().view(torch.int32).long() << 32 | bits, return_inverse=True
    )
    return pairs


def _unpacked(pairs: Tensor) -> tuple[Tensor, Tensor]:
    return (pairs >> 32).int().view(torch.float32), (pairs & 0xFFFFFFFF).int().view(torch.float32)


def _both(columns: Tensor, rows: Tensor) -> Tensor:
    """Return where a column [B, G, X] and a row [B, G, Y] share a ground truth, [B, X, Y]."""
    return columns.float().transpose(1, 2) @ rows.float() > 0


def _candidates(cells: Cells, truths: Truths, rules: Rules, chunk: int | None) -> Tensor:
    """Return the anchors near any ground truth [B, A]."""
    shape, wide = (len(truths.mask), cells.x.shape[1]), Cells(*(t[:, None] for t in cells))
    is_candidate = torch.zeros(shape, dtype=torch.bool, device=cells.x.device)
    for part, _ in _parts(truths, is_candidate.numel(), chunk):
        is_candidate |= regions_of(wide, part.boxes.map(lambda t: t[..., None]), rules)[0].any(1)
    return is_candidate


def _class_costs(anchors: Anchors, rules: Rules) -> Tensor:
    """Return the class costs [B, C + 1, N]: the last one, of the class of hidden ground truths, is infinite."""
    p = anchors.cls.to(torch.float32, copy=True)
    if anchors.obj is not None:
        p = p.sigmoid_().mul_(anchors.obj.float().sigmoid()[..., None]).sqrt_()
    # 0 - log p: negated, log 1 would be the negative zero, whose sign bit is the region's.
    own = 0 - p.log().clamp_(min=-100)
    absent = p.neg_().log1p_().clamp_(min=-100)
    own += absent.sub_(absent.sum(-1, keepdim=True)).clamp_(min=0)
    own = own.mul_(rules.cls_weight).masked_fill_(~anchors.valid[..., None], torch.inf)
    batch, count, classes = own.shape
    table = own.new_empty(batch, classes + 1, count)
    table[:, classes] = torch.inf
    table[:, :classes] = own.transpose(1, 2)
    return table


def _parts(truths: Truths, pairs_each: int, chunk: int | None) -> list[tuple[Truths, int]]:
    """Cut the ground truths into pieces of `chunk`; with the index of the first of each."""
    most = _PAIRS_CPU if truths.mask.is_cpu else _PAIRS_CUDA
    size = chunk or max(1, most // pairs_each)
    starts = range(0, truths.mask.shape[1], size)
    return [(truths.map(lambda t, s=s: t[:, s : s + size]), s) for s in starts]  # type: ignore[misc]


def _hidden(anchors: Anchors) -> Anchors:
    """Hide anchors that are no candidates: no area and in no region, so that no pair needs a mask."""
    return anchors._replace(
        boxes=anchors.boxes.map(lambda t: t.where(anchors.valid, 0)),
        cells=anchors.cells._replace(x=anchors.cells.x.where(anchors.valid, torch.inf)),
    )


def _background(like: Tensor) -> Assignment:
    """Return an assignment [B, A] without foreground; `like` is [B, A, ...]."""
    shape = like.shape[:2]
    return Assignment(
        like.new_zeros(shape, dtype=torch.bool),
        like.new_full(shape, -1, dtype=torch.int64),
        like.new_zeros(shape, dtype=torch.float32),
        like.new_full(shape, -1, dtype=torch.int64),
        like.new_zeros(shape[0], dtype=torch.int64),
    )


# One operator for torch.compile, which is opaque to it: it traces neither launches nor shapes.


def flat(rules: Rules) -> tuple[str, list[float]]:
    """Return the fields of some rules: dataclasses.astuple copies, which torch 2.11 can't trace."""
    return rules.region, [float(getattr(rules, name)) for name in NUMBERS]


@torch.library.custom_op("accel::simota_assign", mutates_args=())
def assign_op(
    given: list[Tensor | None], region: str, numbers: list[float], xyxy: bool, chunk: int | None, check: bool | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `simota_assign` with the rules taken apart."""
    topk, *others = numbers
    rules = Rules(region=region, topk=int(topk), **dict(zip(NUMBERS[1:], others, strict=True)))
    *tensors, candidates = given
    options = {"xyxy": xyxy, "chunk": chunk, "check": check}
    return tuple(simota_assign(*tensors, candidates=candidates, variant=rules, **options))  # type: ignore[arg-type, return-value]


@assign_op.register_fake
def _(given: list[Tensor], *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(_background(given[0]))  # type: ignore[return-value]


def cost(
    batch: int, anchors: int, gts: int, classes: int, *, itemsize: int = 4, candidates_per_gt: int = 27
) -> support.Cost:
    """Return the least work of an assignment.

    Every prediction is read once and every result written once; a class probability takes 6 operations (a
    transcendental counts as one), a pair of ground truth and candidate 24.

    Args:
        batch: images.
        anchors: anchors per image.
        gts: ground truths per image.
        classes: classes.
        itemsize: bytes of a prediction.
        candidates_per_gt: anchors in a centre region: 27 on three levels at radius 1.5.

    Example:
        >>> cost(64, 8400, 100, 80, itemsize=2).bytes
        102790912.0
    """
    candidates = min(anchors, candidates_per_gt * gts)
    flops = batch * (6 * candidates * classes + 24 * gts * candidates)
    result = 1 + 8 + 4 + 8
    moved = batch * (anchors * ((5 + classes) * itemsize + result) + gts * (4 * itemsize + 8 + 1) + 8)
    return support.Cost(float(flops), float(moved))
