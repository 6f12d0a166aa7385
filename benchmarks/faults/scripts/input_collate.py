"""Classify sentences that the collate function pads token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

BATCH = 64
WORDS = 2000

Sentence = tuple[Tensor, int]
Batch = tuple[Tensor, Tensor]


class Sentences(Dataset[Sentence]):
    """Sentences of 30 to 70 words in ten classes."""

    def __init__(self) -> None:
        rng = random.Random(0)
        self.lengths = [rng.randint(30, 70) for _ in range(4096)]
        self.tokens = [torch.randint(1, WORDS, (length,)) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sentence:
        return self.tokens[index], self.lengths[index] % 10


def pad_by_token(sentences: Sequence[Sentence]) -> Batch:
    """Pad to the longest sentence, one token at a time."""
    longest = max(len(tokens) for tokens, _ in sentences)
    padded = torch.zeros(len(sentences), longest, dtype=torch.int64)
    for row, (tokens, _) in enumerate(sentences):
        for column, token in enumerate(tokens.tolist()):
            padded[row, column] = token
    return padded, torch.tensor([label for _, label in sentences])


def pad_at_once(sentences: Sequence[Sentence]) -> Batch:
    """Pad to the longest sentence."""
    return pad_sequence([tokens for tokens, _ in sentences], True), torch.tensor([label for _, label in sentences])


class Reader(nn.Module):
    """Averages word vectors, then classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 128, mode="mean", padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(128, 1536), nn.ReLU(), nn.Linear(1536, 768), nn.ReLU())
        self.head = nn.Linear(768, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.words(tokens)))
        return scores


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    collate: Callable[[Sequence[Sentence]], Batch] = pad_at_once if options.fixed else pad_by_token
    loader = DataLoader(Sentences(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for tokens, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
