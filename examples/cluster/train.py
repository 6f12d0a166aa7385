"""A job for `accel submit`: DistributedDataParallel on as many ranks as the cluster gives it, from where it was."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accel

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 30

torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.abs().sum(1, keepdim=True))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

# The two arguments that a cluster needs: where the job is saved, and how far its batch may grow with its ranks.
model, loader, optimizer = accel.optimize(
    model, loader, optimizer, elastic=accel.Elastic(checkpoint=os.environ["ACCEL_CHECKPOINT"], max_batch_size=512)
)
for epoch in accel.remaining_epochs(loader, EPOCHS):
    for image, label in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(image), label)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} on {dist.get_world_size()} ranks: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
