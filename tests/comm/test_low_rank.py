"""Bases that are orthonormal whatever the rows, and products of any rank."""

from __future__ import annotations

import inspect

import pytest
import torch

from accel.comm.powersgd import add_product, noise, orthonormal

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]


def rows(kind: str, r: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return three matrices of a kind, (3, r, n)."""
    generator = torch.Generator().manual_seed(r * 100 + n)
    random = torch.randn(3, r, n, generator=generator, dtype=torch.float64)
    if kind == "equal rows":
        random[:, -1] = random[:, 0]
    elif kind == "nearly equal rows":
        random = random[:, :1] + 1e-9 * random
    elif kind == "one matrix of zeros":
        random[1] = 0
    elif kind == "one row of zeros":
        random[:, r // 2] = 0
    elif kind == "tiny and huge":
        random *= torch.tensor([1e-37, 1.0, 1e37]).double().view(3, 1, 1)
    elif kind == "few columns":
        random[:, :, 1:] = 0
    return random.to(dtype)


KINDS = (
    "random",
    "equal rows",
    "nearly equal rows",
    "one matrix of zeros",
    "one row of zeros",
    "tiny and huge",
    "few columns",
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES)
# One vector, one number, a square, more than one block of LAPACK's 32.
@pytest.mark.parametrize(("r", "n"), [(1, 1), (1, 7), (2, 2), (4, 33), (8, 1024), (40, 40), (70, 129)])
@pytest.mark.parametrize("kind", KINDS)
def test_orthonormal_whatever_the_rows(kind: str, r: int, n: int, dtype: torch.dtype) -> None:
    given = rows(kind, r, n, dtype)
    before = given.clone()
    basis = orthonormal(given, noise(0, r, n, dtype, CPU))
    assert torch.equal(given, before)
    eps = torch.finfo(dtype).eps
    assert (basis @ basis.mT - torch.eye(r, dtype=dtype)).abs().max() < 4 * eps * (r * n) ** 0.5
    # Every row is within what the basis spans.
    wide, span = given.double(), basis.double()
    lost = (wide - wide @ span.mT @ span).norm(dim=-1)
    assert (lost <= 20 * eps * n**0.5 * wide.norm(dim=-1)).all()


def test_no_matrix_disturbs_another_and_what_is_not_finite_stays_so() -> None:
    filler = noise(0, 4, 33, torch.float32, CPU)
    given = rows("random", 4, 33, torch.float32)
    alone = orthonormal(given[:1].clone(), filler)
    given[1, 2, 3] = float("inf")
    given[2, 0, 0] = float("nan")
    found = orthonormal(given, filler)
    assert torch.equal(found[0], alone[0])
    assert not torch.isfinite(found[1:]).all(-1).any()


def test_rows_of_zeros_become_those_of_the_filler() -> None:
    filler = noise(3, 2, 50, torch.float32, CPU)
    found = orthonormal(torch.zeros(1, 2, 50), filler)[0]
    assert (filler - filler @ found.T @ found).abs().max() < 1e-5
    assert (found.abs() > 1e-4).float().mean() > 0.9  # no unit vectors


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [*range(1, 18), 40])  # outer products to 4, padding to 16, then plain ones
@pytest.mark.parametrize("alpha", [1.0, -1.0, 0.5])
def test_products_of_any_rank(rank: int, alpha: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(rank, n, generator=generator, dtype=dtype) for n in (13, 29))
    target = torch.randn(13, 29, generator=generator, dtype=dtype)
    product = alpha * (left.double().T @ right.double())
    want = target.double() + product
    add_product(target, left, right, alpha)
    bound = 4 * torch.finfo(dtype).eps * rank
    assert (target.double() - want).abs().max() < bound * 10
    target.fill_(float("nan"))
    add_product(target, left, right, alpha, fresh=True)
    assert (target.double() - product).abs().max() < bound * 10


def test_noise_depends_on_its_arguments_alone() -> None:
    first = noise(0, 4, 10, torch.float32, CPU).clone()
    torch.manual_seed(5)
    assert torch.equal(inspect.unwrap(noise)(0, 4, 10, torch.float32, CPU), first), "as it was kept"
    assert torch.equal(noise(0, 2, 10, torch.float32, CPU), first[:2])
    assert not torch.equal(noise(1, 4, 10, torch.float32, CPU), first)
    assert torch.linalg.matrix_rank(noise(0, 40, 40, torch.float64, CPU)) == 40
