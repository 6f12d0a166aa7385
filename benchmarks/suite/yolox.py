"""A detector of YOLOX's kind: three levels, decoupled heads, targets by SimOTA.

Source: Ge et al., YOLOX: Exceeding YOLO Series in 2021.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss, one_hot
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from accel.kernels.simota import simota_assign
from benchmarks.suite.workload import Size, Workload

CLASSES, STRIDES = 20, (8, 16, 32)


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with BatchNorm and SiLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU(inplace=True)
    )


class Detector(nn.Module):
    """Predict a box, an objectness and classes for each cell of three levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, width, 2), block(width, 2 * width, 2))
        widths = [2 * width, 4 * width, 4 * width, 4 * width]
        self.stages = nn.ModuleList(nn.Sequential(block(a, b, 2), block(b, b)) for a, b in itertools.pairwise(widths))
        self.heads = nn.ModuleList(
            nn.Sequential(block(w, 2 * width), nn.Conv2d(2 * width, 5 + CLASSES, 1)) for w in widths[1:]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions [B, A, 5 + C]: offsets, log sizes, objectness, classes."""
        x = self.stem(x)
        levels = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            levels.append(head(x).flatten(2))
        return torch.cat(levels, 2).transpose(1, 2)


def cells(side: int) -> tuple[Tensor, Tensor]:
    """Return the middles [A, 2] and strides [A] of all cells, pixels."""
    points, strides = [], []
    for stride in STRIDES:
        axis = (torch.arange(side // stride) + 0.5) * stride
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        points.append(torch.stack((x, y), -1).flatten(0, 1))
        strides.append(torch.full((len(points[-1]),), float(stride)))
    return torch.cat(points), torch.cat(strides)


class Loss:
    """YOLOX's loss: targets by SimOTA; boxes, objectness and classes."""

    def __init__(self, side: int) -> None:
        self.points, self.strides = cells(side)

    def __call__(self, output: Tensor, truths: Tensor) -> Tensor:
        """Return the loss; ground truths [B, G, 5] are (x, y, width, height, class)."""
        points, strides = self.points.to(output.device), self.strides.to(output.device)
        scale = strides[:, None]
        boxes = torch.cat((output[..., :2] * scale + points, output[..., 2:4].clamp(max=4).exp() * scale), -1)
        objectness, scores = output[..., 4], output[..., 5:]
        gt_boxes, gt_classes = truths[..., :4], truths[..., 4].long()
        found = simota_assign(
            boxes.detach(), scores.detach(), objectness.detach(), points, strides, gt_boxes, gt_classes
        )
        near = found.fg_mask
        matched = gt_boxes.gather(1, found.matched_gt.clamp(min=0)[..., None].expand(-1, -1, 4))
        count = found.num_fg.sum().clamp(min=1)
        loss = binary_cross_entropy_with_logits(objectness, near.float(), reduction="sum")
        classes = one_hot(found.matched_class.clamp(min=0), CLASSES) * found.matched_iou[..., None]
        loss = loss + (binary_cross_entropy_with_logits(scores, classes, reduction="none") * near[..., None]).sum()
        loss = loss + 5 * (l1_loss(boxes, matched, reduction="none") / scale * near[..., None]).sum()
        return loss / count


def make(size: Size) -> Workload:
    """Make the workload: 4 images of 160x160 or 16 of 640x640 a batch, SGD with Nesterov momentum."""
    side, batch, width = (160, 4, 16) if size == "tiny" else (640, 16, 64)
    model = Detector(width)
    count, boxes = 16 * batch, 12
    middles, sizes = torch.rand(count, boxes, 2) * side, torch.rand(count, boxes, 2) * side / 3 + 8
    truths = torch.cat((middles, sizes, torch.randint(0, CLASSES, (count, boxes, 1))), -1)
    loader = DataLoader(TensorDataset(torch.randn(count, 3, side, side), truths), batch, shuffle=True)
    optimizer = SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return Workload(model, loader, optimizer, Loss(side))
