"""Find the window attention of a Swin model and switch it to the fused op: no parameter changes.

A module that is recognised gets another class, made from its own. So isinstance, `state_dict`, hooks, parameters and
attributes stay; copies and pickles are of the class it had. Each recognised module is first compared with itself on
random inputs, so that a variant under a known name is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel.kernels.dropins import DropIn, SwitchedModules, dropin_class, runs_fused, without_hooks
from accel.kernels.window_attention.libraries import (
    HuggingFaceCosineWindows,
    HuggingFaceLayer,
    HuggingFaceWindows,
    PackedWindows,
    TimmBlock,
    TorchvisionMap,
)


class Recognizer(NamedTuple):
    """How a kind of module is recognised and tested."""

    dropin: type[DropIn]
    names: str
    """Its class names."""
    attributes: str
    """Attributes that it must have."""
    inputs: Callable[[Any], list[tuple[Any, ...]]] | None = None
    """Makes the arguments for its test; None if it computes nothing itself."""
    method: str = "forward"

    def fits(self, module: nn.Module) -> bool:
        """Return whether a module is of this kind, by name and attributes."""
        known = type(module).__name__ in self.names.split()
        return known and all(hasattr(module, name) for name in self.attributes.split())


def _windows(module: Any) -> list[tuple[Any, ...]]:
    """Return windows without a mask, and with one that separates their first tokens from the rest."""
    weight = next(p for p in module.parameters() if p.dim() == 2 and p.shape[0] >= 16)
    side = getattr(module, "window_size", None) or module.relative_position_bias.window_size
    tokens = side[0] * side[1]
    linear = getattr(module, "qkv", None) or getattr(module, "q_proj", None) or module.query
    x = torch.randn(4, tokens, linear.in_features, device=weight.device, dtype=weight.dtype)
    part = torch.arange(tokens, device=weight.device) < tokens // 2
    mask = torch.where(part[:, None] == part[None, :], 0.0, -100.0).to(weight.dtype)
    return [(x, None), (x, torch.stack([torch.zeros_like(mask), mask]))]


def _maps(module: Any) -> list[tuple[Any, ...]]:
    linear = (module.attn if hasattr(module, "attn") else module).qkv
    tall, wide = getattr(module, "input_resolution", None) or (2 * side for side in module.window_size)
    x = torch.randn(1, tall, wide, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype)
    return [(x,)]


_PACKED = "qkv proj proj_drop attn_drop softmax num_heads window_size"
RECOGNIZERS = (
    Recognizer(
        PackedWindows,
        "WindowAttention",
        f"{_PACKED} cpb_mlp logit_scale q_bias relative_coords_table",
        _windows,
    ),
    Recognizer(
        PackedWindows,
        "WindowAttention WindowMSA",
        f"{_PACKED} scale relative_position_bias_table",
        _windows,
    ),
    Recognizer(
        TorchvisionMap,
        "ShiftedWindowAttention ShiftedWindowAttentionV2",
        "qkv proj shift_size window_size num_heads attention_dropout dropout",
        _maps,
    ),
    Recognizer(
        HuggingFaceWindows,
        "SwinAttention",
        "q_proj k_proj v_proj o_proj scaling relative_position_bias config",
        _windows,
    ),
    Recognizer(
        HuggingFaceCosineWindows,
        "Swinv2SelfAttention",
        "query key value logit_scale continuous_position_bias_mlp window_size",
        _windows,
    ),
    Recognizer(HuggingFaceLayer, "SwinLayer Swinv2Layer", "get_attn_mask shift_size window_size"),
)
"""In the order in which they are tried."""
_TIMM_BLOCK = Recognizer(
    TimmBlock,
    "SwinTransformerBlock SwinTransformerV2Block",
    "_attn attn window_size shift_size",
    _maps,
    "_attn",
)


def candidates(model: nn.Module) -> list[tuple[str, nn.Module, Recognizer]]:
    """Return the modules that look like window attention, or belong to it, with their names."""
    recognized = []
    for name, module in model.named_modules():
        recognizer = next((recognizer for recognizer in RECOGNIZERS if recognizer.fits(module)), None)
        if recognizer is not None and not isinstance(module, DropIn):
            recognized.append((name, module, recognizer))
    return recognized


def fuse_window_attention(model: nn.Module) -> SwitchedModules:
    """Let the window attention of a Swin model run on the fused op; parameters and `state_dict` stay.

    Args:
        model: any, on a CUDA device; modules of timm, torchvision, Hugging Face, mmdetection and the official
            repository are recognised by their names and attributes, and compared with themselves before they are
            switched. What lies on a CPU is left alone: there the op is plain torch, and up to 10 % slower than timm's.

    Returns:
        What was switched and what was left alone; its `undo()` puts everything back, `redo()` switches again.

    Example:
        >>> fused = fuse_window_attention(nn.Linear(3, 3))
        >>> fused.names
        []
    """
    fused = SwitchedModules()
    switch_window_attention(model, fused)
    return fused


def switch_window_attention(model: nn.Module, fused: SwitchedModules) -> None:
    """Do so, noting each module in `fused`, which can undo what is interrupted."""
    for name, module, recognizer in candidates(model):
        _take(fused, name, module, recognizer)
    for name, module in model.named_modules():
        if _TIMM_BLOCK.fits(module) and isinstance(module.attn, DropIn) and not isinstance(module, DropIn):
            _take(fused, name, module, _TIMM_BLOCK)


def _take(fused: SwitchedModules, name: str, module: nn.Module, recognizer: Recognizer) -> None:
    """Switch one module, if its results stay the same."""
    if why := _gains_nothing(module) or differs(module, recognizer):
        if recognizer.inputs is not None:
            fused.refused[name] = why
        return
    fused.switch(module, recognizer.dropin)
    if recognizer.inputs is not None:
        fused.names.append(name)


def _gains_nothing(module: nn.Module) -> str:
    """Return why a module would gain nothing from the op on its device, '' if it would gain."""
    weight = next(module.parameters())
    if runs_fused(weight):
        return ""
    if weight.is_cuda:
        return "triton is not installed, and the op without its kernels is plain torch, like the module's own"
    return (
        f"it is on {weight.device.type}, where the op has no kernels and is up to 10 % slower than the module's own; "
        "move the model to CUDA first"
    )


def differs(module: nn.Module, recognizer: Recognizer) -> str:
    """Return how a module's own result differs from the drop-in's on random inputs, '' if it doesn't.

    Variants show in double precision, where rounding hides none: TF32, half precision and the scores of
    a sharp cosine attention each round by more than some variants differ. Then the op is run as it will be, in the
    module's own precision and by the device's kernels, which must come near.
    """
    if recognizer.inputs is None:
        return ""
    devices = {p.device for p in module.parameters() if p.is_cuda}
    dtype = next(p.dtype for p in module.parameters())
    with torch.no_grad(), torch.random.fork_rng(list(devices)):
        for kind, share in ((torch.float64, _EXACT), (dtype, _NEAR)):
            try:
                off = _largest_difference(module, recognizer, kind)
            except Exception as error:  # other arguments under that name, or too little shared memory
                return f"it can't be tried: {type(error).__name__}: {error}"
            if not off <= share:
                what = "it computes something else than window attention with a relative position bias"
                return what if kind == torch.float64 else f"the kernels' result differs from its own by {off:.2g}"
    return ""


_EXACT, _NEAR = 1e-9, 0.05
"""Shares of the largest output: for double precision, and for any other, whose rounding grows with the scores."""


def _largest_difference(module: nn.Module, recognizer: Recognizer, dtype: torch.dtype) -> float:
    """Return how far a module and its drop-in are apart, as a share of the largest output; NaN where one is."""
    plain, other = without_hooks(module).to(dtype), without_hooks(module).to(dtype)
    other.__class__ = dropin_class(recognizer.dropin, type(other))
    shares = []
    for arguments in recognizer.inputs(plain):  # type: ignore[misc]
        expected, actual = (_first(getattr(m, recognizer.method)(*arguments)).double() for m in (plain, other))
        if expected.shape != actual.shape:
            return float("inf")
        shares.append((expected - actual).abs().max() / expected.abs().max())
    return float(torch.stack(shares).max())


def _first(result: Any) -> Tensor:
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first
