"""SimOTA label assignment for a whole batch: which anchor learns which ground truth.

For ground truth g and anchor a of one image, p the joint probabilities sqrt(sigmoid(cls) * sigmoid(obj)):

    cost[g, a] = sum_c BCE(p[a, c], c == class[g]) - 3 log(IoU[g, a] + 1e-8)
    k[g]       = max(1, int(sum of the 10 largest IoU[g, :]))

over the candidates, the anchors near any ground truth. Each ground truth takes its k cheapest candidates, those in its
own region first; a candidate taken more than once goes to the ground truth, of all, for which it is cheapest.
OTA: https://arxiv.org/abs/2103.14259, YOLOX: https://arxiv.org/abs/2107.08430, YOLOv7:
https://arxiv.org/abs/2207.02696.

Shapes: B images, A anchors, G padded ground truths, C classes, N candidates of an image.

The class cost is split, exactly, into a term per anchor and a term per (anchor, class), so that no [G, A, C] exists:

    sum_c BCE = -sum_c log(1 - p_c) + log(1 - p_g) - log p_g, each logarithm held above -100 as in torch's own BCE

The order is (outside the region, cost, index), compared as one integer: the published code adds 1e6 (or 1e5) to the
cost of what is outside, which in fp32 leaves steps of 0.0625 and so ties that torch.topk breaks in no set order. The
order here is one of those that the published one allows.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels import support
from accel.kernels.simota.inputs import (
    INF_BITS,
    NUMBERS,
    Assignment,
    Boxes,
    Cells,
    Given,
    Predicted,
    Rules,
    cells_of,
    check_predicted,
    check_truths,
    corners,
    rules_of,
    validate,
)

_PAIRS = 1 << 18
"""Pairs of a batch up to which each is looked at; of more, columns and rows of the grid are: 10 times as fast."""


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

    The formula stands at the top of this module. On CUDA with triton it runs as five kernels: nothing waits for the
    device and every shape is fixed, so the call can be captured in a CUDA graph, and memory is O(B * A * C), never
    G * A. Elsewhere one image follows another. All arithmetic is fp32 whatever the inputs are, and nothing is
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
        chunk: has no effect, as a warning says; it was the number of ground truths worked on at once.
        check: look for NaN and infinities (without triton in the candidates only) and for wrong classes. Sides may be
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
    if chunk is not None:
        warnings.warn("simota_assign(chunk=) has no effect any more; leave it out", FutureWarning, stacklevel=2)
    rules = rules_of(variant)
    given = Given(boxes, cls, obj, points, strides, gt_boxes, gt_classes, gt_mask, candidates)
    if torch.compiler.is_compiling():
        with torch.no_grad():  # torch gives an operator a backward pass, which this one has not
            return Assignment(*assign_op(list(given), *flat(rules), xyxy, check))
    validate(given, rules)
    check = boxes.is_cpu if check is None else check
    if check:
        check_truths(gt_boxes, gt_classes, gt_mask, cls.shape[2], xyxy)
    if 0 in (*boxes.shape[:2], gt_boxes.shape[1]):
        return _background(boxes)
    if not support.runs_triton(boxes):
        return _by_images(given, rules, xyxy=xyxy, check=check)
    from accel.kernels.simota import launchers

    if check:
        _check_anchors(given, xyxy=xyxy)
    return launchers.assign(given, rules, xyxy=xyxy)


@torch.no_grad()
def _by_images(given: Given, rules: Rules, *, xyxy: bool, check: bool) -> Assignment:
    """Assign one image after the other by torch's operators, whose shapes follow from an image's candidates."""
    boxes, candidates, whole = given.boxes, given.candidates, _background(given.boxes)
    cells = cells_of(given.points, given.strides, rules.radius, boxes)
    is_large = boxes.shape[0] * boxes.shape[1] * given.gt_boxes.shape[1] > _PAIRS
    grid = _Grid.of(cells) if candidates is None and is_large else None
    for image in range(len(boxes)):
        gt, classes, real = _truths(given, image, xyxy)
        here = Cells(*(t[image if len(t) > 1 else 0] for t in cells))
        chosen = candidates[image] if candidates is not None else None if grid is None else grid.near(gt, rules)
        index, inside = _candidates(here, gt, rules, chosen)
        if len(index) == 0 or len(classes) == 0:
            continue
        mine = _predicted(given, image, index)
        near = corners(mine.boxes, xyxy)
        if check:
            check_predicted(mine, near, gt, image)
        iou = overlap(gt, near, rules.union_eps)
        taken, taker = _matched(_keys(iou, mine, classes, inside, rules), iou, rules)
        at = index.index_select(0, taken)
        whole.fg_mask[image].index_fill_(0, at, True)
        whole.matched_gt[image].index_copy_(0, at, taker if real is None else real.index_select(0, taker))
        whole.matched_iou[image].index_copy_(0, at, iou[taker, taken])
        whole.matched_class[image].index_copy_(0, at, classes.index_select(0, taker))
        whole.num_fg[image] = len(taken)
    return whole


def _check_anchors(given: Given, *, xyxy: bool) -> None:
    """Raise InvalidArgument for predictions that are not finite, of all anchors or of the given candidates."""
    for image in range(len(given.boxes)):
        index = torch.arange(given.boxes.shape[1], device=given.boxes.device)
        if given.candidates is not None:
            index = given.candidates[image].nonzero().view(-1)
        mine = _predicted(given, image, index)
        check_predicted(mine, corners(mine.boxes, xyxy), _truths(given, image, xyxy)[0], image)


def _truths(given: Given, image: int, xyxy: bool) -> tuple[Boxes, Tensor, Tensor | None]:
    """Return the ground truths of an image [G, 1], their classes [G], and which of the padded ones they are."""
    boxes = given.gt_boxes[image]
    classes = given.gt_classes[image].long().clamp(0, given.cls.shape[2] - 1)  # `check` raises for those out of range
    real = None if given.gt_mask is None else given.gt_mask[image].nonzero().view(-1)
    if real is not None:
        boxes, classes = boxes.index_select(0, real), classes.index_select(0, real)
    return corners(boxes, xyxy).map(lambda t: t[:, None]), classes, real


def _predicted(given: Given, image: int, index: Tensor) -> Predicted:
    """Return the predictions of some anchors of an image."""
    columns = (given.boxes, given.cls, given.obj)
    return Predicted(*(None if t is None else t[image].index_select(0, index) for t in columns))  # type: ignore[arg-type]


def _candidates(cells: Cells, gt: Boxes, rules: Rules, chosen: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the candidates [N], and which are in the region of each ground truth [G, N]; None: all.

    Args:
        cells: of all anchors of the image, [A] each.
        gt: its ground truths, [G, 1] each.
        rules: of the variant.
        chosen: [A] bool, the candidates; None to look at every pair.
    """
    if chosen is None:
        near, inside = regions_of(cells, gt, rules)
        index = near.any(0).nonzero().view(-1)
        return index, inside.index_select(1, index)
    index = chosen.nonzero().view(-1)
    if rules.region == "given":
        return index, None
    return index, regions_of(Cells(*(t.index_select(0, index) for t in cells)), gt, rules)[1]


