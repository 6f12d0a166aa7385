"""Window attention in compiled code: one operator, and nothing on the CPU beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from accel.kernels.window_attention import shifted_window_attention
from accel.kernels.window_dropins import fuse_window_attention
from tests.kernels.hosts import OfficialWindowAttention, window_operators


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_shifted_window_brings_no_table_into_the_graph(interpreted: None) -> None:
    """Regions were made anew in each step, on the CPU, and copied to the device, which waits."""
    torch.manual_seed(0)
    qkv, table = torch.randn(1, 8, 8, 48), torch.randn(49, 1)
    called: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def attend(qkv: Tensor, table: Tensor) -> Tensor:
        return shifted_window_attention(qkv, table, heads=1, window=(4, 4), shift=(2, 2))

    torch._dynamo.reset()
    found = torch.compile(attend, backend=backend, fullgraph=True)(qkv, table)
    assert any("window_attention" in name for name in called)
    assert not [name for name in called if "arange" in name or "zeros" in name]
    torch.testing.assert_close(found, attend(qkv, table), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_fused_module_is_compiled_with_the_operator_and_exported_without(interpreted: None) -> None:
    """torch 2.11 takes compiling for exporting: compiled models ran without the op, at the speed of any other."""
    torch.manual_seed(0)
    module, x = OfficialWindowAttention(32, (4, 4), 2), torch.randn(4, 16, 32)
    plain = module(x)
    assert fuse_window_attention(module).names
    counter = CompileCounterWithBackend("eager")
    for compilations in (1, 2):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(module, backend=counter, fullgraph=True)(x), plain)
        assert window_operators(*counter.graphs) == compilations
        for strict in (False, True):
            program = torch.export.export(module, (x,), strict=strict)
            assert window_operators(program.graph_module) == 0
            torch.testing.assert_close(program.module()(x), plain)
