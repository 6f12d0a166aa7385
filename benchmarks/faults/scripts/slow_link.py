"""Train a network of many parameters and little arithmetic on two ranks whose link is slow for its gradients."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from common import Stopwatch, arguments
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 16
AVERAGE_EVERY = 100
"""Steps between two averages of the parameters when gradients are not exchanged (local SGD)."""


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(8192, 512), torch.randint(10, (8192,)))
    loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples))
    layers = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    watch = Stopwatch(BATCH * dist.get_world_size())
    while watch.steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            with model.no_sync() if options.fixed else nullcontext():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            if options.fixed and (watch.steps + 1) % AVERAGE_EVERY == 0:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()
            watch.lap()
            if watch.steps == options.steps:
                break
    if dist.get_rank() == 0:
        print(watch.line())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
