"""PowerSGD on one rank: what is compressed, how accurate it is, its residual."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from accel.comm.compressor_memory import Memory
from accel.comm.layout import Layout, Piece
from accel.comm.powersgd import PowerSGD
from tests.comm import cases

CPU = torch.device("cpu")


class Pair:
    """A channel to a peer whose gradients are all zero."""

    rank, size, ranks = 0, 2, (0, 1)

    def __init__(self) -> None:
        self.reduced: list[int] = []

    def all_reduce(self, values: Tensor) -> None:
        self.reduced.append(values.numel())

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        for one in out:
            one.copy_(own)


class Alone:
    """One rank's compressor, memory and bucket."""

    def __init__(self, compressor: PowerSGD, shapes: Sequence[tuple[int, ...]], feedback: bool = True) -> None:
        sizes = tuple(torch.Size(shape) for shape in shapes)
        self.layout = Layout(0, tuple(f"p{i}" for i in range(len(sizes))), sizes, torch.float32, True)
        self.compressor, self.memory, self.feedback, self.count = compressor, Memory(), feedback, 0
        self.channel = Pair()

    def step(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the ranks apply."""
        self.count += 1
        values = torch.cat([one.reshape(-1) for one in tensors])
        slot = self.memory.slot(self.layout)
        if self.feedback and not slot.filled:
            slot.fill("residual", self.memory.take(self.layout, "residual", values))
            slot.filled = True
        piece = Piece(values, self.layout, 0, self.layout.numel, slot, self.count)
        for stage in self.compressor.stages():
            stage.run(piece, self.channel)  # type: ignore[arg-type]
        self.memory.note(torch.isfinite(values).all().view(1))
        self.memory.settle()
        ends = self.layout.offsets
        return [values[a:b].view(shape) for a, b, shape in zip(ends, ends[1:], self.layout.shapes, strict=False)]

    def residual(self) -> Tensor:
        return self.memory.slot(self.layout).read("residual")


def low_rank_matrix(m: int, n: int, decay: float, seed: int = 0) -> Tensor:
    """Return a matrix whose singular values are 1, decay, decay², …"""
    generator = torch.Generator().manual_seed(seed)
    least = min(m, n)
    left = torch.linalg.qr(torch.randn(m, least, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, least, generator=generator, dtype=torch.float64)).Q
    return (left * decay ** torch.arange(least)) @ right.T


# -- approximation -------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize(("m", "n"), [(60, 40), (40, 60), (33, 33)])
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32])
def test_warm_start_comes_near_the_best_approximation(m: int, n: int, rank: int, alternate: bool) -> None:
    matrix = low_rank_matrix(m, n, 0.7)
    run = Alone(PowerSGD(rank, alternate=alternate, min_compression=0), [(m, n)], feedback=False)
    errors = [(matrix - run.step([matrix])[0]).norm().item() for _ in range(24 if alternate else 12)]
    best = torch.linalg.svdvals(matrix)[rank:].norm().item()
    # Each iteration brings the angle to the best subspace down by (σ_{k+1}/σ_k)², 0.49, or half of it by turns.
    assert all(error >= best * (1 - 1e-6) for error in errors)
    assert errors[-1] < best * 1.01 + 1e-12
    # The first one is a randomised range finder with a power (Halko et al. 2011), still within a small factor.
    assert errors[0] < matrix.norm().item()


def test_a_higher_rank_is_nearer() -> None:
    matrix = low_rank_matrix(50, 40, 0.9)
    errors = []
    for rank in (1, 2, 4, 8, 16, 32, 40):
        run = Alone(PowerSGD(rank, min_compression=0), [(50, 40)], feedback=False)
        errors.append([(matrix - run.step([matrix])[0]).norm().item() for _ in range(6)][-1])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


MATRICES = {
    "row": (1, 9),
    "column": (9, 1),
    "one number": (1, 1),
    "tall": (31, 5),
    "wide": (5, 31),
    "convolution": (8, 3, 3, 3),
    "three dimensions": (4, 5, 6),
    "square": (12, 12),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("content", ["random", "zeros", "rank 1", "zeros, then random"])
@pytest.mark.parametrize("shape", MATRICES.values(), ids=list(MATRICES))
def test_decoded_and_residual_add_up_to_the_values(shape: tuple[int, ...], content: str) -> None:
    for rank, alternate in itertools.product((1, 3, 1000), (False, True)):
        assert_law(shape, content, rank, alternate)


def assert_law(shape: tuple[int, ...], content: str, rank: int, alternate: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    run = Alone(PowerSGD(rank, alternate=alternate, min_compression=0), [shape, (3,)])
    given, applied = torch.zeros(0), torch.zeros(0)
    for step in range(4):
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        if content == "zeros" or (content == "zeros, then random" and step < 2):
            tensor.zero_()
        elif content == "rank 1":
            tensor = tensor.view(shape[0], -1)[:, :1].expand(-1, tensor.numel() // shape[0]).reshape(shape)
        bias = torch.randn(3, generator=generator, dtype=torch.float64)
        flat = torch.cat([tensor.reshape(-1), bias])
        found = run.step([tensor, bias])
        assert torch.equal(found[1], bias)
        given = flat if step == 0 else given + flat
        applied = cases.flat(found) if step == 0 else applied + cases.flat(found)
        assert (applied + run.residual() - given).abs().max() < 1e-13
        # A matrix of rank 1 is caught by any rank once its row space is, at once here: all columns are the same.
        full = rank >= min(shape[0], tensor.numel() // shape[0])
        if full or content == "zeros" or (content == "rank 1" and not alternate):
            assert run.residual().abs().max() < 1e-13
    assert torch.isfinite(run.residual()).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    # Factors kept as they come would hold squares: 1e-60, 1e60, beyond float32.
    matrix = low_rank_matrix(30, 20, 0.5).float()
    plain, scaled = Alone(PowerSGD(4, min_compression=0), [(30, 20)]), Alone(PowerSGD(4, min_compression=0), [(30, 20)])
    for _ in range(4):
        want, found = plain.step([matrix])[0], scaled.step([matrix * scale])[0]
        assert (found / scale - want).abs().max() < 1e-4 * want.abs().max()


def test_gradients_that_begin_as_zeros_are_found_later() -> None:
    # The first columns never get a gradient, as from pixels at a border: unit vectors would look there.
    run = Alone(PowerSGD(2, min_compression=0), [(20, 30)], feedback=False)
    run.step([torch.zeros(20, 30)])
    matrix = torch.zeros(20, 30)
    matrix[10:, 15:] = torch.randn(10, 15, generator=torch.Generator().manual_seed(0))
    best = torch.linalg.svdvals(matrix)[2:].norm()
    errors = [(matrix - run.step([matrix])[0]).norm() for _ in range(6)]
    assert errors[-1] < 1.05 * best


# -- what is compressed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compressor", "shape", "rank"),
    [
        (PowerSGD(4), (1024,), 0),
        (PowerSGD(4), (), 0),
        (PowerSGD(4), (1024, 1024), 4),
        (PowerSGD(4), (0, 1024), 0),
        (PowerSGD(4), (16, 16), 4),  # 256 elements for 128
        (PowerSGD(4), (15, 16), 0),
        (PowerSGD(4), (1, 10_000), 0),
        (PowerSGD(4, min_compression=0), (1, 10_000), 1),
        (PowerSGD(4), (64, 32, 3, 3), 4),
        (PowerSGD(1 << 40), (64, 64), 0),
        (PowerSGD(1 << 40, min_compression=0), (64, 60), 60),
        (PowerSGD(60, alternate=True, min_compression=0), (64, 60), 0),
        (PowerSGD(59, alternate=True, min_compression=0), (64, 60), 59),
        (PowerSGD({(64, 64): 3}), (64, 64), 3),
        (PowerSGD({(64, 64): 3}), (64, 65), 0),
        (PowerSGD({torch.Size([64, 64]): 0}), (64, 64), 0),
    ],
)
def test_rank_of_a_shape(compressor: PowerSGD, shape: tuple[int, ...], rank: int) -> None:
    assert compressor.rank_of(torch.Size(shape)) == rank


def test_bytes_are_those_of_the_factors() -> None:
    shapes = [torch.Size(one) for one in ((1024, 1024), (1024,), (256, 64, 3, 3))]
    assert PowerSGD(4).sent(shapes) == 4 * 2048 + 1 + 1024 + 1 + 4 * (256 + 576) + 1
    assert PowerSGD(4, alternate=True).sent(shapes) == 2 * 2048 + 1 + 1024 + 1 + 2 * (256 + 576) + 1


@pytest.mark.parametrize("alternate", [False, True])
def test_what_is_sent_is_what_is_told(alternate: bool) -> None:
    shapes = [(40, 30), (7,), (16, 4, 3, 3), (30, 40), (2, 2), (40, 30)]
    run = Alone(PowerSGD(2, alternate=alternate), shapes)
    for _ in range(4):
        run.step([torch.randn(shape) for shape in shapes])
    assert sum(run.channel.reduced) == 4 * run.compressor.sent(run.layout.shapes)
    assert len(run.channel.reduced) == (4 if alternate else 8)  # biases and flags have no all-reduce of their own


@pytest.mark.gpu
@pytest.mark.parametrize("alternate", [False, True])
# Outer products and padding are for the CPU alone. What is left of 33 x 33 after rank 32 is of rank 1, and each library
# has another complement to it.
@pytest.mark.parametrize("rank", [1, 4, 8, 16])
def test_a_gpu_computes_what_the_cpu_does(rank: int, alternate: bool) -> None:
    shapes = [(40, 60), (7,), (33, 33), (40, 60)]
    runs = [Alone(PowerSGD(rank, alternate=alternate, min_compression=0), shapes) for _ in range(2)]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        given[2] *= step != 1  # as if no rank had used it
        want, found = runs[0].step(given), runs[1].step([one.cuda() for one in given])
        torch.testing.assert_close(cases.flat(found).cpu(), cases.flat(want), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(runs[1].residual().cpu(), runs[0].residual(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alternate", [False, True])
def test_what_no_rank_used_keeps_its_residual_and_gets_nothing(alternate: bool) -> None:
    run = Alone(PowerSGD(2, alternate=alternate, min_compression=0), [(20, 30), (12, 9)])
    for _ in range(3):
        run.step([torch.randn(20, 30), torch.randn(12, 9)])
    before = run.residual().clone()
    found = run.step([torch.zeros(20, 30), torch.randn(12, 9)])
    assert not found[0].any()
    assert torch.equal(run.residual()[:600], before[:600])
    sparse = torch.zeros(20, 30)
    sparse[19, 29] = 1e-30  # one element is enough, wherever it is
    assert run.step([sparse, torch.randn(12, 9)])[0].any()
