"""Window attention in windows of several blocks of rows: kernels against fp64, their tiles, programs and plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from accel.kernels import support
from accel.kernels.launching import next_power_of_2
from accel.kernels.window_attention import Spec, window_attention
from accel.kernels.window_attention.regions import partition, shift_regions
from accel.kernels.window_attention.tiles import constants, tiles_of
from tests.kernels.test_window_attention import Layer, assert_close, kept_of

pytestmark = pytest.mark.skipif(not support.has_triton(), reason="needs triton, which is not installed")

HALF = torch.float16
WHOLE = {
    "1 x 80, shifted, half": Layer((1, 80), (0, 40), (3, 80), heads=1, channels=16, dtype=HALF),
    "1 x 144, shifted, half: parts of 128 and 16": Layer((1, 144), (0, 72), (3, 144), heads=1, channels=16, dtype=HALF),
    "7 x 7, fp32, head of 64, five windows": Layer((7, 7), (0, 3), (7, 35), heads=1, channels=64),
    "12 x 12, shifted, half": Layer((12, 12), (6, 6), (12, 24), heads=1, dtype=HALF),
    "12 x 12, cosine, half, head of 64": Layer((12, 12), (0, 0), (12, 12), 1, 64, HALF, cosine=True),
    "16 x 16, cosine, shifted, half": Layer((16, 16), (8, 8), (16, 16), 1, 32, HALF, cosine=True),
    "16 x 16, fp32, head of 16": Layer((16, 16), (0, 8), (16, 16), 1, 16),
    "9 x 9, shifted one way, three windows": Layer((9, 9), (4, 0), (27, 9), heads=1, channels=16, dtype=HALF),
    "10 x 12, oblong, fp32": Layer((10, 12), (5, 6), (10, 12), heads=1, channels=16),
    "11 x 11, two heads of 24, half": Layer((11, 11), (5, 5), (11, 11), heads=2, channels=24, dtype=HALF),
    "13 x 13, a tail of 64, half": Layer((13, 13), (6, 6), (13, 13), heads=1, channels=16, dtype=HALF),
}
"""By the tiles that a GPU runs: two and more blocks and parts, tails of 16, 64 and none."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("1 x 80") else [pytest.mark.slow]) for name in WHOLE]
)
def test_tiles_of_a_gpu_against_fp64(name: str, interpreted: None) -> None:
    layer = WHOLE[name]
    assert_close(layer.run(), layer.run(torch.float64), layer)  # fp64 takes the reference


# -- with tiles of 16 tokens, of which a small window has several ------------------------------------------------------


