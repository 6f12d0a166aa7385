"""Compressors on their kernels against the same ones in plain torch: bytes sent, sums, residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from accel.comm.compressor import BlockCompressor
from accel.comm.compressor_memory import Slot
from accel.comm.dgc import largest
from accel.comm.int8 import Int8
from accel.comm.layout import Layout, Piece
from accel.comm.one_bit import OneBit
from accel.kernels import support
from tests.comm import test_top_k
from tests.kernels import interpreter

# The default, where some ranks have nothing; small blocks; one that no kernel takes.
KINDS = [Int8(64), OneBit(64), Int8(1024), OneBit(1024), Int8(100), OneBit(1000)]
RANKS = 3
EPS = torch.finfo(torch.float32).eps


class _Sent(Exception):
    """Ends a stage where it would wait for the others."""


class Replay:
    """A channel of one rank after another: the first run tells what each sends, the second one gets it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))
        self.others: list[list[Tensor]] | None = None
        self.own: list[list[Tensor]] = [[] for _ in range(size)]

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        if self.others is None:
            self.own[self.rank] = [one.clone() for one in sends]
            raise _Sent
        for r, into in enumerate(receives):
            if r != self.rank:
                into.copy_(self.others[r][self.rank])


class Given:
    """A channel to ranks whose bytes are known."""

    rank, size = 0, RANKS

    def __init__(self, told: Sequence[Tensor]) -> None:
        self.told = told

    def all_gather(self, own: Tensor, out: Sequence[Tensor]) -> None:
        for one, into in zip(self.told, out, strict=True):
            into.copy_(one)


@pytest.fixture
def kernels() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which CPU tensors run kernels."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; the interpreter is for machines without a GPU")
    if not support.has_triton():
        pytest.skip("needs triton, which is not installed")
    return interpreter.interpreted


def _piece(rank: int, numel: int, feedback: bool, device: str) -> Piece:
    layout = Layout(0, ("w",), (torch.Size([numel]),), torch.float32, True)
    generator = torch.Generator().manual_seed(rank)
    slot = Slot(layout, {})
    values, residual = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    if feedback:
        slot.fill("residual", residual.to(device))
    return Piece(values.to(device), layout, 0, numel, slot)


def _scattered(
    kind: BlockCompressor, numel: int, feedback: bool, device: str = "cpu"
) -> list[tuple[list[Tensor], Tensor, Tensor]]:
    """Return of each rank the bytes it sent, the bytes of its chunk's sum, and its residual."""
    channels = [Replay(rank, RANKS) for rank in range(RANKS)]
    for channel in channels:
        with pytest.raises(_Sent):
            kind._scatter(_piece(channel.rank, numel, feedback, device), channel)  # type: ignore[arg-type]
    everything = [channel.own[channel.rank] for channel in channels]
    found = []
    for channel in channels:
        channel.others = everything
        piece = _piece(channel.rank, numel, feedback, device)
        kind._scatter(piece, channel)  # type: ignore[arg-type]
        sent = [one.cpu() for r, one in enumerate(everything[channel.rank]) if r != channel.rank]
        left = piece.slot.write("residual") if feedback else piece.values.new_zeros(0)
        found.append((sent, piece.carry["encoded"][channel.rank].cpu(), left.cpu()))
    return found


def _decoded(kind: BlockCompressor, encoded: Tensor, numel: int) -> Tensor:
    out = torch.empty(numel)
    kind.decode(encoded, out)
    return out


