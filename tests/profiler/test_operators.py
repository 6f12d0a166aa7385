"""What operators and kernels are, by name."""

from __future__ import annotations

import pytest
import torch

from accel.profiler.trace.operators import base, kernel_kind, kind

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
