"""ResNet: full size ResNet-50 at 224x224, tiny ResNet-18 at 64x64.

Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks.suite.data import images
from benchmarks.suite.packages import timm
from benchmarks.suite.workload import Size, Workload


def make(size: Size) -> Workload:
    """Make the workload: 8 or 64 images a batch, SGD with momentum and weight decay."""
    model = timm().create_model({"tiny": "resnet18", "full": "resnet50"}[size], num_classes=100)
    loader = images(256, 64, 100, 8) if size == "tiny" else images(512, 224, 100, 64)
    return Workload(model, loader, SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4), cross_entropy)
