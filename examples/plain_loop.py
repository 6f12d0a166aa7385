"""The smallest loop: an image classifier on synthetic data, and one added line.

    python -m examples.plain_loop

accel prints a handful of lines to stderr when its search ends. With `ACCEL=0` in the environment the same script runs
without accel.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main() -> None:
    """Train for a few seconds on a CPU."""
    torch.set_num_threads(1)  # the operators are tiny: a second thread only waits, for seconds on a busy machine
    torch.manual_seed(0)
    classes = torch.randn(10, 3, 16, 16)
    labels = torch.randint(10, (2048,))
    images = classes[labels] + torch.randn(2048, 3, 16, 16)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    model, loader, optimizer = accel.optimize(model, loader, optimizer)  # the added line

    for epoch in range(20):
        total = 0.0
        for image, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.3f}", flush=True)


if __name__ == "__main__":
    main()