def _keys(iou: Tensor, mine: Predicted, classes: Tensor, inside: Tensor | None, rules: Rules) -> Tensor:
    """Return the costs as integers of the same order [G, N], negative in the region."""
    p = mine.cls.to(torch.float32)  # a copy already
    if mine.obj is not None:
        p = p.sigmoid_().mul_(mine.obj.float().sigmoid()[:, None]).sqrt_()
    # 0 - log p: negated, log 1 would be the negative zero, whose sign bit is the region's.
    own = 0 - p.index_select(1, classes).log_().clamp_(min=-100)
    absent = p.neg_().log1p_().clamp_(min=-100)
    own += absent.index_select(1, classes).sub_(absent.sum(-1, keepdim=True)).clamp_(min=0)
    own = own.mul_(rules.cls_weight).transpose(0, 1)
    # An IoU that rounds to above 1 must not make a cost negative.
    price = iou.add(rules.log_eps).log_().mul_(-rules.iou_weight).add_(own).clamp_(min=0)
    return (price if inside is None else torch.where(inside, -price, price)).view(torch.int32)


def _matched(keys: Tensor, iou: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return the candidates that learn a box, in their order, and the ground truth of each."""
    most = min(rules.topk, keys.shape[1])
    k = iou.topk(most).values.sum(-1).to(torch.int32).clamp_(1, rules.topk)
    places = torch.arange(keys.shape[1], device=keys.device)
    top = keys.to(torch.int64).bitwise_left_shift_(32).add_(places).topk(most, largest=False).values
    gt, rank = ((places[:most] < k[:, None]) & (top >> 32 < INF_BITS)).nonzero().unbind(1)
    picked = top[gt, rank] & 0xFFFFFFFF
    takers = picked.bincount(minlength=keys.shape[1])
    taker = torch.zeros_like(takers).index_copy_(0, picked, gt)
    if len(keys) > 1:
        taker = torch.where(takers > 1, keys.min(0).indices, taker)
    taken = takers.nonzero().view(-1)
    return taken, taker.index_select(0, taken)


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


class _Grid(NamedTuple):
    """The distinct columns and rows of cells that all images share, and the place of each cell among their pairs."""

    columns: tuple[Tensor, Tensor]
    """Middles and reach."""
    rows: tuple[Tensor, Tensor]
    place: Tensor

    @classmethod
    def of(cls, cells: Cells) -> _Grid | None:
        """Return the grid of cells; None if they are of single images, or scattered."""
        if len(cells.x) > 1 or len(cells.reach) > 1:
            return None
        columns, column = _distinct(cells.x[0], cells.reach[0])
        rows, row = _distinct(cells.y[0], cells.reach[0])
        if len(columns) * len(rows) > 8 * len(column):
            return None
        return cls(_pairs(columns), _pairs(rows), column * len(rows) + row)

    def near(self, gt: Boxes, rules: Rules) -> Tensor:
        """Return the anchors near any ground truth [A]: their columns and their rows are near the same one."""
        (across, wide), (down, high) = self.columns, self.rows
        near = _both(_between(across, gt.x, wide), _between(down, gt.y, high))
        if rules.region == "box":
            near |= _both((across > gt.left) & (across < gt.right), (down > gt.top) & (down < gt.bottom))
        return near.flatten().index_select(0, self.place)


def _distinct(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct pairs of two fp32 as integers, and the index of each pair among them."""
    bits = low.contiguous().view(torch.int32).long()
    pairs: tuple[Tensor, Tensor] = torch.unique(
        high.contiguous().view(torch.int32).long() << 32 | bits, return_inverse=True
    )
    return pairs


def _pairs(bits: Tensor) -> tuple[Tensor, Tensor]:
    return (bits >> 32).int().view(torch.float32), (bits & 0xFFFFFFFF).int().view(torch.float32)


def _both(columns: Tensor, rows: Tensor) -> Tensor:
    """Return where a column [G, X] and a row [G, Y] share a ground truth, [X, Y]."""
    return columns.float().T @ rows.float() > 0


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
    given: list[Tensor | None], region: str, numbers: list[float], xyxy: bool, check: bool | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `simota_assign` with the rules taken apart."""
    topk, *others = numbers
    rules = Rules(region=region, topk=int(topk), **dict(zip(NUMBERS[1:], others, strict=True)))
    *tensors, candidates = given
    return tuple(simota_assign(*tensors, candidates=candidates, variant=rules, xyxy=xyxy, check=check))  # type: ignore[arg-type, return-value]


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
