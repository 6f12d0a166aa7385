"""PowerSGD over ranks: the published recursions, the laws, and what DDP and GradScaler do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compression.low_rank import noise
from accel.comm.hooks import CommState, hook
from accel.comm.powersgd import PowerSGD
from tests.comm import cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks

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
FEW = few(VARIANTS, ("PowerSGD, hosts", "ACP-SGD, flat"))


def laws(rank: int, world: int, names: tuple[str, ...]) -> dict[Any, Any]:
    """Train on random gradients at rank 2 and at the full one."""
    found = {}
    for name, k in itertools.product(names, (2, 1000)):
        alternate, hierarchical = VARIANTS[name]
        dtype = torch.float32 if hierarchical else torch.float64
        ddp, state = cases.make(small(rank=k, alternate=alternate), dtype, hierarchical=hierarchical)
        applied, wanted, errors, same = 0.0, 0.0, [], True
        for step in range(5):
            got = cases.backward(ddp, cases.gradients(rank, step, dtype)).double()
            want = cases.mean_gradient(world, step, dtype)
            same &= cases.same_everywhere(got)
            applied, wanted = applied + got, wanted + want
            errors.append(((got - want).norm() / want.norm()).item())
        left = cases.residual(state)
        found[name, k] = {
            "buckets": cases.buckets(state),
            "same": same,
            "error": max(errors),
            "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
            "residual": (left.norm() / wanted.norm()).item(),
        }
        state.close()
    return found


@FEW
def test_laws_flat_and_by_hosts_on_four_ranks(names: tuple[str, ...]) -> None:
    for rank, found in enumerate(run_ranks(laws, 4, names, per_host=2)):
        assert len(found) == 2 * len(names)
        for what, one in found.items():
            name, k = what
            eps = torch.finfo(torch.float32 if VARIANTS[name][1] else torch.float64).eps
            assert one["buckets"] >= 4, what
            assert one["same"], what
            if rank == 0:
                assert one["law"] < 100 * eps, what
            if k == 1000:  # all of the rank: the dense mean, to rounding
                assert one["error"] < 50 * eps, what
                assert one["residual"] < 100 * eps, what
            else:
                assert one["residual"] > 0.01, what


class Odd(nn.Module):
    """A convolution, a layer that is not used at some steps, one that never is, a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 16, 3)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(40, 40)
        self.empty = nn.Parameter(torch.zeros(0, 16))
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.convolution(x).relu().mean((2, 3))
        x = self.sometimes(x) if use else x
        return self.last(torch.cat([x, self.empty]))


def unused(rank: int, world: int) -> dict[Any, Any]:
    """Compare all of the rank with plain DDP where ranks use different layers, and note what rank 1 lacks."""
    found = {}
    for k, alternate in itertools.product((1, 1000), (False, True)):
        options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.001}
        plain, ddp = (DistributedDataParallel(Odd(), **options) for _ in range(2))
        state = CommState(ddp, small(rank=k, alternate=alternate), timeout=cases.SECONDS)
        ddp.register_comm_hook(state, hook)
        worst, same, applied, wanted = 0.0, True, 0.0, 0.0
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            x, use = torch.randn(4, 3, 6, 6), step != 2 and (step + rank) % 2 == 0
            grads = []
            for module in (plain, ddp):
                module.zero_grad(set_to_none=True)
                module(x, use).square().mean().backward()
                grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
            want, got = map(cases.flat, grads)
            worst = max(worst, ((got - want).norm() / want.norm()).item())
            same &= cases.same_everywhere(got)
            applied, wanted = applied + got, wanted + want
        kept = state.state_dict()["own"]["residual"]
        residuals = [torch.zeros(p.numel()) for p in ddp.module.parameters()]
        for whole, (name, _) in zip(residuals, ddp.module.named_parameters(), strict=True):
            for skipped, values in kept.get(name, []):
                whole[skipped : skipped + values.numel()] += values
        left = cases.flat(residuals)
        dist.all_reduce(left)
        law = ((applied + left - wanted).abs().max() / wanted.abs().max()).item()
        found[k, alternate] = {
            "error": worst,
            "same": same,
            "buckets": cases.buckets(state),
            "law": law,
            "residual": left.norm().item(),
        }
        state.close()
    return found


@pytest.mark.slow
def test_unused_and_empty_parameters() -> None:
    for found in run_ranks(unused, 2):
        for (k, _), one in found.items():
            assert one["buckets"] >= 2
            assert one["same"]
            assert one["error"] < (1e-5 if k == 1000 else 1.0)
            # Also after step 2, whose gradient of a layer DDP drops: no rank used it.
            assert one["law"] < 1e-5
            assert one["residual"] > 0.01 or k == 1000


def start(rank: int, world: int) -> dict[Any, Any]:
    """Return the error of each step, and the residual after it, by start_step."""
    found = {}
    for first, alternate in itertools.product((0, 1, 2, 3), (False, True)):
        ddp, state = cases.make(small(start_step=first, alternate=alternate))
        errors = []
        for step in range(5):
            got = cases.backward(ddp, cases.gradients(rank, step))
            want = cases.mean_gradient(world, step)
            errors.append((((got - want).norm() / want.norm()).item(), cases.residual(state).norm().item()))
        found[first, alternate] = errors
        state.close()
    return found


