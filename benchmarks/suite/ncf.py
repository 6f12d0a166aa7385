"""Neural collaborative filtering: two tables of embeddings and a small network.

Source: He et al., Neural Collaborative Filtering, WWW 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.suite.workload import Size, Workload


class NCF(nn.Module):
    """Score pairs of a user and an item."""

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(entries, width), nn.Embedding(entries, width)
        self.head = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, pairs: Tensor) -> Tensor:
        """Return a score for each row (user, item)."""
        both = torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1)
        return self.head(both).squeeze(1)  # type: ignore[no-any-return]


def make(size: Size) -> Workload:
    """Make the workload: 1,024 or 16,384 pairs a batch, dense gradients, Adam."""
    entries, width, batch = (80_000, 32, 1024) if size == "tiny" else (1_000_000, 64, 16_384)
    model = NCF(entries, width)
    data = TensorDataset(torch.randint(0, entries, (200 * batch, 2)), torch.randint(0, 2, (200 * batch,)).float())
    loader = DataLoader(data, batch, shuffle=True)
    return Workload(model, loader, Adam(model.parameters()), binary_cross_entropy_with_logits)
