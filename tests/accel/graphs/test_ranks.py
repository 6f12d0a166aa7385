"""Under DistributedDataParallel: a model that was captured before or after it is wrapped learns as the eager one."""

from __future__ import annotations

from pathlib import Path

from tests import warm

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from accel.graphs import ModelCalls, model_calls
from tests.accel.graphs.tape import TapeRecorder

dist.init_process_group("gloo")
rank = dist.get_rank()


def capture(model):
    model_calls.capture_model(model, ModelCalls(model, warmup=2, recorder=lambda device: TapeRecorder()))


def train(captured, as_view, unused):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))
    if captured == "before":
        capture(inner)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=as_view, find_unused_parameters=unused)
    if captured == "after":
        capture(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(rank)
    for step in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        if step % 3 == 1:
            with model.no_sync():
                model(2 * x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    if captured:
        calls = model_calls.calls_of(inner)
        assert calls.captures == 1 and calls.replays > 4 and not calls.why_eager, vars(calls)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(other, flat)
    assert torch.equal(*other)
    return flat


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two, self.never = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        y = torch.tanh(self.body(x))
        return self.one(y), self.two(y)


def train_heads(captured, as_view):
    torch.manual_seed(0)
    inner = Heads()
    if captured:
        capture(inner)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=as_view, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x)[step // 4].square().mean().backward()  # one head is left out, then the other one
        optimizer.step()
        optimizer.zero_grad()
    if captured:
        assert model_calls.calls_of(inner).replays > 3
    return torch.cat([p.detach().flatten() for p in model.parameters()])


for as_view in (False, True):
    assert torch.equal(train_heads(False, as_view), train_heads(True, as_view))
for as_view, unused in ((False, True), (True, False)):
    eager, *captured = (train(when, as_view, unused) for when in ("", "before", "after"))
    assert all(torch.equal(eager, each) for each in captured)
if rank == 0:
    print("the same")
dist.barrier()
dist.destroy_process_group()
"""


def test_the_ranks_learn_the_same(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SCRIPT)
    first, second = warm.run_ranks(2, ["ranks.py"], cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == "the same\n"
