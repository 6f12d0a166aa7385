"""A detector of FCOS3D's kind: boxes in space from one image, one level of points for each map.

Source: Wang et al., FCOS3D: Fully Convolutional One-Stage Monocular 3D Object Detection, ICCV workshops 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot, smooth_l1_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from accel.kernels.fcos_targets import Fcos3dGts, FcosConfig, FcosPoints, fcos3d_targets
from benchmarks.suite.workload import Size, Workload
from benchmarks.suite.yolox import block

CLASSES, CODE, STRIDES = 10, 9, (8, 16, 32)
RANGES = ((-1.0, 48.0), (48.0, 96.0), (96.0, 1e8))


class Detector(nn.Module):
    """Predict classes, a box in space and its centerness for each point of three levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, width, 2), block(width, width, 2))
        self.stages = nn.ModuleList(
            nn.Sequential(block(w, 2 * width, 2), block(2 * width, 2 * width)) for w in (width, 2 * width, 2 * width)
        )
        self.head = nn.Sequential(block(2 * width, 2 * width), nn.Conv2d(2 * width, CLASSES + CODE + 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions [B, P, classes + code + 1]."""
        x = self.stem(x)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(self.head(x).flatten(2))
        return torch.cat(levels, 2).transpose(1, 2)


class Loss:
    """Classes, boxes and centerness against the targets of each point."""

    def __init__(self, height: int, width: int) -> None:
        self.sizes = [(height // stride, width // stride) for stride in STRIDES]
        self.config = FcosConfig(background=CLASSES)

    def __call__(self, output: Tensor, truths: Tensor) -> Tensor:
        """Return the loss; ground truths [B, G, 17] are laid out as in `truths_of`."""
        points = FcosPoints.regular(self.sizes, STRIDES, RANGES, output.device)
        targets = fcos3d_targets(points, truths_of(truths), self.config)
        scores, code, centerness = torch.split(output, [CLASSES, CODE, 1], -1)
        near = (targets.labels < CLASSES).float()
        count = near.sum().clamp(min=1)
        wanted = one_hot(targets.labels, CLASSES + 1)[..., :CLASSES].float()
        loss = binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
        loss = loss + (smooth_l1_loss(code, targets.boxes_3d, reduction="none") * near[..., None]).sum()
        even = binary_cross_entropy_with_logits(centerness.squeeze(-1), targets.centerness, reduction="none")
        return (loss + (even * near).sum()) / count


def truths_of(rows: Tensor) -> Fcos3dGts:
    """Return what rows hold: a box (4), its box in space (9), the centre on the image (2), depth, class."""
    boxes, boxes_3d, centers, depths, labels = torch.split(rows, [4, CODE, 2, 1, 1], -1)
    labels = labels.squeeze(-1).long()
    return Fcos3dGts(
        boxes, labels, torch.ones_like(labels, dtype=torch.bool), boxes_3d, centers, depths.squeeze(-1), labels
    )


def make(size: Size) -> Workload:
    """Make the workload: 2 images of 128x224 or 8 of 928x1600 a batch, SGD."""
    height, width, batch, channels = (128, 224, 2, 16) if size == "tiny" else (928, 1600, 8, 64)
    model, count, boxes = Detector(channels), 32 * batch, 10
    middles = torch.rand(count, boxes, 2) * torch.tensor([width, height])
    sizes = torch.rand(count, boxes, 2) * height / 3 + 8
    rows = [middles - sizes / 2, middles + sizes / 2, torch.randn(count, boxes, CODE), middles]
    rows += [torch.rand(count, boxes, 1) * 60, torch.randint(0, CLASSES, (count, boxes, 1))]
    data = TensorDataset(torch.randn(count, 3, height, width), torch.cat(rows, -1))
    return Workload(
        model, DataLoader(data, batch, shuffle=True), SGD(model.parameters(), 1e-3, momentum=0.9), Loss(height, width)
    )
