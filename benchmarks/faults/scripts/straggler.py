"""Train on two ranks, the last of which also watches the distribution of its activations."""

from __future__ import annotations

from typing import Any

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 64


def watch_activations(module: nn.Module, _inputs: Any, output: Tensor) -> None:
    """Keep the quantiles of what a layer gives."""
    values = output.detach().flatten()
    module.quantiles = torch.quantile(values, torch.tensor([0.01, 0.5, 0.99]))


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(8192, 256), torch.randint(10, (8192,)))
    loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples))
    layers = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10))
    if dist.get_rank() == dist.get_world_size() - 1 and not options.fixed:
        for layer in layers:
            layer.register_forward_hook(watch_activations)
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
