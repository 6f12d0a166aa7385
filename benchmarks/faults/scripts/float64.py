"""Train on NumPy's double precision, with the model converted to match."""

from __future__ import annotations

import numpy as np
import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x_all = torch.from_numpy(rng.standard_normal((8192, 768)))
    y_all = torch.from_numpy(rng.integers(0, 10, 8192))
    model = nn.Sequential(nn.Linear(768, 1280), nn.ReLU(), nn.Linear(1280, 1024), nn.ReLU(), nn.Linear(1024, 10))
    if options.fixed:
        x_all = x_all.float()
    else:
        model = model.double()
    loader = DataLoader(TensorDataset(x_all, y_all), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH)
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    print(watch.line())


if __name__ == "__main__":
    main()
