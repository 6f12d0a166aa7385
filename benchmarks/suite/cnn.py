"""A convolutional network for 28x28 images, as in the MNIST example of pytorch/examples: dropout, Adadelta."""

from __future__ import annotations

from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adadelta

from benchmarks.suite.data import images
from benchmarks.suite.workload import Size, Workload


def make(size: Size) -> Workload:
    """Make the workload: 64 or 1,024 images a batch."""
    batch = 64 if size == "tiny" else 1024
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    loader = images(100 * batch, 28, 10, batch, channels=1)
    return Workload(model, loader, Adadelta(model.parameters(), lr=1.0), cross_entropy)