@pytest.fixture
def small_tiles(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let windows of more than 16 tokens be several blocks and parts: their tables have 39 entries in place of 529."""
    from accel.kernels.window_attention import attention, launchers
    from accel.kernels.window_attention.tiles import BlockTiles

    def sixteen(spec: Spec, channels: int, *_: Any, **__: Any) -> BlockTiles:
        return BlockTiles(spec.tokens, 16, 16, max(16, next_power_of_2(channels)), 8, 1)

    def forget() -> None:
        attention._checked_calls.clear()
        launchers._forward_plan.cache_clear()
        launchers._backward_plan.cache_clear()

    forget()
    monkeypatch.setattr(launchers, "is_one_block", lambda *_: False)
    monkeypatch.setattr(launchers, "block_tiles_of", sixteen)
    yield
    forget()


SMALL = {
    "a tail, shifted": Layer((3, 6), (1, 3), (6, 6), heads=1, channels=16),
    "no tail, half, shifted one way": Layer((4, 8), (2, 0), (4, 8), heads=1, channels=16, dtype=HALF),
    "not shifted, two heads of 24, no bias": Layer((3, 7), (0, 0), (3, 7), heads=2, channels=24),
    "cosine, shifted, half, three windows": Layer((1, 18), (0, 7), (3, 18), 1, 16, HALF, cosine=True),
    "cosine, three parts, two images": Layer((5, 7), (2, 3), (5, 7), 1, 16, cosine=True, batch=2),
    "one token": Layer((1, 1), (0, 0), (2, 2), heads=1, channels=16),
}
SMALL["not shifted, two heads of 24, no bias"].table.zero_()


QUICK = ("cosine, shifted, half, three windows", "one token")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SMALL]
)
def test_small_tiles_against_fp64(name: str, small_tiles: None) -> None:
    layer = SMALL[name]
    assert_close(layer.run(), layer.run(torch.float64), layer)


@pytest.mark.parametrize("cosine", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dot", "cosine"])
def test_dropout_by_replay(cosine: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel draws anew which weights are kept, those of the backward pass by rows and by columns."""
    layer = Layer((1, 18), (0, 7), (1, 36), heads=1, channels=16, cosine=cosine)
    kept = kept_of(layer, 0.4, seed=5)
    assert 0.5 < kept.double().mean() < 0.7
    torch.manual_seed(5)
    found = layer.run(dropout=0.4)
    monkeypatch.setattr(F, "dropout", lambda weights, rate: weights * kept / (1 - rate))
    assert_close(found, layer.run(torch.float64, dropout=0.4), layer)


@pytest.mark.slow
def test_regions_that_are_given_are_those_of_the_shift(small_tiles: None) -> None:
    """Any window may hold several of those, and not the last of a row or column alone."""
    layer = Layer((1, 18), (0, 7), (1, 36), heads=1, channels=16)
    layer.dout = torch.ones_like(layer.dout)
    rolled = layer.qkv.roll((0, -7), (1, 2))
    regions = shift_regions((1, 36), layer.window, layer.shift, torch.device("cpu"))
    qkv, table = partition(rolled, layer.window).clone().requires_grad_(), layer.table.clone().requires_grad_()
    out = window_attention(qkv, table, heads=1, window=layer.window, regions=regions)
    out.backward(torch.ones_like(out))

    whole = layer.run()
    wanted = [partition(whole[name].roll((0, -7), (1, 2)), layer.window) for name in ("out", "dqkv")]
    for found, expected in zip((out, qkv.grad, table.grad), (*wanted, whole["dtable"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# The least number of a dtype is a common mask; times log2(e) it is none of float32 any more.
MASKS = (float("-inf"), torch.finfo(torch.float32).min)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_a_mask_of_minus_infinity(tokens: int, mask: float, small_tiles: None) -> None:
    """With 40, the last 20 see none of the first part's 16: their running maximum is -inf until the second."""
    layer = Layer((1, tokens), (0, tokens // 2), (1, tokens), heads=1, channels=16, cosine=tokens == 20)
    assert_close(layer.run(mask_value=mask), layer.run(torch.float64, mask_value=mask), layer)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_minus_infinity_in_a_window_of_one_block(mask: float, interpreted: None) -> None:
    """Rows of the tile outside the window saw no key: they were NaN, and so were dk, dv and the scale's gradient."""
    layer = Layer((3, 3), (1, 1), (3, 3), heads=1, channels=16, cosine=True)
    assert_close(layer.run(mask_value=mask), layer.run(torch.float64, mask_value=mask), layer)


@pytest.mark.parametrize("mask", [*MASKS, -100.0, -1e300])
def test_masks_are_numbers_of_float32(mask: float) -> None:
    """A constant beyond its range would be float64 in a kernel, and not compile."""
    spec = Spec(heads=1, window=(7, 7), shift=(3, 3), scale=1.0, mask_value=mask)
    given = constants(spec, 32, torch.float16, tiles_of(spec, 32, torch.float16, cosine=False, backward=False))
    log2_mask = torch.tensor(given["LOG2_MASK"], dtype=torch.float64)
    assert torch.equal(log2_mask.float().double(), log2_mask) or mask == -100.0
    assert log2_mask.isinf() == (mask == float("-inf"))
    assert abs(given["LOG2_MASK"]) <= torch.finfo(torch.float32).max or mask == float("-inf")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of a maximum of NaN in the interpreter
def test_what_is_not_finite_stays_in_its_window(small_tiles: None) -> None:
    layer = Layer((3, 7), (0, 0), (9, 7), heads=1, channels=16)
    plain = layer.run()
    layer.qkv = layer.qkv.clone()
    layer.qkv[0, 4, 2] = float("nan")
    found = layer.run()
    for name in ("out", "dqkv"):
        windows = found[name].view(3, -1), plain[name].view(3, -1)
        assert windows[0][1].isnan().any()
        torch.testing.assert_close(windows[0][::2], windows[1][::2], rtol=0, atol=0)
    assert found["dtable"].isnan().any()


@pytest.mark.slow
def test_same_bits_every_time(small_tiles: None) -> None:
    layer = Layer((1, 20), (0, 7), (5, 20), heads=1, channels=16, cosine=True, dtype=HALF)
    first, second = layer.run(), layer.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_plans_are_made_once_for_a_shape(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.kernels.window_attention import launchers

    layer = Layer((1, 17), (0, 7), (1, 17), heads=1, channels=16)
    first = layer.run()

    def made_again(*_: Any) -> None:
        raise AssertionError("a plan was made for a shape that has one")

    with monkeypatch.context() as patched:
        patched.setattr(launchers._Layer, "of", made_again)
        assert all(torch.equal(tensor, first[name]) for name, tensor in layer.run().items())


# -- tiles and programs ------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 256),
    st.integers(1, 128),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from(["forward", "rows", "columns"]),
    st.booleans(),
    st.sampled_from([80, 86, 90, 100]),
)
def test_tiles_cover_a_window(tokens: int, channels: int, dtype: torch.dtype, kind: Any, cosine: bool, at: int) -> None:
    from accel.kernels.window_attention.tiles import block_tiles_of

    tiles = block_tiles_of(Spec(heads=1, window=(1, tokens)), channels, dtype, kind, cosine=cosine, capability=at)
    fixed = tiles.constants()
    whole = tokens // tiles.chunk
    widths = [tiles.chunk] * whole + [tiles.tail] * (tiles.tail > 0)
    assert len(widths) == fixed["PARTS"] and sum(widths) >= tokens > sum(widths[:-1])
    assert all(width >= 16 and width & (width - 1) == 0 for width in (*widths, tiles.rows, tiles.channels))
    assert tiles.blocks * tiles.rows >= tokens > (tiles.blocks - 1) * tiles.rows
    assert tiles.channels >= channels and fixed["NP"] >= tokens


@given(st.integers(1, 10_000), st.integers(1, 512), st.integers(1, 528))
def test_programs_share_the_windows(windows: int, groups: int, slots: int) -> None:
    from accel.kernels.window_attention.launchers import block_programs

    programs = block_programs(windows, groups, slots)
    assert 1 <= programs <= windows
    assert programs * groups < 4 * slots + groups, "more partial sums than four rounds of programs write"

    def rounds(number: int) -> int:
        return -(-number * groups // slots)

    # Never later than with one program for each block and head, or with as many as run at a time.
    for other in {1, min(windows, max(1, slots // groups))}:
        latest = rounds(other) * (-(-windows // other) + 8)
        assert rounds(programs) * (-(-windows // programs) + 8) <= latest


@pytest.mark.parametrize(("window", "heads", "most_megabytes"), [((12, 12), 6, 8), ((16, 16), 4, 8)])
def test_partial_sums_of_the_bias_gradient(window: tuple[int, int], heads: int, most_megabytes: int) -> None:
    """They were 44 and 138 MB on 132 cores, which the backward pass wrote zeros to at first."""
    from accel.kernels.window_attention.launchers import block_programs
    from accel.kernels.window_attention.tiles import block_tiles_of

    spec = Spec(heads=heads, window=window)
    tiles = block_tiles_of(spec, 32, HALF, "rows", cosine=False, capability=90)
    programs = block_programs(2048, heads * tiles.blocks, 132)
    assert 4e-6 * programs * heads * spec.tokens**2 <= most_megabytes
    assert programs * heads * tiles.blocks >= 100, "too few for the cores"


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [9, 11, 12, 16])
@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
def test_compiled_kernels_against_fp64(dtype: torch.dtype, window: int, cosine: bool) -> None:
    half = window // 2
    for channels in (16, 32, 64):
        layer = Layer((window, window), (half, half), (3 * window, 2 * window), 3, channels, dtype, cosine, 3, "cuda")
        assert_close(layer.run(), layer.run(torch.float64), layer)


@pytest.mark.gpu
def test_compiled_kernels_on_many_windows() -> None:
    """Programs take several windows each, and the partial sums of all are added."""
    layer = Layer((12, 12), (6, 6), (96, 96), heads=6, dtype=HALF, batch=8, device="cuda")
    assert_close(layer.run(), layer.run(torch.float64), layer)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [7, 16])
def test_compiled_kernels_with_a_mask_of_minus_infinity(window: int, mask: float) -> None:
    size = (window, window), (window // 2, window // 2), (2 * window, 2 * window)
    layer = Layer(*size, heads=3, dtype=HALF, batch=2, device="cuda")
    assert_close(layer.run(mask_value=mask), layer.run(torch.float64, mask_value=mask), layer)
