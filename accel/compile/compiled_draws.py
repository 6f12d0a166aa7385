"""Compile so that random numbers are those of the plain path: from the same generator, in the same order.

TorchInductor draws from a seed of its own, so a compiled model with dropout drops other values than the plain one, and
its outputs can't be compared. Here the graph that Dynamo has captured is changed before it is compiled: dropout takes
its mask from one operator that the compiler doesn't look into, and that draws as eager PyTorch does, on contiguous
memory. All other draws (`rand_like`, `bernoulli`, those of dropout of whole features) are left to eager operators by
`fallback_random`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional

# torch keeps a captured graph only if it knows what each function in it does: what this file's text says.
_SOURCE_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@torch.library.custom_op("accel::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_mask(like: Tensor, p: float) -> Tensor:
    """Return a mask for `like`: 0 with probability p in (0, 1), else 1 ÷ (1 − p)."""
    mask = torch.empty(like.shape, device=like.device).bernoulli_(1 - p)
    return mask.div_(1 - p).to(like.dtype)


@dropout_mask.register_fake
def _(like: Tensor, p: float) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def compile_with_plain_draws(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile a captured graph; a backend for `torch.compile`."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _REPLACED:
            node.target = _REPLACED[node.target]
    graph.recompile()
    compiled: Any = compile_fx(graph, inputs, config_patches={"fallback_random": True, **_cached_by_torch()})
    return compiled  # type: ignore[no-any-return]


def _cached_by_torch() -> dict[str, Any]:
    """Return the option by which torch keeps captured graphs with functions of this file in its cache, if it has it."""
    option = "unsafe_marked_cacheable_functions"
    if not hasattr(inductor_config, option):
        return {}
    # In a fixed order: the options are a part of the key of that cache.
    names = sorted({f"{function.__module__}.{function.__name__}" for function in _REPLACED.values()})
    return {option: dict.fromkeys(names, _SOURCE_HASH)}


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # On a GPU eager draws and masks in one kernel of its own, to which `fallback_random` leaves it.
    if input.is_cuda or not (training and 0 < p <= 1):
        return functional.dropout(input, p, training, inplace)
    mask = input.new_zeros(()) if p == 1 else dropout_mask(input.detach(), p)  # eager draws nothing where p is 1
    return input.mul_(mask) if inplace else input * mask


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not 0 < dropout_p < 1 or query.device.type != "cpu":
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _dropout(torch.softmax(scores, -1), dropout_p) @ value


_REPLACED: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.scaled_dot_product_attention: _attention,
}
