"""VGG: full size VGG-16 at 224x224, tiny six convolutions at 48x48; dropout before the last layers.

Source: Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015.
"""

from __future__ import annotations

from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks.suite.data import images
from benchmarks.suite.workload import Size, Workload

WIDTHS: dict[Size, tuple[tuple[int, ...], ...]] = {
    "tiny": ((32,), (64,), (128, 128), (256, 256)),
    "full": ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}


def vgg(widths: tuple[tuple[int, ...], ...], side: int, hidden: int, classes: int) -> nn.Sequential:
    """Return convolutions in stages, each ended by pooling, and three linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in widths:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    inputs = channels * (side >> len(widths)) ** 2
    layers.append(nn.Flatten())
    for taken in (inputs, hidden):
        layers += [nn.Linear(taken, hidden), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


def make(size: Size) -> Workload:
    """Make the workload: 16 or 64 images a batch, SGD with momentum."""
    side = 48 if size == "tiny" else 224
    model = vgg(WIDTHS[size], side, 512 if size == "tiny" else 4096, 100)
    loader = images(512, side, 100, 16 if size == "tiny" else 64)
    return Workload(model, loader, SGD(model.parameters(), 0.01, momentum=0.9), cross_entropy)
