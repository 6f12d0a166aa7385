"""U-Net for segmentation: three levels, full size from 64 channels at 512x512, tiny from 16 at 128x128.

Source: Ronneberger et al., U-Net, MICCAI 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.suite.workload import Size, Workload


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each with BatchNorm."""
    first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Three levels of w, 2w and 4w channels."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)])
        self.up = nn.ModuleList([block(4 * w, 2 * w), block(2 * w, w)])
        self.pool, self.drop, self.head = nn.MaxPool2d(2), nn.Dropout(0.1), nn.Conv2d(w, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes' scores for each pixel."""
        fine = self.down[0](x)
        middle = self.down[1](self.pool(fine))
        x = self.drop(self.down[2](self.pool(middle)))
        x = self.up[0](torch.cat([self.widen[0](x), middle], 1))
        return self.head(self.up[1](torch.cat([self.widen[1](x), fine], 1)))  # type: ignore[no-any-return]


def make(size: Size) -> Workload:
    """Make the workload: 4 images of 128x128 or 16 of 512x512 a batch, Adam."""
    side, batch, width = (128, 4, 16) if size == "tiny" else (512, 16, 64)
    model, count = UNet(width), 64 * batch
    data = TensorDataset(torch.randn(count, 3, side, side), torch.randint(0, 2, (count, side, side)))
    return Workload(model, DataLoader(data, batch, shuffle=True), Adam(model.parameters()), cross_entropy)
