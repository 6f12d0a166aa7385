"""PowerSGD against torch's own hook, where that one works: gloo, one bucket, finite gradients, no scalars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel.comm.hooks import CommState, hook
from accel.comm.powersgd import PowerSGD
from tests.comm import cases
from tests.comm.ranks import run_ranks

# The last matrix saves too little for rank 3, in both; a convolution counts as 8 x 27.
SHAPES = ((7,), (64, 16), (40, 40), (129,), (50, 21), (8, 3, 3, 3), (33, 5))
RANK, FIRST = 3, 4


class Given(nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.p, gradients, strict=True)]).sum()


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def take_over(theirs: PowerSGDState, order: list[int], world: int) -> dict[str, Any]:
    """Return the memory of torch's hook as a state of ours.

    Torch adds errors to gradients that are not divided by the number of ranks; its factors are (length, rank).
    """
    residual: dict[str, Any] = {}
    right: dict[str, Tensor] = {}
    errors, factors = theirs.error_dict[0], theirs.q_memory_dict[0]
    at, factor_at = 0, 0
    for i in order:
        shape = torch.Size(SHAPES[i])
        residual[f"p.{i}"] = [(0, errors[at : at + shape.numel()] / world)]
        at += shape.numel()
        if PowerSGD(RANK).rank_of(shape):
            columns = shape.numel() // shape[0]
            right[f"p.{i}"] = factors[factor_at : factor_at + columns * RANK].view(columns, RANK).T.contiguous()
            factor_at += columns * RANK
    assert at == errors.numel()
    assert factor_at == factors.numel()
    return {"version": 1, "own": {"residual": residual}, "shared": {"right": right}, "step": FIRST}


def both(rank: int, world: int) -> dict[str, Any]:
    """Go on from the memory of torch's hook with it and with ours, each with gradients of its own rank."""
    order: list[int] = []

    def torchs(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the classes
        place = {id(p): i for i, p in enumerate(their_ddp.module.p)}
        order[:] = [place[id(p)] for p in bucket.parameters()]
        return powerSGD_hook(state, bucket)

    their_ddp = DistributedDataParallel(Given())
    theirs = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    their_ddp.register_comm_hook(theirs, torchs)
    our_ddp = DistributedDataParallel(Given())
    ours = CommState(our_ddp, PowerSGD(RANK), timeout=cases.SECONDS)
    our_ddp.register_comm_hook(ours, hook)
    cases.backward(our_ddp, gradients(rank, 0))  # DDP makes its last buckets
    for step in range(FIRST):
        cases.backward(their_ddp, gradients(rank, step))
    ours.load_state_dict(take_over(theirs, order, world))
    errors, lossy = [], []
    for step in range(FIRST, FIRST + 8):
        want = cases.backward(their_ddp, gradients(rank, step))
        got = cases.backward(our_ddp, gradients(rank, step))
        dense = sum(cases.flat(gradients(r, step)) for r in range(world)) / world
        errors.append(((got - want).abs().max() / want.abs().max()).item())
        lossy.append(((want - dense).norm() / dense.norm()).item())
    ours.close()
    return {"errors": errors, "lossy": lossy}


def test_goes_on_as_torchs_hook_does() -> None:
    for found in run_ranks(both, 2):
        assert max(found["errors"]) < 1e-11
        assert min(found["lossy"]) > 0.3  # both compress
