"""The models of the loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, Tensor]
"""The hidden state of an LSTM."""


def perceptron(features: int, width: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def convolutions(channels: int, *, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * channels, 10),
    )


class Recurrent(nn.Module):
    """LSTM classifier that takes and gives its hidden state."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, state = self.lstm(x, state)
        return self.head(y[:, -1]), state


class Classifier(nn.Module):
    """Small transformer encoder over tokens."""

    def __init__(self, words: int, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(ids) + self.position).mean(1))
        return out


class Bag(nn.Module):
    """Mean of word vectors, then a perceptron; called by keyword."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.head = perceptron(width, 2 * width, classes)

    def forward(self, *, ids: Tensor, mask: Tensor) -> Tensor:
        total = (self.embed(ids) * mask.unsqueeze(-1)).sum(1)
        out: Tensor = self.head(total / mask.sum(1, keepdim=True))
        return out


@dataclass
class Output:
    """What `Scorer` gives."""

    loss: Tensor
    logits: Tensor
    hidden: Tensor


class Scorer(nn.Module):
    """Computes its own loss, and gives a dataclass."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = self.body(x)
        logits = self.head(hidden)
        return Output(F.cross_entropy(logits, labels), logits, hidden)


class Language(nn.Module):
    """Language model whose output layer is its embedding: one parameter under two names."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.output.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.output(self.body(self.embed(ids))[0])
        return out
