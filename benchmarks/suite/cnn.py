"""A convolutional network for 28x28 images, as in the MNIST example of pytorch/examples: dropout, Adadelta."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adadelta
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.suite.workload import Workload


def make() -> Workload:
    """Make the workload: 64 images a batch."""
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
    data = TensorDataset(torch.randn(6400, 1, 28, 28), torch.randint(0, 10, (6400,)))
    return Workload(model, DataLoader(data, 64, shuffle=True), Adadelta(model.parameters(), lr=1.0), cross_entropy)
