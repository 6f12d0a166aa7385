"""Rivals of window attention: right, whole under the compiler, and on the path whose name they bear."""

from __future__ import annotations

import pytest
import torch

from benchmarks import window_attention as bench
from benchmarks.kernels.window_rivals import Rivals, timm_attention
from tests.kernels.hosts import need

CPU = torch.device("cpu")
GIVEN = bench.inputs(2, "cpu")


@pytest.mark.parametrize("name", ["fused", "eager", "sdpa", "flex"])
@pytest.mark.filterwarnings("ignore")  # FlexAttention warns that it is slow where it is not compiled
def test_the_map_is_that_of_the_formula(name: str) -> None:
    with torch.no_grad():
        qkv, table, _ = GIVEN
        exact = Rivals(bench.SPEC, bench.SIZE, CPU).fused(qkv.double(), table.double())
        found = getattr(Rivals(bench.SPEC, bench.SIZE, CPU), name)(qkv, table)
    assert float((found - exact).norm() / exact.norm()) < bench.TOLERANCE


def test_timm_is_on_its_fused_path_and_right() -> None:
    need("timm")
    assert timm_attention(bench.SPEC, CPU).fused_attn
    assert bench.error(Rivals(bench.SPEC, bench.SIZE, CPU).timm(), *GIVEN) < bench.TOLERANCE


@pytest.mark.parametrize("layer", bench.LARGE, ids=lambda layer: f"{layer.spec.window[0]} x {layer.spec.window[1]}")
def test_large_windows_are_compared_with_the_formula(layer: bench.Layer) -> None:
    one = bench.Layer(layer.spec, (2 * layer.spec.window[0], layer.spec.window[1]))
    given = bench.inputs(1, "cpu", layer=one)
    rivals = Rivals(one.spec, one.size, CPU)
    assert bench.error(rivals.sdpa, *given, one) < bench.TOLERANCE
    assert bench.error(lambda qkv, table: rivals.sdpa(qkv, table) * 1.02, *given, one) > bench.TOLERANCE


def test_an_op_that_is_wrong_is_not_timed() -> None:
    rivals = Rivals(bench.SPEC, bench.SIZE, CPU)
    found = bench.measured(lambda qkv, table: rivals.fused(qkv, table) * 1.02, [GIVEN], (1.0, 1.0))
    assert "relative error" in found["failed"]


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("name", ["eager", "flex"])
def test_what_is_compiled_is_one_graph_for_each_use(name: str) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        op = torch.compile(getattr(Rivals(bench.SPEC, bench.SIZE, CPU), name), backend="eager", fullgraph=True)
        for seed in (0, 1):
            bench.forward(op, bench.inputs(1, "cpu", seed))
