"""What an operator or a GPU kernel is, by its name: a name that is not known is `other`."""

from __future__ import annotations

import functools
import re
from typing import Literal

Kind = Literal["matmul", "elementwise", "other"]

# Matrix products, convolutions and attention: what tensor cores and BLAS are for. Anchored, or `upsample_bilinear2d` is
# a linear layer and `_convert_indices` a convolution.
_MATMUL = re.compile(
    r"_*(mkl|mkldnn|onednn|cudnn|miopen|thnn|slow|quantized|fbgemm|sparse)*_*"
    r"(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|addr|matmul|linear|conv\dd|conv_\w+|conv|convolution|"
    r"scaled_mm|int_mm|grouped_mm|scaled_grouped_mm|addmm_activation|einsum|rnn|rnn_layer|"
    r"scaled_dot_product\w*|flash_attention|efficient_attention|cudnn_attention|attention)"
    r"(_(forward|backward|transpose|overrideable|relu|add_relu|transposed|pointwise|depthwise|dilated)\w*|\dd_?\w*)?_?"
)
# Work whose time is moving bytes: pointwise, reductions, normalisation, copies, gathers, optimizer updates.
_ELEMENTWISE = re.compile(
    r"_*(foreach_\w+|fused_\w+|native_\w+|cudnn_batch_norm|miopen_batch_norm|fused_rms_norm|"
    r"add|sub|rsub|mul|div|pow|square|sqrt|rsqrt|reciprocal|exp|exp2|expm1|log|log2|log1p|log10|neg|abs|sign|sin|cos|"
    r"erf|floor|ceil|round|trunc|fmod|remainder|clamp|clamp_min|clamp_max|minimum|maximum|where|lerp|addcmul|addcdiv|"
    r"relu|relu6|leaky_relu|prelu_kernel|elu|selu|celu|gelu|silu|mish|glu|sigmoid|log_sigmoid|logit|tanh|hardtanh|"
    r"hardswish|hardsigmoid|softplus|threshold|softmax|log_softmax|softmax_data|log_softmax_data|safe_softmax|"
    r"layer_norm|batch_norm|group_norm|rms_norm|instance_norm|batch_norm_impl_index|batch_norm_\w+|weight_norm\w*|"
    r"dropout|bernoulli|masked_fill|masked_scatter|masked_select|masked_softmax|copy|to_copy|clone|"
    r"contiguous|fill|zero|zeros|zeros_like|ones|ones_like|full|full_like|cat|stack|thnn_fused_\w+|"
    r"sum|mean|std|var|var_mean|max|min|amax|amin|aminmax|argmax|argmin|norm|linalg_vector_norm|prod|cumsum|cumprod|"
    r"logsumexp|any|all|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan|isinf|isfinite|nan_to_num|"
    r"mse_loss|l1_loss|smooth_l1_loss|huber_loss|nll_loss|nll_loss2d|binary_cross_entropy\w*|cross_entropy_loss|kl_div|"
    r"embedding|embedding_dense|embedding_bag|index|index_select|index_add|index_put|index_put_impl|index_copy|gather|"
    r"scatter|scatter_add|unsafe_index|select|slice|one_hot|roll|flip|repeat|repeat_interleave|tril|triu|constant_pad_nd|reflection_pad\dd|pad\w*|"
    r"replication_pad\dd|(adaptive_)?(max|avg)_pool\dd(_with_indices)?|mkldnn_(max|avg)_pool\dd|upsample_\w+|im2col|"
    r"col2im|pixel_shuffle|normal|uniform|random|amp_\w+)"
    r"(_(forward|backward|backward_data|backward_reduce|backward_elemt|jvp)\w*)?_?"
)
_VIEWS = (
    "alias as_strided chunk contiguous detach diagonal expand expand_as flatten lift_fresh movedim narrow numpy_T "
    "permute ravel reshape reshape_as resolve_conj resolve_neg select slice split split_with_sizes squeeze swapaxes t "
    "transpose tensor_split unbind unflatten unfold unsqueeze unsafe_split unsafe_chunk view view_as _reshape_alias "
    "_unsafe_view"
)
VIEWS = frozenset(_VIEWS.split())
"""Operators that move no byte: they reinterpret the same memory; a copy that is needed is another operator's call."""
_NAMESPACE = re.compile(r"^(aten|mkldnn|mkldnn_prepacked|onednn|quantized|_?c10d_functional|inductor)::")

# Kernels have C++ or code-generated names: look anywhere in them. Triton's templates (tem) are matrix products; its
# pointwise, reduction and foreach kernels (poi, red, per, for) are not.
_MATMUL_KERNEL = re.compile(
    r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgrad|dgrad|fprop|implicit_convolve|convolve|winograd|conv\dd|conv2d_c1_k1|"
    r"depthwise|flash|fmha|attention|triton_tem_|_mm_kernel|matmul|mma_",
    re.IGNORECASE,
)
_ELEMENTWISE_KERNEL = re.compile(
    r"elementwise|reduce|multi_tensor_apply|softmax|norm|dropout|triton_(poi|red|per|for)_|CatArray|gather|scatter|"
    r"index|embedding|pool|fill|copy|nchwTonhwc|nhwcTonchw|transpose|upsample|cunn_|nll_loss|foreach|cub::|memset",
    re.IGNORECASE,
)


@functools.cache  # the patterns take 2 to 20 µs a name, and a step calls an operator hundreds of times
def base(name: str) -> str:
    """Return an operator's name without its namespace."""
    return _NAMESPACE.sub("", name)


@functools.cache
def kind(name: str) -> Kind:
    """Return what an operator is by its dispatcher name, such as `aten::addmm`."""
    if not _NAMESPACE.match(name):
        return "other"
    if base(name) in VIEWS:
        return "other"
    if _MATMUL.fullmatch(base(name)):
        return "matmul"
    return "elementwise" if _ELEMENTWISE.fullmatch(base(name)) else "other"


@functools.cache
def kernel_kind(name: str, operator: str = "") -> Kind:
    """Return what a GPU kernel is by its own name or, where that says nothing, by the operator that launched it."""
    if name.startswith("nccl"):
        return "other"
    if _MATMUL_KERNEL.search(name):
        return "matmul"
    if _ELEMENTWISE_KERNEL.search(name):
        return "elementwise"
    return kind(operator)
