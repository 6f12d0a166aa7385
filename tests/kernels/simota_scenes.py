"""Batches of images for SimOTA: random ones and those that are hard, and how a result is held to the published one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accel.kernels.simota import simota_assign
from accel.kernels.simota.inputs import Assignment, Rules
from tests.kernels import simota_oracle as oracle

CLASSES = 5


@dataclass
class Batch:
    """What `simota_assign` takes, by name."""

    boxes: Tensor
    cls: Tensor
    obj: Tensor | None
    points: Tensor
    strides: Tensor
    gt_boxes: Tensor
    gt_classes: Tensor
    gt_mask: Tensor
    candidates: Tensor | None = None

    def assign(self, variant: str | Rules = "yolox", **options: Any) -> Assignment:
        return simota_assign(**vars(self), variant=variant, **options)

    def change(self, do: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(**{name: value if value is None else do(value) for name, value in vars(self).items()})  # type: ignore[arg-type]

    def image(self, index: int) -> oracle.Image:
        """One image without its padding."""
        real = self.gt_mask[index]
        assert self.obj is not None
        return oracle.Image(
            self.boxes[index],
            self.cls[index],
            self.obj[index],
            self.points,
            self.strides,
            self.gt_boxes[index, real],
            self.gt_classes[index, real],
            None if self.candidates is None else self.candidates[index],
        )


def grid(size: int, strides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return middles [A, 2] and strides [A] of square levels."""
    points, levels = [], []
    for stride in strides:
        cells = (torch.arange(size // stride) + 0.5) * stride
        points.append(torch.cartesian_prod(cells, cells).flip(1))
        levels.append(torch.full((len(points[-1]),), float(stride)))
    return torch.cat(points), torch.cat(levels)


def scene(seed: int, gts: int, *, images: int = 2, size: int = 64, strides: tuple[int, ...] = (8, 16, 32)) -> Batch:
    """Return random images, 84 anchors each at the default; real and padded ground truths are mixed."""
    torch.manual_seed(seed)
    points, levels = grid(size, strides)
    anchors = len(points)
    wide = torch.rand(images, anchors, 2) * size * 0.6 + 1
    middle = points + (torch.rand(images, anchors, 2) - 0.5) * 2 * levels[:, None]
    gt_boxes = torch.cat([torch.rand(images, gts, 2) * size, torch.rand(images, gts, 2) * size * 0.6 + 1], -1)
    return Batch(
        torch.cat([middle, wide], -1),
        torch.randn(images, anchors, CLASSES) * 2 - 1,
        torch.randn(images, anchors) * 2,
        points,
        levels,
        gt_boxes,
        torch.randint(0, CLASSES, (images, gts)),
        torch.rand(images, gts) < 0.8,
    )


def no_truths(seed: int) -> Batch:
    found = scene(seed, seed % 3)  # G itself is 0 every third time
    return replace(found, gt_mask=torch.zeros_like(found.gt_mask))


def identical_truths(seed: int) -> Batch:
    found = scene(seed, 6)
    found.gt_boxes[:, 1::2] = found.gt_boxes[:, ::2]
    found.gt_classes[:, 1:3] = found.gt_classes[:, :1]  # ties to the lowest ground truth, and two classes for one box
    return found


def outside(seed: int) -> Batch:
    found = scene(seed, 5)
    found.gt_boxes[:, :3, :2] += 64  # partly, and wholly, past the right and bottom
    return found


def ties(seed: int) -> Batch:
    """Whole numbers, and predictions that repeat: every cost is held by several anchors."""
    found = scene(seed, 6)
    found.gt_boxes.mul_(0.25).ceil_().mul_(4)
    found.gt_boxes[:, 3:] = found.gt_boxes[:, :3]
    found.boxes[:] = torch.cat([found.points // 16 * 16 + 8, torch.full_like(found.points, 16.0)], -1)
    return replace(found, cls=torch.zeros_like(found.cls), obj=torch.zeros(found.boxes.shape[:2]))


def borders(seed: int) -> Batch:
    """Middles whose regions end at cells' middles: in by the published strict comparison, or out."""
    found = scene(seed, 5)
    found.gt_boxes[..., :2] = found.gt_boxes[..., :2].div(4).round() * 4
    found.gt_boxes[:, ::2, 2:] = found.gt_boxes[:, ::2, 2:].div(8).ceil() * 8
    # 8 + 12 and 16 + 24 are middles of cells; a step above 8 and 16 is none above those: the order of rounding shows.
    found.gt_boxes[:, 0, :2] = torch.tensor([8.0, 16.0])[:, None].nextafter(torch.tensor(99.0))
    found.gt_mask[:, 0] = True
    return found


def sharp(seed: int) -> Batch:
    """Predictions near the ground truths, as late in training: 3 to 10 anchors each. Half are exact, with IoU 1."""
    found = scene(seed, 3)
    found.gt_boxes.mul_(4).ceil_().div_(4)
    which = torch.randint(0, 3, found.boxes.shape[:2])
    found.boxes[:] = found.gt_boxes.gather(1, which[..., None].expand(-1, -1, 4))
    found.boxes[:, ::2] *= 1 + 0.1 * torch.rand(2, 42, 4)
    return found


def saturated(seed: int) -> Batch:
    """Probabilities that are 0 and 1 in fp32, where the logarithms are cut at -100."""
    found = scene(seed, 5)
    return replace(found, cls=found.cls * 20, obj=found.obj.mul(20))  # type: ignore[union-attr]


def specks(seed: int) -> Batch:
    """Boxes of hardly any area, where what is added to a logarithm and the least union decide."""
    found = scene(seed, 4)
    found.gt_boxes[..., 2:] = 10 ** (-1 - 3 * torch.rand(2, 4, 2))
    which = torch.randint(2, 4, (2, 28))  # the first two are met by large boxes, or by none
    found.boxes[:, ::3] = found.gt_boxes.gather(1, which[..., None].expand(-1, -1, 4))
    found.boxes[:, ::3, 2:] *= 1 + torch.rand(2, 28, 2)
    return found


def overflown(seed: int) -> Batch:
    """Sides that an exponential made infinite, as after a step too long: such a box overlaps with none."""
    found = scene(seed, 5)
    sides = found.boxes[..., 2:]
    sides[torch.rand(sides.shape) < 0.2] = torch.inf
    return found


def without_bounds(seed: int) -> Batch:
    """Ground truths as wide or as high as everything."""
    found = scene(seed, 5)
    found.gt_boxes[:, :2, 2 + seed % 2] = torch.inf
    return found


FAMILIES: dict[str, Callable[[int], Batch]] = {
    "random": lambda seed: scene(seed, 5),
    "one box": lambda seed: replace(scene(seed, 1), gt_mask=torch.ones(2, 1, dtype=torch.bool)),
    "none": no_truths,
    "identical": identical_truths,
    "outside": outside,
    "borders": borders,
    "tiny strides": lambda seed: scene(seed, 4, size=8, strides=(1, 2)),
    "one anchor": lambda seed: scene(seed, 3, size=8, strides=(8,)),  # fewer candidates than topk
    "few anchors": lambda seed: scene(seed, 7, size=24, strides=(8,)),  # most are wanted by several
    "sharp": sharp,
    "saturated": saturated,
    "specks": specks,
    "overflown": overflown,
    "without bounds": without_bounds,
}


def with_candidates(batch: Batch, variant: str) -> Batch:
    return replace(batch, candidates=torch.rand(batch.boxes.shape[:2]) < 0.4) if variant == "yolov7" else batch


def excused(batch: Batch, got: Assignment, variant: str) -> int:
    """Fail where an image differs from the published algorithm; return how many differ by rounding alone."""
    count = 0
    for index in range(len(batch.boxes)):
        real = batch.gt_mask[index].nonzero().flatten()
        want = oracle.assign(batch.image(index), variant)
        gts = torch.where(want.fg_mask, real[want.matched_gt.clamp(min=0)] if len(real) else -1, -1)
        same = (
            torch.equal(got.fg_mask[index], want.fg_mask)
            and torch.equal(got.matched_gt[index], gts)
            and torch.equal(got.matched_iou[index], want.matched_iou)
        )
        if not same:
            assert oracle.assign(batch.image(index).to(torch.float64), variant).margin < oracle.MARGIN
            count += 1
        fg = got.fg_mask[index]
        assert got.num_fg[index] == fg.sum()
        assert torch.equal(got.matched_class[index][fg], batch.gt_classes[index][got.matched_gt[index][fg]])
        assert (got.matched_class[index][~fg] == -1).all()
    return count


def equal(one: Assignment, other: Assignment) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def oracle_batch() -> tuple[Tensor, ...]:
    """Return a small batch in the order of the arguments."""
    torch.manual_seed(0)
    cells = (torch.arange(8) + 0.5) * 8
    points = torch.cartesian_prod(cells, cells).flip(1)
    boxes = torch.cat([points.expand(2, -1, -1) + torch.randn(2, 64, 2), torch.rand(2, 64, 2) * 20 + 4], -1)
    truths = torch.cat([torch.rand(2, 5, 2) * 64, torch.rand(2, 5, 2) * 20 + 4], -1)
    classes = torch.randint(0, 3, (2, 5))
    return boxes, torch.randn(2, 64, 3), torch.randn(2, 64), points, torch.full((64,), 8.0), truths, classes
