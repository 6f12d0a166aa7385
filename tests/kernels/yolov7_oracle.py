"""YOLOv7's OTA loss as its paper and its published behaviour describe it, one image and one box at a time.

Written anew (https://arxiv.org/abs/2207.02696), with plain loops, to hold the batched matching to. A target has as
candidates, on each level and for each anchor whose sides differ from its own by less than `anchor_t` times, the cell
it lies in and the two neighbours that its middle is nearest to.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

STRIDES = (8, 16, 32)
ANCHORS = (((12, 16), (19, 36), (40, 28)), ((36, 75), (76, 55), (72, 146)), ((142, 110), (192, 243), (459, 401)))
"""Pixels."""
NEIGHBOURS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (-0.5, 0.0), (0.0, -0.5))


class OtaLoss:
    """The attributes and methods of ComputeLossOTA that its matching uses."""

    def __init__(self, classes: int = 5, anchor_t: float = 4.0) -> None:
        self.na, self.nc, self.nl = 3, classes, len(STRIDES)
        self.stride = torch.tensor(STRIDES, dtype=torch.float32)
        self.anchors = torch.tensor(ANCHORS) / self.stride[:, None, None]
        self.hyp = {"anchor_t": anchor_t}

    def find_3_positive(self, p: list[Tensor], targets: Tensor) -> tuple[list[Any], list[Tensor]]:
        indices, anchors = [], []
        for level, pred in enumerate(p):
            rows, columns = pred.shape[2], pred.shape[3]
            found = [
                (int(target[0]), anchor, *cell)
                for neighbour in NEIGHBOURS
                for anchor in range(self.na)
                for target in targets.tolist()
                if (cell := self._cell(target, self.anchors[level][anchor].tolist(), columns, rows, neighbour))
            ]
            table = torch.tensor(found, dtype=torch.int64).view(-1, 4)
            indices.append(tuple(table.unbind(1)))
            anchors.append(self.anchors[level][table[:, 1]])
        return indices, anchors

    def _cell(
        self, target: list[float], anchor: list[float], columns: int, rows: int, neighbour: tuple[float, float]
    ) -> tuple[int, int] | None:
        """Return row and column of the cell beside a target's, None where it is no candidate there."""
        x, y, width, height = target[2] * columns, target[3] * rows, target[4] * columns, target[5] * rows
        ratios = [width / anchor[0], height / anchor[1]]
        if max(max(r, 1 / r) for r in ratios) >= self.hyp["anchor_t"]:
            return None
        for move, at, size in ((neighbour[0], x, columns), (neighbour[1], y, rows)):
            inside = at if move > 0 else size - at
            if move != 0 and not (inside % 1 < 0.5 and inside > 1):
                return None
        row, column = math.floor(y - neighbour[1]), math.floor(x - neighbour[0])
        return min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)

    def build_targets(self, p: list[Tensor], targets: Tensor, imgs: Tensor) -> tuple[list[Tensor], ...]:
        indices, anchors = self.find_3_positive(p, targets)
        levels: list[list[tuple[Any, ...]]] = [[] for _ in p]
        for image in range(p[0].shape[0]):
            mine = targets[targets[:, 0] == image]
            candidates = [
                (level, place, anchors[level][k])
                for level in range(self.nl)
                for k, place in enumerate(zip(*(column.tolist() for column in indices[level]), strict=True))
                if place[0] == image
            ]
            if len(mine) and candidates:
                for at, gt in self._matched(p, mine, candidates, imgs.shape[2]).items():
                    level, place, anchor = candidates[at]
                    levels[level].append((*place, mine[gt], anchor))
        return tuple([self._column(level, number, targets) for level in levels] for number in range(6))

    @staticmethod
    def _column(found: list[tuple[Any, ...]], number: int, targets: Tensor) -> Tensor:
        if number < 4:
            return torch.tensor([match[number] for match in found], dtype=torch.int64)
        width = targets.shape[1] if number == 4 else 2
        return torch.stack([match[number] for match in found]) if found else targets.new_zeros(0, width)

    def _matched(self, p: list[Tensor], targets: Tensor, candidates: list[Any], side: int) -> dict[int, int]:
        """Return candidate → target."""
        boxes, scores = [], []
        for level, (image, anchor, row, column), size in candidates:
            raw = p[level][image, anchor, row, column]
            middle = (2 * raw[:2].sigmoid() - 0.5 + torch.tensor([column, row])) * STRIDES[level]
            extent = (2 * raw[2:4].sigmoid()) ** 2 * size * STRIDES[level]
            boxes.append(torch.cat((middle - extent / 2, middle + extent / 2)))
            scores.append((raw[5:].sigmoid() * raw[4].sigmoid()).sqrt())
        ious = torch.stack([torch.stack([iou(corners(t[2:6] * side), box) for box in boxes]) for t in targets])
        costs = -3 * (ious + 1e-8).log()
        for gt, target in enumerate(targets):
            wanted = torch.zeros(self.nc)
            wanted[int(target[1])] = 1
            for at, y in enumerate(scores):
                costs[gt, at] += -(wanted * y.log() + (1 - wanted) * (1 - y).log()).sum()
        takers: dict[int, list[int]] = {}
        for gt, own in enumerate(costs.tolist()):
            k = max(1, int(ious[gt].topk(min(10, len(boxes))).values.sum()))
            for at in sorted(range(len(own)), key=own.__getitem__)[:k]:
                takers.setdefault(at, []).append(gt)
        return {at: gts[0] if len(gts) == 1 else int(costs[:, at].argmin()) for at, gts in sorted(takers.items())}


def corners(box: Tensor) -> Tensor:
    return torch.cat((box[:2] - box[2:] / 2, box[:2] + box[2:] / 2))


def iou(one: Tensor, other: Tensor) -> Tensor:
    width, height = (torch.minimum(one[2:], other[2:]) - torch.maximum(one[:2], other[:2])).clamp(min=0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return width * height / (areas[0] + areas[1] - width * height)


def batch_of(seed: int, counts: list[int], size: int = 96, classes: int = 5) -> SimpleNamespace:
    """Return predictions of each level, targets (image, class, x, y, width, height) and images."""
    draw = torch.Generator().manual_seed(seed)
    p = [torch.randn(len(counts), 3, size // s, size // s, 5 + classes, generator=draw) for s in STRIDES]
    rows = [
        torch.cat((torch.tensor([float(image), float(torch.randint(classes, (), generator=draw))]), _box(draw)))
        for image, count in enumerate(counts)
        for _ in range(count)
    ]
    targets = torch.stack(rows) if rows else torch.zeros(0, 6)
    targets = targets[torch.randperm(len(targets), generator=draw)]
    return SimpleNamespace(p=p, targets=targets, imgs=torch.zeros(len(counts), 3, size, size))


def _box(draw: torch.Generator) -> Tensor:
    return torch.cat((torch.rand(2, generator=draw), 0.05 + 0.6 * torch.rand(2, generator=draw)))
