"""Synthetic data for the suite: random, in memory, and of the shapes that the models take."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset


def images(count: int, side: int, classes: int, batch: int, channels: int = 3) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return batches of images [B, C, side, side] and their classes [B]."""
    data = TensorDataset(torch.randn(count, channels, side, side), torch.randint(0, classes, (count,)))
    return DataLoader(data, batch, shuffle=True)


def texts(count: int, tokens: int, vocabulary: int, batch: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return batches of tokens [B, N] and of those to predict [B, N], each the next one."""
    text = torch.randint(0, vocabulary, (count, tokens + 1))
    return DataLoader(TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), batch, shuffle=True)
