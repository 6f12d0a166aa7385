"""What the ranks of the tests of momentum with signs do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.hooks import CommState, hook
from accel.comm.one_bit import OneBit
from tests.comm.cases import SECONDS, OneBitTwice, same_everywhere
from tests.comm.dgc_cases import apart, void_steps
from tests.comm.dgc_training import SGD, Net, Training, groups, loss

BELOW = 40
WAYS: dict[str, tuple[type[OneBit], bool]] = {
    "direct": (OneBit, False),
    "twice": (OneBitTwice, False),
    "hosts": (OneBit, True),
}


def train(way: str, sgd: dict[str, Any] = SGD, momentum: bool = True, **options: Any) -> Training:
    kind, hierarchical = WAYS[way]
    compressor = kind(8, exact_below=BELOW, momentum=momentum, start_step=options.pop("start_step", 0))
    return Training(compressor, sgd, hierarchical=hierarchical, take=momentum, **options)


def as_dense(rank: int, world: int) -> dict[str, float]:
    """Send everything as it is: the largest difference of weights from dense SGD over 6 steps, relative."""
    found = {}
    for way in WAYS:
        for nesterov in (False, True):
            sgd = {**SGD, "weight_decay": 0.02, "nesterov": nesterov}
            run, plain, worst = train(way, sgd, start_step=100), Net(), 0.0
            other = torch.optim.SGD(groups(plain, sgd, None), lr=0.1)
            for step in range(6):
                got = run.step(rank, step)
                other.zero_grad()
                (sum(loss(plain, r, step) for r in range(world)) / world).backward()  # type: ignore[union-attr]
                other.step()
                want = torch.cat([p.detach().view(-1) for p in plain.parameters()])
                worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
            found[f"{way}, nesterov={nesterov}"] = worst
            run.close()
    return found


def law(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Add up what was decoded, what is left, and m u + g of every step; the first two steps are dense."""
    found = {}
    for way in names:
        run = train(way, start_step=2)
        plain, worst = Net(), 0.0
        sums = {n: torch.zeros(2, p.numel(), dtype=torch.float64) for n, p in run.net.named_parameters()}
        for step in range(6):
            run.sgd.zero_grad()
            velocity = run.own("velocity")
            plain.load_state_dict(run.net.state_dict())
            plain.zero_grad()
            loss(plain, rank, step).backward()
            own = dict(plain.named_parameters())
            loss(run.ddp, rank, step).backward()
            for n, p in run.net.named_parameters():
                sums[n][0] += p.grad.view(-1)  # type: ignore[union-attr]
                sums[n][1] += SGD["momentum"] * velocity[n] + own[n].grad.view(-1) / world  # type: ignore[union-attr]
            run.sgd.step()
        left, coarse = run.own("residual"), 0
        for n, p in run.net.named_parameters():
            total = torch.stack([left[n], sums[n][1]])
            dist.all_reduce(total)
            if run.state.compressor.is_dense(p.shape):  # type: ignore[attr-defined]
                worst = max(worst, float(total[0].abs().max()))
                continue
            coarse += bool(total[0].any())
            worst = max(worst, ((sums[n][0] + total[0] - total[1]).abs().max() / total[1].abs().max()).item())
        found[way] = {"law": worst, "coarse": coarse, "same": same_everywhere(run.weights())}
        run.close()
    return found


def void_step(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Meet steps that are void."""
    return {way: void_steps(train(way), rank) for way in names}


def unused(rank: int, world: int) -> dict[str, dict[str, bool]]:
    """Leave a layer out of some steps, on all ranks and on one."""
    found = {}
    for way in WAYS:
        for name, momentum, start_step in (("momentum", True, 0), ("dense", True, 9), ("without", False, 0)):
            run = train(way, momentum=momentum, start_step=start_step)
            if not momentum:
                run.sgd.param_groups[0]["momentum"] = 0.0  # that of the optimizer goes on, as in any SGD
            for step in range(2):
                run.step(rank, step)
            fields = ("velocity", "residual") if name == "momentum" else ("velocity",) if momentum else ("residual",)
            keep = lambda run=run, fields=fields: [run.own(field)["extra.weight"] for field in fields]  # noqa: E731
            before, weights = keep(), run.net.extra.weight.detach().clone()
            run.step(rank, 2, extra=False)
            one = {"stood": torch.equal(weights, run.net.extra.weight)}
            one["kept"] = all(map(torch.equal, before, keep())) and all(bool(x.any()) for x in before)
            one["same"] = same_everywhere(run.step(rank, 3, extra=rank == 0))
            one["went on"] = not torch.equal(before[0], keep()[0])
            found[f"{way}, {name}"] = one
            run.close()
    return found


def resume(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Stop after 4 of 8 steps and go on in new objects."""
    found = {}
    for way in WAYS:
        run = train(way, start_step=2)
        whole = [run.step(rank, step) for step in range(8)]
        run.close()
        run = train(way, start_step=2)
        for step in range(4):
            run.step(rank, step)
        saved = pickle.loads(pickle.dumps([run.state.state_dict(), run.sgd.state_dict(), run.net.state_dict()]))
        run.close()
        after = train(way, start_step=2)
        after.state.load_state_dict(saved[0])
        after.sgd.load_state_dict(saved[1])
        after.net.load_state_dict(saved[2])
        found[way] = {"same bits": all(torch.equal(whole[step], after.step(rank, step)) for step in range(4, 8))}
        after.close()
    return found


def scaled(rank: int, world: int) -> float:
    """Compare steps with and without a loss scale."""
    return max(apart(lambda given, way=way: train(way, scaler=given, start_step=1), rank) for way in WAYS)  # type: ignore[misc]


class Mixed(nn.Module):
    """A model in half precision but for one small parameter, whose bucket holds less than one block for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).float()[:, :3] * self.gain).sum()


def mixed(rank: int, world: int) -> dict[str, bool]:
    """Train it by hosts."""
    ddp = DistributedDataParallel(Mixed())
    state = CommState(ddp, OneBit(), hierarchical=True, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    given = torch.Generator().manual_seed(rank)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(2, 64, generator=given).bfloat16()).backward()
    state.close()
    gradients = {name: one.grad for name, one in ddp.module.named_parameters()}
    return {name: same_everywhere(one) and bool(one.isfinite().all()) for name, one in gradients.items()}
