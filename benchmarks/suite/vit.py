"""Vision transformer: full size ViT-S/16 at 224x224, tiny six layers of 192 at 96x96; dropout 0.1.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from benchmarks.suite.data import images
from benchmarks.suite.packages import timm
from benchmarks.suite.workload import Size, Workload


def make(size: Size) -> Workload:
    """Make the workload: 16 or 64 images a batch, AdamW."""
    side = 96 if size == "tiny" else 224
    options = {"embed_dim": 192, "depth": 6, "num_heads": 3} if size == "tiny" else {"embed_dim": 384, "num_heads": 6}
    kind = timm().models.vision_transformer.VisionTransformer
    model = kind(img_size=side, patch_size=16, num_classes=100, drop_rate=0.1, proj_drop_rate=0.1, **options)
    return Workload(
        model, images(512, side, 100, 16 if size == "tiny" else 64), AdamW(model.parameters(), 3e-4), cross_entropy
    )
