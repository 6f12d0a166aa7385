"""A small U-Net for segmentation, 128x128.

Source: Ronneberger et al., U-Net, MICCAI 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.suite.workload import Workload


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each with BatchNorm."""
    first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Three levels of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 16), block(16, 32), block(32, 64)])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.up = nn.ModuleList([block(64, 32), block(32, 16)])
        self.pool, self.drop, self.head = nn.MaxPool2d(2), nn.Dropout(0.1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes' scores for each pixel."""
        fine = self.down[0](x)
        middle = self.down[1](self.pool(fine))
        x = self.drop(self.down[2](self.pool(middle)))
        x = self.up[0](torch.cat([self.widen[0](x), middle], 1))
        return self.head(self.up[1](torch.cat([self.widen[1](x), fine], 1)))  # type: ignore[no-any-return]


def make() -> Workload:
    """Make the workload: 4 images a batch, Adam."""
    model = UNet()
    data = TensorDataset(torch.randn(256, 3, 128, 128), torch.randint(0, 2, (256, 128, 128)))
    return Workload(model, DataLoader(data, 4, shuffle=True), Adam(model.parameters()), cross_entropy)
