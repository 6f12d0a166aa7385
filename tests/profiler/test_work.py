"""FLOPs and bytes from shapes, against torch's own counter and by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from accel.profiler.trace import operators as work
from accel.profiler.trace.digest import call_groups
from accel.profiler.trace.kineto import read

CASES: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: weight(3, 5) @ weight(5, 7),
    "addmm": lambda: F.linear(weight(3, 5), weight(7, 5), weight(7)),
    "linear, three dimensions": lambda: F.linear(weight(2, 3, 5), weight(7, 5)),
    "bmm": lambda: torch.bmm(weight(2, 3, 5), weight(2, 5, 7)),
    "baddbmm": lambda: torch.baddbmm(weight(2, 3, 7), weight(2, 3, 5), weight(2, 5, 7)),
    "convolution": lambda: F.conv2d(weight(2, 4, 9, 8), weight(6, 4, 3, 3), weight(6)),
    "stride, padding, dilation": lambda: F.conv2d(
        weight(2, 4, 9, 8), weight(6, 4, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)
    ),
    "transposed": lambda: F.conv_transpose2d(weight(2, 4, 9, 8), weight(4, 6, 3, 3), stride=2),
    "one dimension": lambda: F.conv1d(weight(2, 4, 9), weight(6, 4, 3)),
    "three dimensions": lambda: F.conv3d(weight(2, 4, 5, 6, 7), weight(6, 4, 3, 3, 3)),
    "no gradient of the first input": lambda: F.conv2d(torch.ones(2, 4, 9, 8), weight(6, 4, 3, 3)),
}


def weight(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def counted(run: Callable[[], Any]) -> float:
    """Count with the rules of this package, each product where it is done."""
    began = time.time_ns()  # µs since the epoch are no finer than a quarter of one: calls would not lie in one another
    with profile(use_kineto=True, record_shapes=True) as traced:
        run()
    calls = read(traced.kineto_results, window_ns=(began, began + 1), closing_ns=began, gpu=None).calls
    return sum(group.flops or 0.0 for group in call_groups(calls))


@pytest.mark.parametrize("name", CASES)
def test_flops_agree_with_torchs_counter(name: str) -> None:
    def run() -> None:
        CASES[name]().sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()

    assert counted(run) == counter.get_total_flops()


def test_flops_that_torchs_counter_gets_wrong() -> None:
    # Its gradient of a grouped convolution counts the weight's part for all channels.
    product = 2 * 2 * (9 * 8) * (6 * 2 * 3 * 3)
    assert counted(lambda: F.conv2d(weight(2, 4, 9, 8), weight(6, 2, 3, 3), groups=2, padding=1)) == product
    grouped = counted(lambda: F.conv2d(weight(2, 4, 9, 8), weight(6, 2, 3, 3), groups=2, padding=1).sum().backward())
    assert grouped == 3 * product
    # It has no rule for the CPU's attention: two products of 128 queries with 96 keys, and five for the gradients.
    q, k = weight(2, 3, 128, 16), weight(2, 3, 96, 16)
    attended = counted(lambda: F.scaled_dot_product_attention(q, k, k).sum().backward())
    assert attended == 7 * 2 * (2 * 3) * 128 * 96 * 16


@pytest.mark.parametrize(
    ("name", "shapes", "scalars"),
    [
        pytest.param("aten::add", [[3], [3]], (), id="no product"),
        pytest.param("aten::mm", [[], []], (), id="shapes were not recorded"),
        pytest.param("aten::mm", [[3, 4]], (), id="an input is missing"),
        pytest.param("aten::mkldnn_convolution", [[2, 4, 9, 8], [6, 4, 3, 3]], (), id="no stride"),
        pytest.param(
            "aten::convolution_backward", [[2, 6, 7, 6], [2, 4, 9, 8], [6, 4, 3, 3]], [None] * 11, id="no mask"
        ),
    ],
)
def test_what_is_not_understood_has_no_flops(name: str, shapes: list[list[int]], scalars: Any) -> None:
    assert work.flops(name, shapes, scalars) is None


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "expected"),
    [
        pytest.param("aten::add", [[8, 4], [8, 4], []], ["float", "float", "Scalar"], 3 * 32 * 4, id="pointwise"),
        pytest.param("aten::add", [[8, 4], [4]], ["float", "float"], (32 + 4 + 32) * 4, id="broadcast"),
        pytest.param("aten::gelu", [[8, 4]], ["c10::BFloat16"], 2 * 32 * 2, id="half the bytes"),
        pytest.param("aten::copy_", [[8, 4], [8, 4]], ["c10::BFloat16", "float"], 32 * (2 + 4), id="a cast"),
        pytest.param("aten::sum", [[8, 4]], ["double"], 32 * 8, id="a reduction only reads"),
        pytest.param("aten::zero_", [[8, 4]], ["float"], 32 * 4, id="only writes"),
        pytest.param("aten::mm", [[8, 4], [4, 6]], ["float", "float"], (32 + 24 + 48) * 4, id="product"),
        pytest.param("aten::embedding", [[50000, 512], [3]], ["float", "long int"], None, id="reads three rows of it"),
        pytest.param("aten::cat", [[], []], ["TensorList", "Scalar"], None, id="a list of tensors"),
        pytest.param("aten::mm", [[8], [4]], ["float", "float"], None, id="an overload that is not known"),
        pytest.param("AddBackward0", [], [], None, id="no inputs"),
    ],
)
def test_bytes_moved(name: str, shapes: list[list[int]], dtypes: list[str], expected: float | None) -> None:
    assert work.moved_bytes(name, shapes, dtypes) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_the_profilers_names_of_dtypes_are_understood(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 4, dtype=dtype)
    with profile(use_kineto=True, record_shapes=True) as traced:
        tensor.clone()
    call = next(event for event in traced.kineto_results.events() if event.name() == "aten::clone")

    assert work.dtype(call.dtypes()) == str(dtype).removeprefix("torch.")
    assert work.moved_bytes("aten::clone", call.shapes(), call.dtypes()) == 2 * 16 * dtype.itemsize


def test_an_operator_without_floating_point_input_has_no_dtype() -> None:
    assert work.dtype(["long int", "Scalar", ""]) == ""
