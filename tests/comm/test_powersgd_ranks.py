"""PowerSGD over ranks: the published recursions, the laws, and what DDP and GradScaler do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.comm.hooks import CommState
from accel.comm.powersgd import PowerSGD, noise
from tests.comm import cases
from tests.comm.few import few
from tests.comm.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")
RANK = 3


def small(**settings: Any) -> PowerSGD:
    return PowerSGD(**{"rank": RANK, "min_compression": 0, **settings})


def steps(rank: int, world: int, alternate: bool) -> tuple[list[Tensor], Tensor]:
    """Return what was applied at ten steps in float64, the first two of them plain, and the sum of residuals."""
    ddp, state = cases.make(small(alternate=alternate, start_step=2), torch.float64)
    got = [cases.backward(ddp, cases.gradients(rank, step, torch.float64)) for step in range(10)]
    left = cases.residual(state)
    state.close()
    return got, left


class Published:
    """The recursions of the papers for one matrix on all ranks: means of factors, error against the mean."""

    def __init__(self, shape: torch.Size, world: int, alternate: bool) -> None:
        self.m, self.n = shape[0], shape.numel() // shape[0]
        self.rank = min(RANK, self.m, self.n)
        self.errors = [torch.zeros(self.m, self.n, dtype=torch.float64) for _ in range(world)]
        self.q = noise(0, self.rank, self.n, torch.float64, CPU).T
        self.p = noise(0, self.rank, self.m, torch.float64, CPU).T
        self.alternate, self.turn = alternate, 0

    def step(self, gradients: list[Tensor]) -> Tensor:
        deltas = [g.view(self.m, self.n) + e for g, e in zip(gradients, self.errors, strict=True)]
        mean = sum(deltas) / len(deltas)
        if not self.alternate:
            basis = torch.linalg.qr(mean @ self.q).Q
            self.q = mean.T @ basis
            decoded = basis @ self.q.T
        elif self.turn == 0:
            basis = torch.linalg.qr(self.q).Q
            self.p = mean @ basis
            decoded = self.p @ basis.T
        else:
            basis = torch.linalg.qr(self.p).Q
            self.q = mean.T @ basis
            decoded = basis @ self.q.T
        self.turn = 1 - self.turn
        self.errors = [delta - decoded for delta in deltas]
        return decoded


@pytest.mark.parametrize("alternate", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["PowerSGD", "ACP-SGD"])
def test_ten_steps_on_three_ranks_are_those_of_the_papers(alternate: bool) -> None:
    world = 3
    found = run_ranks(steps, world, alternate)
    shapes = [torch.Size(shape) for shape in cases.Given.SHAPES]
    matrices = {i: Published(shape, world, alternate) for i, shape in enumerate(shapes) if len(shape) > 1}
    assert len(matrices) == 6
    if alternate:
        del matrices[7]  # 3 x 9 of rank 3 is complete
    for step in range(10):
        given = [cases.gradients(rank, step, torch.float64) for rank in range(world)]
        want = []
        for i, shape in enumerate(shapes):
            parts = [given[rank][i] for rank in range(world)]
            plain = step < 2 or i not in matrices
            want.append((sum(parts) / world if plain else matrices[i].step(parts)).reshape(shape))
        for got, _ in found:
            torch.testing.assert_close(got[step], cases.flat(want), rtol=1e-9, atol=1e-11)
    residuals = [
        sum(matrices[i].errors) / world if i in matrices else torch.zeros(shape, dtype=torch.float64)
        for i, shape in enumerate(shapes)
    ]
    torch.testing.assert_close(found[0][1], cases.flat(residuals), rtol=1e-9, atol=1e-11)


VARIANTS = {"PowerSGD, flat": (False, False), "PowerSGD, hosts": (False, True)} | {
    "ACP-SGD, flat": (True, False),
    "ACP-SGD, hosts": (True, True),
}
"""Whether factors alternate, and whether by hosts."""


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def flatten(state: dict[str, Any]) -> dict[Any, Tensor]:
        own = {(f, n, at): v for f, names in state["own"].items() for n, pieces in names.items() for at, v in pieces}
        return {**own, **{(f, n): v for f, names in state["shared"].items() for n, v in names.items()}}

    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[key], b[key]) for key in a)


@few(VARIANTS, ("PowerSGD, hosts", "ACP-SGD, flat"))
@on_ranks(4, per_host=2)
def test_void_steps_leave_residuals_and_factors_alone(rank: int, world: int, names: tuple[str, ...]) -> None:
    """Rank 1 has what is not finite, in matrices and in a bias; a run without these steps ends alike."""
    for name in names:
        alternate, hierarchical = VARIANTS[name]
        ends = []
        for bad in (False, True):
            ddp, state = cases.make(small(alternate=alternate), hierarchical=hierarchical, find_unused_parameters=True)
            for step in range(3):
                cases.backward(ddp, cases.gradients(rank, step))
            before = state.state_dict()
            # By turns, four void steps are an even number, so that the next factor is the same.
            for value, place in ((float("inf"), 6), (float("nan"), 4), (float("-inf"), 3), (float("nan"), 6)) * bad:
                given = cases.gradients(rank, 3)
                if rank == 1:
                    given[place].view(-1)[17] = value
                cases.backward(ddp, given)
                assert not torch.isfinite(ddp.module.p[place].grad.view(-1)[17]), (name, place)
                assert same_state(before, state.state_dict()), (name, place)
            ends.append((cases.backward(ddp, cases.gradients(rank, 4)), state.state_dict()))
            state.close()
        (want, wanted), (got, left) = ends
        assert torch.equal(want, got), name
        assert same_state(wanted, left), name


@on_ranks(2)
def test_other_settings_on_another_rank_are_named(rank: int, world: int) -> None:
    said = cases.message(lambda: CommState(cases.Given(), PowerSGD(1 + rank), timeout=cases.SECONDS))
    assert "all ranks must have the same compressor" in said
    assert "rank=2" in said
