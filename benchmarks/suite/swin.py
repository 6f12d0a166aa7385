"""Swin transformer: full size Swin-T at 224x224, tiny three stages from 48 channels at 112x112; stochastic depth 0.2.

Source: Liu et al., Swin Transformer, ICCV 2021.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from benchmarks.suite.data import images
from benchmarks.suite.packages import timm
from benchmarks.suite.workload import Size, Workload


def make(size: Size) -> Workload:
    """Make the workload: 8 or 64 images a batch, AdamW."""
    options = {"img_size": 112, "embed_dim": 48, "depths": (2, 2, 2), "num_heads": (3, 6, 12)} if size == "tiny" else {}
    kind = timm().models.swin_transformer.SwinTransformer
    model = kind(num_classes=100, window_size=7, drop_path_rate=0.2, **options)
    loader = images(256, 112, 100, 8) if size == "tiny" else images(512, 224, 100, 64)
    return Workload(model, loader, AdamW(model.parameters(), 3e-4, weight_decay=0.05), cross_entropy)
