"""Window attention: kernels against fp64, the reference against the formula, and everything a caller may do wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from accel.kernels.window_attention import (
    Spec,
    cost,
    shifted_window_attention,
    window_attention,
    window_attention_ref,
)
from accel.kernels.window_attention.regions import merge, partition, relative_index, shift_regions
from tests.kernels.contract import opcheck

Window = tuple[int, int]


class Layer:
    """Inputs of one layer, rounded to the dtype under test, and what they give."""

    def __init__(
        self,
        window: Window = (7, 7),
        shift: Window = (3, 3),
        size: Window = (14, 14),
        heads: int = 2,
        channels: int = 32,
        dtype: torch.dtype = torch.float32,
        cosine: bool = False,
        batch: int = 1,
        device: str = "cpu",
    ) -> None:
        draw = torch.Generator().manual_seed(1)
        self.window, self.shift, self.heads, self.dtype = window, shift, heads, dtype
        entries = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.qkv = torch.randn(batch, *size, 3 * heads * channels, generator=draw).to(device, dtype)
        self.table = torch.randn(entries, heads, generator=draw).to(device)
        self.scale = (torch.rand(heads, generator=draw) * 3 + 1).to(device) if cosine else None
        self.dout = torch.randn(batch, *size, heads * channels, generator=draw).to(device, dtype)

    def run(self, dtype: torch.dtype | None = None, **options: Any) -> dict[str, Tensor]:
        """Return output and gradients; in another dtype from the same rounded inputs."""
        wide = dtype or torch.float32
        qkv = self.qkv.detach().to(dtype or self.dtype).requires_grad_()
        table = self.table.detach().to(wide).clone().requires_grad_()
        scale = None if self.scale is None else self.scale.detach().to(wide).clone().requires_grad_()
        out = shifted_window_attention(
            qkv, table, heads=self.heads, window=self.window, shift=self.shift, head_scale=scale, **options
        )
        out.backward(self.dout.to(out.dtype))
        found = {"out": out.detach(), "dqkv": qkv.grad, "dtable": table.grad}
        if scale is not None:
            found["dscale"] = scale.grad
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], layer: Layer) -> None:
    """Hold each tensor to k·eps·max|exact|: sums over a window in fp32, or one rounding to the dtype, twice."""
    assert found.keys() == exact.keys()
    tokens = layer.window[0] * layer.window[1]
    for name, tensor in found.items():
        # Gradients of small inputs are summed from rounded weights: their rounding counts as much as their own.
        eps = torch.finfo(layer.dtype).eps * (max(1, tokens) ** 0.5 if layer.dtype == torch.float32 else 1)
        # A head's scale has one gradient, a sum over all windows that mostly cancels: what is rounded in it does not.
        times = 8 if name == "dscale" else 2
        bound = times * eps * exact[name].abs().max()
        error = (tensor.double() - exact[name]).abs().max()
        assert error <= bound, f"{name}: {error:.2g} > {bound:.2g}"
        share = max(0.005, 8 * torch.finfo(layer.dtype).eps) if name == "dscale" else 0.005
        assert (tensor.double() - exact[name]).norm() <= share * exact[name].norm(), name


LAYERS = {
    "swin, shifted": Layer(size=(14, 7), heads=1),
    "swin, not shifted": Layer(shift=(0, 0), size=(7, 14)),
    "half": Layer((7, 7), (3, 3), (7, 14), heads=1, dtype=torch.float16),
    "half, head of 16": Layer(dtype=torch.float16, channels=16, size=(7, 7), heads=1),
    "half, head of 64": Layer(dtype=torch.float16, channels=64, heads=1),
    "head of no power of two": Layer(size=(7, 7), channels=24, heads=1),
    "head of 64: several row blocks of a small window": Layer(channels=64, size=(7, 7), heads=1),
    "window 8": Layer((8, 8), (4, 4), (8, 8), heads=1),
    "window 12: several row blocks": Layer((12, 12), (6, 6), (12, 24), heads=1),
    "window 12, half": Layer((12, 12), (6, 6), (24, 12), heads=1, dtype=torch.float16),
    "cosine": Layer((7, 7), (3, 3), (14, 7), heads=1, cosine=True),
    "cosine, half": Layer(cosine=True, dtype=torch.float16, heads=1),
    "cosine, window 12": Layer((12, 12), (6, 6), (12, 12), heads=1, cosine=True),
    "oblong window, shifted one way": Layer((3, 4), (1, 0), (6, 4), batch=2),
    "one token": Layer((1, 1), (0, 0), (2, 2), heads=1, channels=16),
    "one head of three, odd numbers": Layer((5, 3), (2, 1), (5, 6), heads=3, channels=8),
}
"""Every tile shape and flag of the kernels, no larger than it takes: a program costs 10 ms in the interpreter."""


# Each of their flags is in another layer too; several row blocks are those of a head of 64.
PAIRS = {
    *("window 12, half", "cosine, half", "cosine, window 12", "half, head of 16", "half, head of 64"),
    *("window 12: several row blocks", "swin, not shifted", "one head of three, odd numbers"),
}


@pytest.mark.sample(4, every_value=False)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in PAIRS else []) for name in LAYERS]
)
def test_kernels_against_fp64(name: str, interpreted: None) -> None:
    layer = LAYERS[name]
    assert_close(layer.run(), layer.run(torch.float64), layer)  # fp64 takes the reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_path_against_fp64(dtype: torch.dtype) -> None:
    layer = Layer(dtype=dtype, batch=2)
    assert_close(layer.run(), layer.run(torch.float64), layer)


def test_reference_is_the_formula() -> None:
    """Each output from its definition, token by token."""
    layer = Layer((2, 3), (1, 1), (4, 6), heads=2, channels=4)
    qkv = layer.qkv.double()
    out = shifted_window_attention(qkv, layer.table.double(), heads=2, window=(2, 3), shift=(1, 1))

    def band(at: int, size: int, window: int) -> int:
        return (at >= size - window) + (at >= size - 1)

    for y, x in [(0, 0), (1, 5), (3, 3), (3, 5)]:
        # Where the token stands in the rolled map, its window, and who shares that.
        ry, rx = (y - 1) % 4, (x - 1) % 6
        others = [(ry // 2 * 2 + a, rx // 3 * 3 + b) for a in range(2) for b in range(3)]
        for head in range(2):
            q = qkv[0, y, x].view(3, 2, 4)[0, head]
            scores, values = [], []
            for oy, ox in others:
                _, k, v = qkv[0, (oy + 1) % 4, (ox + 1) % 6].view(3, 2, 4)[:, head]
                entry = (ry - oy + 1) * 5 + (rx - ox + 2)
                apart = (band(oy, 4, 2), band(ox, 6, 3)) != (band(ry, 4, 2), band(rx, 6, 3))
                scores.append(q @ k * 0.5 + layer.table[entry, head].double() - 100.0 * apart)
                values.append(v)
            expected = torch.stack(scores).softmax(0) @ torch.stack(values)
            torch.testing.assert_close(out[0, y, x].view(2, 4)[head], expected)


@pytest.mark.parametrize("shift", [(0, 0), (1, 1)], ids=["not shifted", "shifted"])
@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
def test_gradcheck_of_the_reference(cosine: bool, shift: Window) -> None:
    layer = Layer((2, 2), shift, (4, 2), heads=2, channels=2, cosine=cosine)
    given = [layer.qkv, layer.table] if layer.scale is None else [layer.qkv, layer.table, layer.scale]
    inputs = [tensor.double().requires_grad_() for tensor in given]

    def call(qkv: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
        return shifted_window_attention(qkv, table, heads=2, window=(2, 2), shift=shift, head_scale=scale)

    assert torch.autograd.gradcheck(call, inputs)


def test_windows_that_were_cut_out_already(interpreted: None) -> None:
    layer = Layer((5, 3), (2, 1), (10, 6), heads=1, channels=16)
    rolled = layer.qkv.roll((-2, -1), (1, 2))
    regions = shift_regions((10, 6), (5, 3), (2, 1), torch.device("cpu"))
    cut = window_attention(partition(rolled, (5, 3)), layer.table, heads=1, window=(5, 3), regions=regions)

    found = merge(cut, (5, 3), (10, 6)).roll((2, 1), (1, 2))
    torch.testing.assert_close(found, layer.run()["out"], rtol=0, atol=0)


def test_same_bits_every_time(interpreted: None) -> None:
    # All flags, two windows a side whose tokens are no power of two, and every program twice: as few as there can be.
    layer = Layer((5, 3), (2, 1), (10, 6), heads=1, channels=16, cosine=True, dtype=torch.float16)
    first, second = layer.run(), layer.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_gradient_alone(interpreted: None) -> None:
    layer = Layer((2, 4), (0, 0), (2, 4), heads=1, channels=16, cosine=True)
    with_all = layer.run()
    assert layer.scale is not None
    for wanted in ("qkv", "table", "scale"):
        given = {"qkv": layer.qkv, "table": layer.table, "scale": layer.scale}
        given[wanted] = given[wanted].clone().requires_grad_()
        out = shifted_window_attention(given["qkv"], given["table"], heads=1, window=(2, 4), head_scale=given["scale"])
        out.backward(layer.dout)
        gradient = given[wanted].grad
        assert gradient is not None
        torch.testing.assert_close(gradient, with_all["d" + wanted], rtol=0, atol=0)


def test_inputs_that_are_not_contiguous(interpreted: None) -> None:
    layer = Layer((4, 4), (2, 2), (8, 4), heads=1, channels=16)
    spread = torch.stack([layer.qkv, layer.qkv], -1)[..., 0]
    table = layer.table.t().contiguous().t()
    assert not spread.is_contiguous()
    out = shifted_window_attention(spread, table, heads=1, window=(4, 4), shift=(2, 2))
    torch.testing.assert_close(out, layer.run()["out"], rtol=0, atol=0)


def test_a_head_scale_that_is_a_column(interpreted: None) -> None:
    """The kernels took the numbers that lie side by side in memory: what is no scale at all."""
    layer = Layer((2, 4), (0, 0), (2, 4), heads=2, channels=16, cosine=True)
    assert layer.scale is not None
    columns = torch.stack([layer.scale, 9 * layer.scale], 1).requires_grad_()
    out = shifted_window_attention(layer.qkv, layer.table, heads=2, window=(2, 4), head_scale=columns[:, 0])
    out.backward(layer.dout)
    plain = layer.run()
    torch.testing.assert_close(out, plain["out"], rtol=0, atol=0)
    assert columns.grad is not None
    torch.testing.assert_close(columns.grad[:, 0], plain["dscale"], rtol=0, atol=0)
    assert not columns.grad[:, 1].any()


@pytest.mark.parametrize("size", [(0, 7), (7, 0)])
def test_an_empty_map(size: Window, interpreted: None) -> None:
    layer = Layer(size=size)
    assert layer.run()["out"].shape == (1, *size, 64)


def test_no_images(interpreted: None) -> None:
    layer = Layer(batch=0)
    found = layer.run()
    assert found["out"].shape == (0, 14, 14, 64)
    assert not found["dtable"].any()


def test_no_windows_and_no_device() -> None:
    assert window_attention(torch.zeros(0, 49, 192), TABLE, **GOOD).shape == (0, 49, 64)
    assert shifted_window_attention(QKV.to("meta"), TABLE.to("meta"), **GOOD).shape == (1, 14, 14, 64)


def test_autocast_computes_in_its_dtype() -> None:
    layer = Layer()
    with torch.autocast("cpu", torch.bfloat16):
        out = shifted_window_attention(layer.qkv, layer.table, heads=2, window=(7, 7), shift=(3, 3))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer.run()["out"], rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_torch_compile_works_through_it(interpreted: None) -> None:
    layer = Layer((4, 4), (2, 2), (8, 4), heads=1, channels=16, cosine=True)
    plain = layer.run()
    eager = shifted_window_attention

    def compiled(*args: Any, **options: Any) -> Tensor:
        return torch.compile(eager, backend="aot_eager", fullgraph=True)(*args, **options)

    globals()["shifted_window_attention"] = compiled
    try:
        found = layer.run()
    finally:
        globals()["shifted_window_attention"] = eager
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("cosine", [pytest.param(False, marks=pytest.mark.slow), True], ids=["dot", "cosine"])
def test_the_operators_keep_their_contract(cosine: bool, interpreted: None) -> None:
    from accel.kernels.window_attention import op

    layer = Layer((4, 4), (0, 0), (4, 4), heads=1, channels=16, cosine=cosine)
    inputs = [None if t is None else t.requires_grad_() for t in (layer.qkv, layer.table, layer.scale)]
    arguments = (*inputs, None, None, [1, 4, 4, 0, 0], [0.25, -100.0, 0.0])
    opcheck(op._attend_op, arguments)
    opcheck(op._backward_op, (layer.dout, *arguments), test_utils=("test_schema", "test_faketensor"))


def test_flops_are_counted(interpreted: None) -> None:
    layer = Layer((4, 4), (2, 2), (8, 4), heads=1, channels=16)
    spec = Spec(heads=1, window=(4, 4))
    layer.run()  # the first call loads the kernels, and a counter knows the operators that there are when it is made
    counter = FlopCounterMode(display=False)
    with counter:
        layer.run()
    passes = [cost(2, spec, 16, 4, backward=backward).flops for backward in (False, True)]
    assert counter.get_total_flops() == sum(passes)
    with FlopCounterMode(display=False) as plain:
        layer.run(torch.float64)  # the reference: the products of a forward pass, and two for each backward
    assert plain.get_total_flops() == passes[0] * 3


# -- dropout -----------------------------------------------------------------------------------------------------------

IDENTITY = 16
"""Tokens of a 4 x 4 window and channels of its heads: with v = 1 the output is the weights."""


def weights_of(layer: Layer, dropout: float) -> Tensor:
    q, k, _ = layer.qkv.view(-1, IDENTITY, 3, 16).unbind(2)
    v = torch.eye(IDENTITY).expand_as(q)
    qkv = torch.stack([q, k, v], 2).reshape(-1, IDENTITY, 3 * 16)
    return window_attention(qkv, layer.table, heads=1, window=(4, 4), dropout=dropout)


def test_dropout_keeps_or_zeroes_and_scales(interpreted: None) -> None:
    layer = Layer((4, 4), (0, 0), (4, 64), heads=1, channels=16)
    torch.manual_seed(3)
    dropped, whole = weights_of(layer, 0.3), weights_of(layer, 0.0)
    kept = dropped != 0

    torch.testing.assert_close(dropped, kept * whole / 0.7)
    rates = kept.float()
    draws = kept.numel()
    # Five standard deviations, over all and for each row and column of a window.
    assert abs(rates.mean() - 0.7) < 5 * (0.21 / draws) ** 0.5
    for axis in (0, 1, 2):
        assert (rates.mean(axis) - 0.7).abs().max() < 5 * (0.21 / rates.shape[axis]) ** 0.5
    flat = (rates.flatten() - 0.7) / 0.21**0.5
    assert abs((flat[1:] * flat[:-1]).mean()) < 5 / draws**0.5, "neighbours are correlated"
    assert not torch.equal(kept[0], kept[1]), "windows share a mask"


def test_dropout_follows_the_seed(interpreted: None) -> None:
    layer = Layer((4, 4), (0, 0), (4, 8), heads=1, channels=16)
    torch.manual_seed(3)
    first, other = weights_of(layer, 0.5), weights_of(layer, 0.5)
    torch.manual_seed(3)
    assert torch.equal(weights_of(layer, 0.5), first)
    assert not torch.equal(other, first)


def kept_of(layer: Layer, dropout: float, seed: int) -> Tensor:
    """Return which weights [W, H, N, N] a seed keeps: with equal weights, and parts of the identity as v."""
    tokens, wide = layer.window[0] * layer.window[1], 64
    windows = layer.qkv.shape[:-1].numel() // tokens
    parts = []
    for part in F.pad(torch.eye(tokens), (0, -tokens % wide)).split(wide, 1):
        v = part[None, :, None].expand(windows, -1, layer.heads, -1)
        qkv = torch.stack([torch.zeros_like(v), torch.zeros_like(v), v], 2).flatten(2)
        torch.manual_seed(seed)
        table = torch.zeros_like(layer.table)
        out = window_attention(qkv, table, heads=layer.heads, window=layer.window, dropout=dropout)
        parts.append(out.unflatten(2, (layer.heads, wide)) != 0)
    return torch.cat(parts, -1)[..., :tokens].transpose(1, 2)


DROPPED = {
    "plain": Layer((4, 4), (0, 0), (4, 8), heads=2, channels=16),
    "half, shifted": Layer((4, 4), (2, 2), (8, 4), heads=1, channels=16, dtype=torch.float16),
    "cosine": Layer((4, 4), (2, 2), (8, 8), heads=1, channels=16, cosine=True),
    "several row blocks": Layer((4, 5), (2, 2), (4, 5), heads=1, channels=64),
    "several row blocks of a large window": Layer((9, 8), (4, 4), (9, 8), heads=1, channels=16),
    "several row blocks of a large window, half, cosine": Layer(
        (9, 8), (4, 4), (9, 8), 1, 16, torch.float16, cosine=True
    ),
}


@pytest.mark.sample(4, every_value=False)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "large window" in name else []) for name in DROPPED]
)
def test_dropout_gradients_by_replay(name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DROPPED[name]
    kept = kept_of(layer, 0.4, seed=5)
    assert 0.5 < kept.double().mean() < 0.7
    torch.manual_seed(5)
    found = layer.run(dropout=0.4)
    monkeypatch.setattr(F, "dropout", lambda weights, rate: weights * kept / (1 - rate))
    assert_close(found, layer.run(torch.float64, dropout=0.4), layer)  # fp64 takes the reference


def test_plain_path_drops_too() -> None:
    layer = Layer()
    torch.manual_seed(0)
    out = layer.run(dropout=0.5)["out"]
    assert not torch.equal(out, layer.run()["out"])


# -- what callers may do wrong -----------------------------------------------------------------------------------------

QKV, TABLE = torch.zeros(1, 14, 14, 192), torch.zeros(169, 2)
GOOD: dict[str, Any] = {"heads": 2, "window": (7, 7)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": QKV[0]}, r"must be \[B, Y, X, 3·H·D\].*Found: \[14, 14, 192\]"),
        ({"qkv": QKV[:, :13]}, "multiples of .* pad the map first"),
        ({"heads": 5}, "Found: 192 for 5 heads"),
        ({"heads": 0}, "for 0 heads"),
        ({"table": TABLE[:100]}, r"table must be \[169, 2\].*Found: \[100, 2\]"),
        ({"shift": (7, 0)}, r"shift must be in \[0, window\)"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\). Found: 1.0"),
        ({"head_scale": torch.ones(3)}, r"head_scale must be \[2\]. Found: \[3\]"),
        ({"head_scale": torch.ones(2), "scale": 1.0}, "not both"),
        ({"qkv": QKV.int()}, "must be floating point. Found: torch.int32"),
        ({"table": TABLE.int()}, r"table must be floating point, it is learned. Found: torch.int32.*\.float\(\)"),
        ({"head_scale": torch.ones(2, dtype=torch.int64)}, "head_scale must be floating point.*Found: torch.int64"),
        ({"table": TABLE.to("meta")}, "table must be on qkv's device, cpu. Found: meta"),
        ({"window": 7}, "window must be two whole numbers.*Found: 7"),
        ({"window": (0, 7)}, "at least 1 token"),
        ({"qkv": torch.zeros(1, 17, 17, 6), "window": (17, 17), "table": torch.zeros(1089, 2)}, "1 to 256 tokens"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"qkv": QKV, "table": TABLE, **GOOD, **changes}
    with pytest.raises(ValueError, match=message):
        shifted_window_attention(given.pop("qkv"), given.pop("table"), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(4, 48, 192)}, r"must be \[windows, 49, 3·H·D\].*Found: \[4, 48, 192\]"),
        ({"regions": torch.zeros(3, 49, dtype=torch.uint8)}, "divisor of 4 windows"),
        ({"regions": torch.zeros(2, 49)}, "must be uint8"),
    ],
)
def test_windows_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"qkv": torch.zeros(4, 49, 192), **GOOD, **changes}
    with pytest.raises(ValueError, match=message):
        window_attention(given.pop("qkv"), TABLE, **given)


def test_cost() -> None:
    spec = Spec(heads=3, window=(7, 7))
    forward, backward = cost(8192, spec, 32, 2), cost(8192, spec, 32, 2, backward=True)
    assert forward.bytes == pytest.approx(308e6, rel=0.01)
    assert backward.bytes == pytest.approx(540e6, rel=0.01)
    assert forward.flops == pytest.approx(7.6e9, rel=0.02)


def test_reference_agrees_with_sdpa() -> None:
    """The best plain torch: bias and mask folded into one tensor for scaled_dot_product_attention."""
    layer = Layer(batch=2)
    spec = Spec(heads=2, window=(7, 7), scale=32**-0.5)
    cut = partition(layer.qkv, (7, 7))
    regions = shift_regions((14, 14), (7, 7), (3, 3), torch.device("cpu"))
    found = window_attention_ref(cut, layer.table, None, regions, spec)

    q, k, v = cut.view(8, 49, 3, 2, 32).permute(2, 0, 3, 1, 4)
    bias = layer.table[relative_index((7, 7), cut.device)].permute(2, 0, 1)
    mask = torch.where(regions[:, :, None] == regions[:, None, :], 0.0, -100.0)
    folded = (bias + mask[:, None]).repeat(2, 1, 1, 1)
    expected = F.scaled_dot_product_attention(q, k, v, folded).transpose(1, 2).reshape(8, 49, 64)
    torch.testing.assert_close(found, expected)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [7, 8, 12])
@pytest.mark.parametrize("channels", [16, 32, 64])
@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
def test_compiled_kernels_against_fp64(dtype: torch.dtype, window: int, channels: int, cosine: bool) -> None:
    layer = Layer(
        (window, window), (window // 2, window // 2), (4 * window, 4 * window), 3, channels, dtype, cosine, 4, "cuda"
    )
    assert_close(layer.run(), layer.run(torch.float64), layer)


@pytest.mark.gpu
def test_compiled_kernels_repeat_their_bits() -> None:
    layer = Layer(size=(56, 56), heads=3, dtype=torch.float16, batch=8, cosine=True, device="cuda")
    first, second = layer.run(), layer.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_capture_in_a_graph() -> None:
    layer = Layer(size=(56, 56), heads=3, dtype=torch.float16, device="cuda")
    layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = shifted_window_attention(layer.qkv, layer.table, heads=3, window=(7, 7), shift=(3, 3))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, layer.run()["out"])


def test_compiled_double_precision_is_masked_too(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the reference, which is given the regions that compiled code leaves to the operator."""
    qkv, table = torch.randn(1, 8, 8, 24, dtype=torch.float64), torch.randn(49, 2, dtype=torch.float64)
    layer = {"heads": 2, "window": (4, 4), "shift": (2, 2)}
    plain = shifted_window_attention(qkv, table, **layer)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(shifted_window_attention(qkv, table, **layer), plain)
