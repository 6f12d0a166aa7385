"""Window attention and the precision of products: TF32 however it was allowed, and drop-ins judged apart from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from accel.kernels import support
from accel.kernels.window_attention import Spec
from accel.kernels.window_dropins import fuse_window_attention
from tests.kernels.hosts import OfficialWindowAttention, serve_cpu

matmul = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _serves_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)


@pytest.fixture
def _precision() -> Iterator[None]:
    yield
    matmul.allow_tf32 = False


def _precision_of_dots(dtype: torch.dtype = torch.float32) -> str:
    from accel.kernels.window_attention import tiles

    spec = Spec(heads=1, window=(4, 4))
    shape = tiles.tiles_of(spec, 16, dtype, cosine=False, backward=False)
    return str(tiles.constants(spec, 16, dtype, shape)["PRECISION"])


@pytest.mark.skipif(not support.has_triton(), reason="needs triton, which is not installed")
@pytest.mark.parametrize("name", ["fp32_precision", "allow_tf32"])
@pytest.mark.parametrize("allowed", [False, True], ids=["ieee", "tf32"])
@pytest.mark.usefixtures("_precision")
def test_tf32_is_read_whichever_switch_set_it(name: str, allowed: bool) -> None:
    """torch refuses to read its old switch once the new one has been set: that was an error in every fp32 call."""
    value: object = allowed
    if name == "fp32_precision":
        value = "tf32" if allowed else "ieee"
    setattr(matmul, name, value)
    assert _precision_of_dots() == ("tf32" if allowed else "ieee")


@pytest.mark.skipif(not support.has_triton(), reason="needs triton, which is not installed")
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.usefixtures("_precision")
def test_the_backward_pass_is_as_exact_as_the_forward_pass(channels: int) -> None:
    """Its launches are planned when they are first needed: by then the switch may stand otherwise."""
    from accel.kernels.window_attention import launchers

    spec = Spec(heads=1, window=(4, 4), scale=float(channels))  # a layer that no other test has planned
    qkv = torch.zeros(1, 4, 4, 3 * channels)
    expected = {}
    for is_switched in (False, True):
        launchers._backward_plan.cache_clear()
        for name in ("ieee", "tf32"):
            matmul.fp32_precision = name
            layer = launchers._Layer.of(qkv, None, None, spec)
            if is_switched:
                matmul.fp32_precision = "tf32" if name == "ieee" else "ieee"
            plan = launchers._backward_plan(layer)
            launches = [plan.gradients] if plan.softmax is None else [each for each, _ in plan.gradients._launches]
            found = [launch._constants for launch in launches]
            assert {constants["PRECISION"] for constants in found} == {name}
            assert expected.setdefault(name, found) == found
    launchers._backward_plan.cache_clear()


class WindowAttention(OfficialWindowAttention):
    """A namesake whose result is off by less than half precision shows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * 1.001


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_variant_is_left_alone_in_half_precision_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(WindowAttention(32, (4, 4), 2)).to(dtype)
    assert "computes something else" in fuse_window_attention(model).refused["0"]


class _Failing:
    def __call__(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError("no room for this tile")


class _Garbled:
    def __call__(self, qkv: Tensor, *_: object, **__: object) -> Tensor:
        return qkv[..., : qkv.shape[-1] // 3] * float("nan")


@pytest.mark.parametrize(("kernel", "reason"), [(_Failing(), "no room"), (_Garbled(), "differs")])
def test_a_kernel_that_fails_here_is_not_used(kernel: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is tried in the module's own precision as well: what double precision takes runs no kernel."""
    from accel.kernels.window_attention import attention as op

    plain = op._attend

    def attend(qkv: Tensor, *rest: object) -> Tensor:
        return plain(qkv, *rest) if qkv.dtype == torch.float64 else kernel(qkv, *rest)  # type: ignore[arg-type, operator]

    monkeypatch.setattr(op, "_attend", attend)
    assert reason in fuse_window_attention(OfficialWindowAttention(32, (4, 4), 2)).refused[""]