@pytest.mark.sample(5)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("numel", [1, 100, 2049, pytest.param(3333, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_kernels_send_and_keep_what_plain_torch_does(
    kernels: Callable[[], AbstractContextManager[None]], kind: BlockCompressor, numel: int, feedback: bool
) -> None:
    plain = _scattered(kind, numel, feedback)
    with kernels():
        fused = _scattered(kind, numel, feedback)
    for (sent, total, left), (sent_too, total_too, left_too) in zip(plain, fused, strict=True):
        for one, other in zip(sent, sent_too, strict=True):
            assert one.shape == other.shape
            if isinstance(kind, Int8):
                assert torch.equal(one, other)
        assert total.shape == total_too.shape
        _near(kind, left, left_too, flips=0.002)
    _conserved(kind, numel, feedback, fused)


def _near(kind: BlockCompressor, one: Tensor, other: Tensor, flips: float) -> None:
    """Compare residuals: apart from roundings, but for the few elements whose code tips over."""
    roundings = 16 if isinstance(kind, Int8) else 4 * kind.block  # a mean is a sum in some order
    apart = (one - other).abs() > roundings * EPS * (1 + one.abs())
    assert apart.sum() <= flips * apart.numel()


def _conserved(
    kind: BlockCompressor, numel: int, feedback: bool, found: list[tuple[list[Tensor], Tensor, Tensor]]
) -> None:
    """What was applied and the residual are the sum of the values and the residual before."""
    if not feedback:
        return
    pieces = [_piece(rank, numel, True, "cpu") for rank in range(RANKS)]
    before = torch.stack([piece.values + piece.slot.read("residual") for piece in pieces])
    unit = kind.block
    units = -(-numel // unit)
    cuts = [min(units * r // RANKS * unit, numel) for r in range(RANKS + 1)]
    applied = torch.cat([_decoded(kind, found[r][1], cuts[r + 1] - cuts[r]) for r in range(RANKS)])
    after = applied.double() + torch.stack([left for _, _, left in found]).double().sum(0)
    # Each rank's values are rounded, encoded and summed: some ten roundings of what is at most the sum of magnitudes.
    bound = 32 * EPS * (before.abs().sum(0).double() + applied.abs() + 1)
    assert ((after - before.double().sum(0)).abs() <= bound).all()


def _gathered(kind: OneBit, numel: int, feedback: bool, device: str = "cpu") -> tuple[Tensor, list[Tensor], Tensor]:
    """Return what ranks that hear each other directly decode, each one's residual, and who used the second part."""
    told, left = [], []
    for rank in range(RANKS):
        piece = _piece(rank, numel, feedback, device)
        piece.carry["used"] = torch.tensor([1.0, float(rank == 1)], device=device)
        kind._encode_all(piece)
        told.append(piece.carry["own"])
        left.append(piece.slot.write("residual").cpu() if feedback else torch.zeros(0))
    kind._decode_all(piece, Given(told))  # type: ignore[arg-type]
    return piece.values.cpu(), left, piece.carry["used"].cpu()


def _same_gathered(kind: OneBit, numel: int, feedback: bool, found: tuple[Tensor, list[Tensor], Tensor]) -> None:
    plain = _gathered(kind, numel, feedback)
    assert found[2].tolist() == plain[2].tolist() == [1, 1]
    _near(kind, plain[0], found[0], flips=0.01)
    for one, other in zip(plain[1], found[1], strict=True):
        _near(kind, one, other, flips=0.01)
    if feedback:
        pieces = [_piece(rank, numel, True, "cpu") for rank in range(RANKS)]
        before = torch.stack([piece.values + piece.slot.read("residual") for piece in pieces]).double()
        after = found[0].double() + torch.stack(found[1]).double().sum(0)
        assert ((after - before.sum(0)).abs() <= 32 * EPS * (before.abs().sum(0) + found[0].abs() + 1)).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("numel", [1, 100, 2049])
@pytest.mark.parametrize("kind", [OneBit(64), OneBit(1024), OneBit(1000)], ids=repr)
def test_kernels_gather_what_plain_torch_does(
    kernels: Callable[[], AbstractContextManager[None]], kind: OneBit, numel: int, feedback: bool
) -> None:
    with kernels():
        found = _gathered(kind, numel, feedback)
    _same_gathered(kind, numel, feedback, found)


@pytest.mark.parametrize("kind", KINDS[:2], ids=repr)
def test_one_rank_alone_sends_nothing(
    kernels: Callable[[], AbstractContextManager[None]], kind: BlockCompressor
) -> None:
    piece = _piece(0, 100, True, "cpu")
    expected = piece.values + piece.slot.read("residual")
    with kernels():
        kind._scatter(piece, Replay(0, 1))  # type: ignore[arg-type]
    assert torch.equal(piece.values, expected)
    assert not piece.slot.write("residual").any()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_float64_takes_the_plain_way(
    kernels: Callable[[], AbstractContextManager[None]], kind: BlockCompressor
) -> None:
    values = torch.randn(500, dtype=torch.float64)
    room = [torch.empty(kind.encoded_bytes(500), dtype=torch.uint8) for _ in range(2)]
    for context, out in zip((nullcontext(), kernels()), room, strict=True):
        with context:
            kind.encode(values, out, None)
    assert torch.equal(room[0], room[1])


# Several blocks of a kernel, which take half a second: values that are one, equal across blocks, tiny, or no numbers.
SEVERAL_BLOCKS = ("in one place", "ties", "some denormal", "not finite")
LARGEST = [
    pytest.param(size, pattern, marks=[pytest.mark.slow] if size > 1000 and pattern not in SEVERAL_BLOCKS else [])
    for size in (1, 65, 1000, 9001)
    for pattern in test_top_k.patterns(8)
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "shares", [(1 / 300, 0.9), pytest.param((1e-4, 0.02, 1.0), marks=pytest.mark.slow)], ids=["two", "more"]
)
@pytest.mark.parametrize(("size", "pattern"), LARGEST)
def test_kernels_find_the_largest(
    kernels: Callable[[], AbstractContextManager[None]], size: int, pattern: str, shares: tuple[float, ...]
) -> None:
    values = test_top_k.patterns(size)[pattern]
    with kernels():
        for share in shares:
            test_top_k.check(values, max(int(size * share), 1))


@pytest.mark.gpu
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_gpu_sends_and_keeps_what_a_cpu_does(kind: BlockCompressor, feedback: bool) -> None:
    numel = 300_001
    plain, fused = _scattered(kind, numel, feedback), _scattered(kind, numel, feedback, "cuda")
    for (sent, _, left), (sent_too, _, left_too) in zip(plain, fused, strict=True):
        for one, other in zip(sent, sent_too, strict=True):
            assert one.shape == other.shape
            if isinstance(kind, Int8) and kind.block != 100:  # plain torch divides otherwise on CUDA
                assert torch.equal(one, other)
        _near(kind, left, left_too, flips=0.01)
    _conserved(kind, numel, feedback, fused)


@pytest.mark.gpu
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
def test_gpu_gathers_what_a_cpu_does(feedback: bool) -> None:
    kind, numel = OneBit(256), 300_001
    _same_gathered(kind, numel, feedback, _gathered(kind, numel, feedback, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", test_top_k.patterns(8))
def test_gpu_finds_the_largest(pattern: str) -> None:
    for size in (1, 65, 70_001):
        values = test_top_k.patterns(size)[pattern]
        for share in (1e-4, 1 / 300, 0.02, 0.9, 1.0):
            count = max(int(size * share), 1)
            found, expected = largest(values.cuda(), count).cpu(), largest(values, count)
            assert found.unique().numel() == expected.numel()
            magnitudes = [values[one].abs().nan_to_num(torch.inf).sort().values for one in (found, expected)]
            assert torch.equal(magnitudes[0], magnitudes[1])
