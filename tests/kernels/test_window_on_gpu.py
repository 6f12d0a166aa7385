"""Window attention on a GPU beyond single layers: whole models, repeated bits, dropout, compiled code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.kernels.window_attention import shifted_window_attention, window_attention
from accel.kernels.window_dropins import fuse_window_attention
from tests.kernels.hosts import MODELS, randomised
from tests.kernels.test_window_attention import Layer

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the precision of fp32 products."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = request.param
    yield request.param
    matmul.fp32_precision = before


def _run(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(images)
    out.square().sum().backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach().double(), **grads}


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_is_as_exact_as_the_plain_one(name: str, precision: str) -> None:
    model = randomised(MODELS[name](64, 4)).cuda().eval()
    images = torch.randn(2, 3, 64, 64, device="cuda")
    exact = _run(copy.deepcopy(model).double(), images.double())
    plain = _run(model, images)
    fused = fuse_window_attention(model)
    found = _run(model, images)

    assert len(fused.names) >= 4 and not fused.refused
    assert found.keys() == exact.keys()
    # Roundings of fp32 or of TF32, through four blocks and back; a wrong gradient is off by its own size.
    least = 1e-4 if precision == "ieee" else 3e-2
    size = max(float(tensor.norm()) for tensor in exact.values())
    for tensor_name, tensor in exact.items():
        scale = max(float(tensor.norm()), 1e-3 * size)
        off, plainly = (float((run[tensor_name] - tensor).norm()) / scale for run in (found, plain))
        assert off <= max(4 * plainly, least), tensor_name


@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_windows_of_several_row_blocks_repeat_their_bits(dtype: torch.dtype, cosine: bool) -> None:
    layer = Layer((12, 12), (6, 6), (48, 48), heads=3, dtype=dtype, batch=4, cosine=cosine, device="cuda")
    first = layer.run()
    for _ in range(3):
        again = layer.run()
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_layer_waits_for_nothing(waits_for_nothing: Any) -> None:
    layer = Layer(size=(56, 56), heads=3, dtype=torch.float16, cosine=True, device="cuda")
    layer.run()
    with waits_for_nothing():
        layer.run(dropout=0.1)


# -- dropout -----------------------------------------------------------------------------------------------------------

TOKENS = 16
"""Of a 4 x 4 window, and channels of its heads: with v = 1 the output is the weights."""


def _weights(qk: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Return the weights after dropout, and the qkv that they came from."""
    v = torch.eye(TOKENS, device="cuda").expand(len(qk), -1, -1)
    qkv = torch.cat([qk, v], -1).requires_grad_()
    table = torch.zeros(49, 1, device="cuda")
    return window_attention(qkv, table, heads=1, window=(4, 4), dropout=dropout), qkv


def test_dropout_keeps_its_share_and_follows_the_seed() -> None:
    qk = torch.randn(4096, TOKENS, 2 * TOKENS, device="cuda")
    torch.manual_seed(3)
    dropped, _ = _weights(qk, 0.3)
    other, _ = _weights(qk, 0.3)
    torch.manual_seed(3)
    again, _ = _weights(qk, 0.3)
    whole, _ = _weights(qk, 0.0)
    kept = dropped != 0

    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, other)
    torch.testing.assert_close(dropped, kept * whole / 0.7)
    rate = float(kept.double().mean())
    assert abs(rate - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5  # five standard deviations
    assert not torch.equal(kept[0], kept[1]), "windows share a mask"


def test_backward_replays_the_dropout_of_its_forward() -> None:
    """With v = 1 and a gradient G on the weights, dv = weightsᵀ G: it shows which weights backward kept."""
    qk, grad = torch.randn(64, TOKENS, 2 * TOKENS, device="cuda"), torch.randn(64, TOKENS, TOKENS, device="cuda")
    weights, qkv = _weights(qk, 0.4)
    _weights(qk, 0.4)  # another mask between the two passes
    weights.backward(grad)
    assert qkv.grad is not None
    expected = weights.detach().double().transpose(1, 2) @ grad.double()
    found = qkv.grad[..., 2 * TOKENS :].double()
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_under_autocast() -> None:
    layer = Layer(size=(14, 28), heads=3, batch=2, device="cuda")
    qkv, table = layer.qkv.clone().requires_grad_(), layer.table.clone().requires_grad_()

    def attend(qkv: Tensor, table: Tensor) -> Tensor:
        return shifted_window_attention(qkv * 1.0, table, heads=3, window=(7, 7), shift=(3, 3))

    with torch.autocast("cuda", torch.bfloat16):
        out = torch.compile(attend, fullgraph=True)(qkv, table)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, (qkv, table), layer.dout.to(out.dtype))
    exact = layer.run(torch.float64)
    for tensor, wanted in ((out, exact["out"]), (found[0], exact["dqkv"]), (found[1], exact["dtable"])):
        assert float((tensor.detach().double() - wanted).norm() / wanted.norm()) < 0.02
