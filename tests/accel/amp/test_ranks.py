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
from accel.amp import DynamicLossScale, decorate, master_params, undecorate
from accel.errors import InvalidArgument
from accel import optim

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()


def train(after, dtype, make, as_view, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = make(model.parameters())
    scale = DynamicLossScale(initial=256.0) if dtype == torch.float16 else None
    if after:
        model = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    model, optimizer = decorate(model, optimizer, dtype=dtype, loss_scale=scale)
    for each in (model, model.module) if after else ():
        try:
            undecorate(each)
        except InvalidArgument as error:
            assert "before it is wrapped" in str(error)
        else:
            raise AssertionError("its buckets are of 16 bits")
    if not after:
        model = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (loss * torch.inf if step == 3 and rank == 1 and scale is not None else loss).backward()
        optimizer.step()
    if scale is not None:
        scale.settle()
        assert float(scale.value) == 128.0, scale.value
    flat = torch.cat([m.detach().flatten() for m in master_params(optimizer)])
    other = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(other, flat)
    assert torch.equal(*other)
    return flat


def clip_halves(as_view, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizers = [torch.optim.SGD(model[part].parameters(), 0.1, momentum=0.9) for part in (0, 2)]
    model = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    model, optimizers = decorate(model, optimizers, level=level, dtype=torch.float16, loss_scale=256.0)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        for optimizer in optimizers:
            nn.utils.clip_grad_norm_(master_params(optimizer), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return torch.cat([m.detach().flatten() for optimizer in optimizers for m in master_params(optimizer)])


for level in ("O1", "O2"):
    assert torch.equal(clip_halves(False, level), clip_halves(True, level))
for dtype in (torch.float16, torch.bfloat16):
    for make in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: optim.FusedAdamW(p, 0.01)):
        for as_view in (False, True):
            before, after = (train(after, dtype, make, as_view) for after in (False, True))
            assert torch.equal(before, after)
            # Weights of their own on each rank: those of the first are sent, with the bits that 16 have no room for.
            before, after = (train(after, dtype, make, as_view, seed=rank) for after in (False, True))
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
