"""What operators and kernels are, by name, and how much work they are: the FLOPs agree with torch's own counter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from accel.profiler.trace import operators
from accel.profiler.trace.digest import call_groups
from accel.profiler.trace.operators import base, kernel_kind, kind
from accel.profiler.trace.window import read

MATMUL = (
    "aten::mm aten::addmm aten::bmm aten::baddbmm aten::mv aten::linear aten::mkldnn_linear aten::_scaled_mm "
    "aten::convolution aten::_convolution aten::mkldnn_convolution aten::cudnn_convolution aten::convolution_backward "
    "aten::_conv_depthwise2d aten::slow_conv3d_forward aten::scaled_dot_product_attention "
    "aten::_flash_attention_forward "
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward aten::_efficient_attention_backward aten::_cudnn_rnn"
)
ELEMENTWISE = (
    "aten::add aten::add_ aten::mul aten::clamp_min aten::gelu aten::gelu_backward aten::copy_ aten::_softmax "
    "aten::_log_softmax_backward_data aten::native_layer_norm aten::native_batch_norm_backward aten::native_dropout "
    "aten::sum aten::threshold_backward aten::max_pool2d_with_indices aten::_foreach_add_ aten::_fused_adamw_ "
    "aten::upsample_bilinear2d aten::embedding aten::cat aten::nll_loss_forward aten::_fused_rms_norm"
)
# `upsample_bilinear2d` has "linear" in its name, `_convert_indices…` "conv", and what is no operator "mm".
OTHER = (
    "aten::t aten::view aten::as_strided aten::empty aten::detach aten::item aten::sort aten::linspace "
    "aten::_convert_indices_from_coo_to_csr aten::_cudnn_init_dropout_state aten::is_nonzero AddmmBackward0 "
    "autograd::engine::evaluate_function torch::autograd::AccumulateGrad mine::mm"
)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(MATMUL.split(), "matmul", id="matmul"),
        pytest.param(ELEMENTWISE.split(), "elementwise", id="elementwise"),
        pytest.param(OTHER.split(), "other", id="other"),
    ],
)
def test_the_kind_of_an_operator(names: list[str], expected: str) -> None:
    assert {name: kind(name) for name in names} == dict.fromkeys(names, expected)


def test_the_names_are_torchs_own() -> None:
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}

    assert not [name for name in (*MATMUL.split(), *ELEMENTWISE.split()) if name not in known]


@pytest.mark.parametrize(
    ("kernel", "operator", "expected"),
    [
        ("ampere_sgemm_128x64_nn", "aten::mm", "matmul"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "aten::addmm", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)", "aten::mm", "matmul"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "aten::cudnn_convolution", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "", "matmul"),
        ("triton_tem_fused_mm_0", "", "matmul"),
        ("triton_poi_fused_add_relu_1", "", "elementwise"),
        ("triton_red_fused_native_layer_norm_2", "", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "", "elementwise"),
        ("void cudnn::ops::nchwToNhwcKernel<float>(Params)", "aten::cudnn_convolution", "elementwise"),
        ("my_kernel", "aten::addmm", "matmul"),  # the kernel's name says nothing
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "c10d::allreduce_", "other"),
    ],
)
def test_the_kind_of_a_kernel(kernel: str, operator: str, expected: str) -> None:
    assert kernel_kind(kernel, operator) == expected


def test_the_namespace_is_left_out() -> None:
    assert base("aten::mm") == "mm"
    assert base("mkldnn::_linear_pointwise") == "_linear_pointwise"
    assert base("AddmmBackward0") == "AddmmBackward0"


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
    assert operators.flops(name, shapes, scalars) is None


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
        pytest.param("aten::mm", [[8, 4]], ["float"], None, id="an overload that is not known"),
        pytest.param("AddBackward0", [], [], None, id="no inputs"),
    ],
)
def test_bytes_moved(name: str, shapes: list[list[int]], dtypes: list[str], expected: float | None) -> None:
    assert operators.moved_bytes(name, shapes, dtypes) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_the_profilers_names_of_dtypes_are_understood(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 4, dtype=dtype)
    with profile(use_kineto=True, record_shapes=True) as traced:
        tensor.clone()
    call = next(event for event in traced.kineto_results.events() if event.name() == "aten::clone")

    assert operators.dtype(call.dtypes()) == str(dtype).removeprefix("torch.")
    assert operators.moved_bytes("aten::clone", call.shapes(), call.dtypes()) == 2 * 16 * dtype.itemsize


def test_an_operator_without_floating_point_input_has_no_dtype() -> None:
    assert operators.dtype(["long int", "Scalar", ""]) == ""
