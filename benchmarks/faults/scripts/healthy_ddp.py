"""A healthy control: two ranks, much arithmetic for few parameters."""

from __future__ import annotations

import torch
from common import Stopwatch, arguments
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 96


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,)))
    loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples))
    layers = nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10),
    )
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH * dist.get_world_size())
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            watch.lap()
            if watch.steps == options.steps:
                break
    if dist.get_rank() == 0:
        print(watch.line())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
