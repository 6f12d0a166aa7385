"""A healthy control: a small transformer, data in memory."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 6
LENGTH = 64
WORDS = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed(self.norm_2(x))
        return out


class Language(nn.Module):
    """Predicts the next character."""

    def __init__(self, width: int = 192, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    text = torch.randint(WORDS, (1024, LENGTH + 1))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=BATCH, shuffle=True)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for words, following in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
