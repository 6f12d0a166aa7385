"""One rank of test_gradient_lab.py, under torchrun: trains under accel on a shaped link, and prints what came of it."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel
from accel import strategies
from accel.comm.selection.offers import known_offers
from tests.comm.cases import same_everywhere

STEPS = 400


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 2))
    model = DistributedDataParallel(net)
    data = TensorDataset(torch.randn(1600, 512), torch.randn(1600, 2))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    others = [name for name in strategies.names() if not name.startswith("gradient_")]
    _, loader, _ = accel.optimize(
        model, loader, optimizer, allow="lossy", enable=("gradient_compression",), disable=others, budget=120
    )
    done = 0
    while done < STEPS:
        for x, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
            done += 1
            settled = [accel.explain(model).state != "searching"]
            if done % 10 == 0:
                dist.broadcast_object_list(settled, src=0)
                if settled[0]:
                    done = STEPS
                    break
    report = accel.explain(model)
    same = same_everywhere(torch.cat([p.detach().flatten() for p in net.parameters()]))
    if rank == 0:
        row = next(row for row in report.rows if row.name == "gradient_compression")
        found = {"status": row.status, "setting": row.setting, "gain": row.gain, "why": row.why, "same": same}
        print("RESULT " + json.dumps({**found, "speedup": report.speedup}), flush=True)
    accel.undo(model)
    offers = known_offers(model)
    assert offers is None or not offers.is_open
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
