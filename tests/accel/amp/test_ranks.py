"""Under DistributedDataParallel: decorated before it is wrapped or afterwards, the ranks learn the same."""

from __future__ import annotations

from pathlib import Path

from tests import warm

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from accel.amp import DynamicLossScale, decorate, undecorate
from accel import optim

dist.init_process_group("gloo")
rank = dist.get_rank()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, by_other=False):
        return self.last(torch.tanh((self.other if by_other else self.first)(x)))


def train(after, dtype, make, as_view, seed=0):
    torch.manual_seed(seed)
    model = Branches()
    optimizer = make(model.parameters())
    scale = DynamicLossScale(init_scale=256.0) if dtype == torch.float16 else None
    options = {"gradient_as_bucket_view": as_view, "find_unused_parameters": True}
    if after:
        model = DistributedDataParallel(model, **options)
    model, optimizer = decorate(model, optimizer, dtype=dtype, loss_scale=scale)
    if not after:
        model = DistributedDataParallel(model, **options)
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(x, by_other=step > 0 and rank == 1).square().mean()
        (loss * torch.inf if step == 3 and rank == 1 and scale is not None else loss).backward()
        if step == 0:
            assert model.module.other.weight.grad is None  # as without mixed precision
        optimizer.step()
    if scale is not None:
        assert scale.state_dict()["scale"] == 128.0
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(other, flat)
    assert torch.equal(*other)
    undecorate(model)
    return flat


for dtype in (torch.float16, torch.bfloat16):
    for make in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: optim.FusedAdamW(p, 0.01)):
        for as_view in (False, True):
            for seed in (0, rank):  # weights of their own on each rank: those of the first are sent
                before, after = (train(after, dtype, make, as_view, seed) for after in (False, True))
                assert torch.equal(before, after)
if rank == 0:
    print("the same")
dist.barrier()
dist.destroy_process_group()
"""


def test_before_and_after_the_wrapper_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SCRIPT)
    first, second = warm.run_ranks(2, ["ranks.py"], cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == "the same\n"
