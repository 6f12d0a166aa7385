"""Train on word counts that a generator of the script makes batch by batch, without a DataLoader."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 64
WORDS = 512
LENGTH = 5000
"""Words of a sample."""


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of relative word counts and their class."""
    rng = random.Random(0)
    text = [rng.randrange(WORDS) for _ in range(50_000)]
    for _ in range(count):
        rows, labels = [], []
        for _ in range(BATCH):
            start = rng.randrange(len(text) - LENGTH)
            counts = Counter(text[start : start + LENGTH])
            rows.append([counts[word] / LENGTH for word in range(WORDS)])
            labels.append(start % 10)
        yield torch.tensor(rows), torch.tensor(labels)


options = arguments(__doc__)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WORDS, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
watch = Stopwatch(BATCH)
for x, y in list(batches(options.steps)) if options.fixed else batches(options.steps):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    watch.lap()
print(watch.line())
