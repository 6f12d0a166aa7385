"""Train and report the area under the ROC curve, with its bootstrap interval, every 25 steps."""

from __future__ import annotations

import random

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


def area_under_curve(scores: list[float], labels: list[float]) -> float:
    """Compare each positive sample with each negative one."""
    positive = [score for score, label in zip(scores, labels, strict=True) if label]
    negative = [score for score, label in zip(scores, labels, strict=True) if not label]
    wins = 0
    for high in positive:
        for low in negative:
            if high > low:
                wins += 1
    return wins / max(len(positive) * len(negative), 1)


def report(scores: list[float], labels: list[float], resamples: int = 14) -> str:
    """Return the area under the curve and how far it varies between resamples."""
    rng = random.Random(0)
    areas = []
    for _ in range(resamples):
        drawn = rng.choices(range(len(scores)), k=len(scores))
        areas.append(area_under_curve([scores[i] for i in drawn], [labels[i] for i in drawn]))
    return f"{sum(areas) / len(areas):.3f} [{min(areas):.3f}, {max(areas):.3f}]"


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(4096, 512), torch.randint(2, (4096,)).float())
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    scores: list[float] = []
    labels: list[float] = []
    reports: list[str] = []
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(out, y)
            loss.backward()
            optimizer.step()
            scores += out.detach().tolist()
            labels += y.tolist()
            if (watch.steps + 1) % 25 == 0:
                if not options.fixed:
                    reports.append(report(scores, labels))
                scores, labels = [], []
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