@pytest.mark.slow
def test_first_steps_are_plain_for_any_start_step() -> None:
    for found in run_ranks(start, 2):
        for (first, _), errors in found.items():
            for step, (error, residual) in enumerate(errors):
                assert (error < 1e-6) == (step < first)
                assert (residual == 0) == (step < first)


def void(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Give rank 1 what is not finite, in a matrix and then in a bias, and compare with a run without these steps."""
    found = {}
    for name in names:
        alternate, hierarchical = VARIANTS[name]
        arrived, ends = [], []
        for bad in (False, True):
            ddp, state = cases.make(small(alternate=alternate), hierarchical=hierarchical, find_unused_parameters=True)
            for step in range(3):
                cases.backward(ddp, cases.gradients(rank, step))
            before = state.state_dict()
            for value, place in ((float("inf"), 6), (float("nan"), 4), (float("-inf"), 3), (float("nan"), 6)):
                if not bad:
                    continue
                given = cases.gradients(rank, 3)
                if rank == 1:
                    given[place].view(-1)[17] = value
                cases.backward(ddp, given)
                grad = ddp.module.p[place].grad
                arrived.append(not torch.isfinite(grad.view(-1)[17]).item())
                after = state.state_dict()
                arrived.append(same_state(before, after))
            got = cases.backward(ddp, cases.gradients(rank, 4))
            ends.append((got, state.state_dict()))
            state.close()
        (want, wanted), (got, left) = ends
        found[name] = {
            "arrived": len(arrived) == 8 and all(arrived),
            "same bits": torch.equal(want, got),
            "same memory": same_state(wanted, left),
        }
    return found


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def flatten(state: dict[str, Any]) -> dict[Any, Tensor]:
        own = {(f, n, at): v for f, names in state["own"].items() for n, pieces in names.items() for at, v in pieces}
        return {**own, **{(f, n): v for f, names in state["shared"].items() for n, v in names.items()}}

    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[key], b[key]) for key in a)


@FEW
def test_void_steps_leave_residuals_and_factors_alone(names: tuple[str, ...]) -> None:
    for found in run_ranks(void, 4, names, per_host=2):
        assert tuple(found) == names
        for what, one in found.items():
            # By turns, four void steps are an even number, so that the next factor is the same.
            assert one == {"arrived": True, "same bits": True, "same memory": True}, what


def modes(rank: int, world: int) -> dict[str, Any]:
    """Compare all of the rank with the mean under DDP's options and dtypes, and by hosts."""
    options: dict[str, dict[str, Any]] = {
        "bucket views": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
        "float16": {"dtype": torch.float16},
        "bfloat16": {"dtype": torch.bfloat16},
        "one bucket": {"bucket_cap_mb": 25},
        "no_sync": {},
        "no feedback": {"error_feedback": False},
    }
    found = {}
    by_hosts = ("bucket views", "float16", "no_sync", "no feedback")
    runs = [(name, False) for name in options] + [(name, True) for name in by_hosts]
    for name, hierarchical in runs:
        option = options[name]
        dtype = option.get("dtype", torch.float32)
        ddp, state = cases.make(small(rank=1000), hierarchical=hierarchical, **option)
        worst, same = 0.0, True
        for step in range(3):
            given, want = cases.gradients(rank, step, dtype), cases.mean_gradient(world, step, dtype)
            if name == "no_sync":
                with ddp.no_sync():
                    ddp.zero_grad(set_to_none=True)
                    ddp(given).backward()
                ddp(given).backward()
                got, want = cases.flat([p.grad for p in ddp.parameters()]), 2 * want
            else:
                got = cases.backward(ddp, given)
            same &= cases.same_everywhere(got)
            worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
        factors = state.state_dict()["shared"]["right"]
        wide = {one.dtype for one in factors.values()}
        found[f"{name}, {'hosts' if hierarchical else 'flat'}"] = {"error": worst, "same": same, "factors": wide}
        state.close()
    return found


@pytest.mark.slow
def test_options_and_dtypes_of_ddp() -> None:
    bounds = {"float16": 2**-9, "bfloat16": 2**-6}
    for found in run_ranks(modes, 4, per_host=2):
        assert len(found) == 11
        for what, one in found.items():
            assert one["error"] < bounds.get(what.partition(",")[0], 1e-5), what
            assert one["same"], what
            assert one["factors"] == {torch.float32}, what


def settings_differ(rank: int, world: int) -> str:
    return cases.message(lambda: CommState(cases.Given(), PowerSGD(1 + rank), timeout=cases.SECONDS))


def test_other_settings_on_another_rank_are_named() -> None:
    for said in run_ranks(settings_differ, 2):
        assert "all ranks must have the same compressor" in said
        assert "rank=2" in said


def alone(rank: int, world: int) -> float:
    ddp, state = cases.make(PowerSGD(1, min_compression=0))
    got = cases.backward(ddp, cases.gradients(0, 0))
    state.close()
    return (got.double() - cases.mean_gradient(1, 0)).abs().max().item()


def test_one_rank_alone_gets_its_own_gradients() -> None:
    assert run_ranks(alone, 1) == [0.0]
