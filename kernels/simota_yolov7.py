"""Batched SimOTA in the place of YOLOv7's own: `build_targets` of its OTA loss, for all images at once.

The loss keeps its own search for candidates (`find_3_positive`): anchors of a like shape in the cell of a box and those
next to it. What follows it, one image and one box at a time with a wait for the device for each, is one assignment
here. The loss is known by its methods; nothing of YOLOv7 is imported.
OTA: https://arxiv.org/abs/2103.14259, YOLOv7: https://arxiv.org/abs/2207.02696.

Shapes: B images, T targets, L levels, K candidates of all levels and images, N of an image at most, G its targets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.simota import simota_assign
from accel.profiler.errors import InvalidArgument

_NEEDED = ("build_targets", "find_3_positive", "nl", "stride")
_OTHERS = {
    "build_targets2": "has an auxiliary head, whose matching sums 20 overlaps where this one sums 10",
    "bin_count": "takes sizes from bins",
}
"""Attribute of a loss with other matching → what that does."""

Matched = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def patch_yolov7_loss(loss: Any) -> Any:
    """Let YOLOv7's OTA loss match its whole batch at once, in place: the same targets, without loops.

    Where candidates cost exactly the same, as those do that its search names twice, the first is taken; the published
    code leaves that to `topk`. A batch without targets gives empty tensors on the device of the predictions.

    Args:
        loss: a ComputeLossOTA, or a loss with its methods and attributes.

    Returns:
        The loss; `unpatch_yolov7_loss` changes it back.

    Raises:
        InvalidArgument: if it lacks a method or an attribute, or matches otherwise (ComputeLossAuxOTA,
            ComputeLossBinOTA); it is then as it was.

    Example:
        compute_loss_ota = patch_yolov7_loss(ComputeLossOTA(model))  # then train as before
    """
    wrong = [f"has no {name}" for name in _NEEDED if not hasattr(loss, name)]
    wrong += [does for name, does in _OTHERS.items() if hasattr(loss, name)]
    if wrong:
        raise InvalidArgument(
            f"patch_yolov7_loss: the loss must match as YOLOv7's ComputeLossOTA. Found: {type(loss).__name__}, which "
            f"{' and '.join(wrong)}. Leave it as it is, or call accel.simota_assign from its own."
        )
    unpatch_yolov7_loss(loss)
    vars(loss)["build_targets"] = functools.partial(_build_targets, loss)
    return loss


def unpatch_yolov7_loss(loss: Any) -> Any:
    """Restore a loss's own `build_targets`; one that was not patched stays as it is."""
    ours = vars(loss).get("build_targets")
    if isinstance(ours, functools.partial) and ours.func is _build_targets:
        del vars(loss)["build_targets"]
    return loss


class _Candidates(NamedTuple):
    """All candidates, those of an image together, level after level."""

    image: Tensor
    """[K], ascending."""
    level: Tensor
    cells: tuple[Tensor, ...]
    """Image, anchor, row and column, [K] each."""
    anchors: Tensor
    """[K, 2]."""
    boxes: Tensor
    """[K, 4] predicted corners, pixels."""
    scores: Tensor
    """[K, C], the joint probabilities."""


@torch.no_grad()
def _build_targets(loss: Any, p: Sequence[Tensor], targets: Tensor, imgs: Any) -> Matched:
    """Return image, anchor, row, column, target and anchor size of each match, a tensor a level."""
    candidates = _candidates(loss, p, *loss.find_3_positive(p, targets))
    batch = p[0].shape[0]
    mine = targets[(targets[:, 0] >= 0) & (targets[:, 0] < batch)]
    mine = mine[mine[:, 0].argsort(stable=True)]
    image_of = mine[:, 0].long()
    place, of_target = _places(candidates.image, batch), _places(image_of, batch)
    side = imgs.shape[2] if isinstance(imgs, Tensor) else mine.new_tensor([i.shape[1] for i in imgs])[image_of, None]
    matched = simota_assign(
        place.padded(candidates.boxes),
        place.padded(candidates.scores),
        None,
        None,
        None,
        of_target.padded(_corners(mine[:, 2:6] * side)),
        of_target.padded(mine[:, 1].long()),
        of_target.real,
        candidates=place.real,
        variant="yolov7",
        xyxy=True,
        check=False,  # values that are not finite show in the loss, where the loop handles them
    )
    chosen = place.packed(matched.fg_mask).nonzero().flatten()
    target = mine[of_target.begin[candidates.image[chosen]] + place.packed(matched.matched_gt)[chosen]]
    columns = (*(cell[chosen] for cell in candidates.cells), target, candidates.anchors[chosen])
    levels = [(candidates.level[chosen] == level).nonzero().flatten() for level in range(loss.nl)]
    bs, as_, gjs, gis, of_level, sizes = ([column[at] for at in levels] for column in columns)
    return bs, as_, gjs, gis, of_level, sizes


def _candidates(loss: Any, p: Sequence[Tensor], indices: Sequence[tuple[Tensor, ...]], anchors: Any) -> _Candidates:
    """Concatenate the candidates of all levels, decoded in the precision that the loss uses."""
    boxes, scores = [], []
    for (b, a, row, column), size, predicted, stride in zip(indices, anchors, p, loss.stride, strict=True):
        raw = predicted[b, a, row, column]
        middle = (raw[:, :2].sigmoid() * 2.0 - 0.5 + torch.stack((column, row), 1)) * stride
        extent = (raw[:, 2:4].sigmoid() * 2) ** 2 * size * stride
        boxes.append(_corners(torch.cat((middle, extent), -1)))
        scores.append((raw[:, 5:].float().sigmoid() * raw[:, 4:5].sigmoid()).sqrt())
    level = torch.cat([torch.full_like(own[0], number) for number, own in enumerate(indices)])
    cells = [torch.cat(column) for column in zip(*indices, strict=True)]
    order = cells[0].argsort(stable=True)
    image, *rest = (column[order] for column in cells)
    return _Candidates(
        image,
        level[order],
        (image, *rest),
        torch.cat(list(anchors))[order],
        torch.cat(boxes)[order],
        torch.cat(scores)[order],
    )


def _corners(boxes: Tensor) -> Tensor:
    """Return left, top, right and bottom of boxes by middle and size."""
    middle, half = boxes[:, :2], boxes[:, 2:] / 2
    return torch.cat((middle - half, middle + half), 1)


class _Places(NamedTuple):
    """Where the rows of images, one image after the other, stand in a table [B, most]."""

    slot: Tensor
    """[rows] into B · most."""
    begin: Tensor
    """[B]: first row of each image."""
    real: Tensor
    """[B, most] bool."""

    def padded(self, rows: Tensor) -> Tensor:
        """Return rows as a table, zeros where there is none."""
        out = rows.new_zeros((self.real.numel(), *rows.shape[1:]))
        return out.index_copy_(0, self.slot, rows).view(*self.real.shape, *rows.shape[1:])

    def packed(self, table: Tensor) -> Tensor:
        """Return the rows of a table."""
        return table.flatten(0, 1).index_select(0, self.slot)


def _places(image: Tensor, batch: int) -> _Places:
    counts = torch.bincount(image, minlength=batch)
    begin = counts.cumsum(0) - counts
    most = int(counts.max()) if batch else 0  # the one wait for the device
    inside = torch.arange(len(image), device=image.device) - begin[image]
    real = torch.arange(most, device=image.device) < counts[:, None]
    return _Places(image * most + inside, begin, real)
