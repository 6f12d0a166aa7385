"""What an operator or a GPU kernel is, by its name, and how much work a call is, by its inputs.

A name that is not known is of the kind `other`; None stands for an amount that is not understood.
Work is counted by public rules on shapes only. Dtypes are named as by the profiler: "float",
"c10::Half".
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

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


Shapes = Sequence[Sequence[int]]

_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "int": torch.int32,
    "long int": torch.int64,
    "long": torch.int64,
    "short int": torch.int16,
    "short": torch.int16,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "bool": torch.bool,
    "unsigned char": torch.uint8,
    "signed char": torch.int8,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}


def dtype(names: Sequence[str]) -> str:
    """Return torch's name of the first dtype among the inputs' in which products are made, '' if there is none."""
    known = (_DTYPES[name] for name in names if name in _DTYPES)
    made = (of for of in known if of.is_floating_point or of.is_complex or of == torch.int8)
    return str(next(made, "")).removeprefix("torch.")


def _item_bytes(name: str) -> int:
    return _DTYPES[name].itemsize if name in _DTYPES else 0


def flops(name: str, shapes: Shapes, scalars: Sequence[Any] = ()) -> float | None:
    """Return the floating-point operations of one call: two for each multiply-add of the product, biases left out.

    Args:
        name: dispatcher name.
        shapes: of the inputs, [] where an input is no tensor.
        scalars: the inputs that are no tensors, at their places; only convolutions need them.
    """
    rule = _FLOPS.get(base(name))
    if rule is None:
        return None
    try:
        return float(rule(shapes, scalars))
    except (IndexError, TypeError, ValueError):  # an overload with other inputs, or an input that was not recorded
        return None


def has_flops(name: str) -> bool:
    """Return True for an operator whose FLOPs `flops` counts."""
    return base(name) in _FLOPS


def needs_scalars(name: str) -> bool:
    """Return True for an operator whose FLOPs follow from stride, padding and the like, too."""
    return has_flops(name) and "convolution" in name


def moved_bytes(name: str, shapes: Shapes, dtypes: Sequence[str]) -> float | None:
    """Estimate the bytes one call reads and writes: each input once, and an output.

    The output of a matrix product follows from its shapes, that of a reduction is nothing, and any other is taken to be
    as large as the largest input: correct for pointwise work, normalisation and their gradients. Gathers, which read a
    part of their input, views, which read nothing, and lists of tensors, whose shapes are not recorded, yield None.
    """
    short = base(name)
    sizes = [math.prod(shape) * _item_bytes(of) for shape, of in zip(shapes, dtypes, strict=False)]
    if not any(sizes) or "TensorList" in dtypes or short in _GATHERS or short in VIEWS:
        return None
    if short in _ONLY_INPUTS:
        return float(sum(sizes))
    product = _OUTPUTS.get(short)
    if product is None:
        return float(sum(sizes) + max(sizes))
    try:
        return float(sum(sizes) + math.prod(product(shapes)) * _item_bytes(dtypes[0]))
    except IndexError:  # an overload with other inputs
        return None


_PRODUCTS = {
    **dict.fromkeys(("mm", "_int_mm", "_scaled_mm", "bmm"), 0),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_"), 1),
}
"""Operator → which of its inputs is the first of the two matrices, or batches of them."""


def _product(first: int) -> Callable[[Shapes, Sequence[Any]], float]:
    return lambda shapes, _: 2 * math.prod(shapes[first]) * shapes[first + 1][-1]


def _attention(first: int, products: float) -> Callable[[Shapes, Sequence[Any]], float]:
    def rule(shapes: Shapes, _: Sequence[Any]) -> float:
        (*lead, rows, width), keys, values = shapes[first], shapes[first + 1], shapes[first + 2]
        return products * math.prod(lead) * rows * keys[-2] * (width + values[-1])

    return rule


def _convolution(
    stride: int, padding: int, dilation: int, transposed: int | None
) -> Callable[[Shapes, Sequence[Any]], int]:
    def rule(shapes: Shapes, scalars: Sequence[Any]) -> int:
        (batch, _, *size), weight = shapes[0], shapes[1]
        positions = size
        if transposed is None or not scalars[transposed]:
            steps, pads, dilations = (_per_dimension(scalars[at], len(size)) for at in (stride, padding, dilation))
            positions = [
                (n + 2 * pad - dilate * (k - 1) - 1) // step + 1
                for n, pad, dilate, k, step in zip(size, pads, dilations, weight[2:], steps, strict=True)
            ]
        return 2 * batch * math.prod(positions) * math.prod(weight)

    return rule


def _convolution_backward(shapes: Shapes, scalars: Sequence[Any]) -> int:
    (batch, _, *size), image, weight = shapes[0], shapes[1], shapes[2]
    gradients = sum(
        map(bool, scalars[10][:2])
    )  # the gradients of the input and of the weight, each as expensive as the forward
    return 2 * gradients * batch * math.prod(image[2:] if scalars[7] else size) * math.prod(weight)


def _per_dimension(value: Any, dims: int) -> list[int]:
    values = list(value)
    return values * dims if len(values) == 1 else values


_FLOPS: dict[str, Callable[[Shapes, Sequence[Any]], float]] = {
    **{name: _product(first) for name, first in _PRODUCTS.items()},
    "mv": lambda s, _: 2 * math.prod(s[0]),
    "addmv": lambda s, _: 2 * math.prod(s[1]),
    "dot": lambda s, _: 2 * math.prod(s[0]),
    "linear": lambda s, _: 2 * math.prod(s[0]) * s[1][0],
    "mkldnn_linear": lambda s, _: 2 * math.prod(s[0]) * s[1][0],
    "convolution": _convolution(3, 4, 5, 6),
    "_convolution": _convolution(3, 4, 5, 6),
    "convolution_overrideable": _convolution(3, 4, 5, 6),
    "mkldnn_convolution": _convolution(4, 3, 5, None),
    "cudnn_convolution": _convolution(3, 2, 4, None),
    "convolution_backward": _convolution_backward,
    # Scores and their product with the values; the gradient computes the scores again and four products more.
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention(0, 2),
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention(1, 5),
    ),
}
_OUTPUTS: dict[str, Callable[[Shapes], Sequence[int]]] = {
    **{name: lambda s, first=first: (*s[first][:-1], s[first + 1][-1]) for name, first in _PRODUCTS.items()},  # type: ignore[misc]
    "mv": lambda s: s[0][:1],
    "dot": lambda s: (),
    "linear": lambda s: (*s[0][:-1], s[1][0]),
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Reductions write next to nothing, and these three only write the tensor that is among their inputs.
_ONLY_INPUTS = _names(
    "sum mean std var var_mean max min amax amin aminmax argmax argmin norm linalg_vector_norm prod any all nll_loss "
    "nll_loss_forward mse_loss l1_loss _local_scalar_dense item copy_ fill_ zero_"
)
_GATHERS = _names(
    "embedding embedding_backward embedding_dense_backward _embedding_bag index _unsafe_index index_select gather "
    "slice_backward select_backward index_put_ _index_put_impl_ scatter_ scatter_add_ index_add_"
)
