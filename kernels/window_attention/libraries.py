"""Drop-ins of the fused op for the Swin modules of timm, torchvision, Hugging Face and the official repository.

Each class here is laid over a module's own (`accel.kernels.dropins`): a subclass with another `forward`, and nothing
else. Where it can't serve a call (no kernels for the device, a mask that is not one of a shift, requested attention
weights, hooks on layers that the op skips, a program that is exported), it calls the module's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from accel.kernels.dropins import DropIn, is_hooked, runs_fused
from accel.kernels.tables import hides_values
from accel.kernels.window_attention.attention import shifted_window_attention, window_attention
from accel.kernels.window_attention.regions import mask_of_regions, regions_of_mask, shift_regions

_HIGHEST_LOG_SCALE = 4.605170185988092
"""log 100: Swin V2 clamps its scale there."""

_SHIFT_MASK = -100.0
"""The value that Hugging Face adds between regions."""

_read_masks: Any = WeakTensorKeyDictionary()
"""Mask → its version, and its regions."""


def _regions(x: Tensor, mask: Tensor | None) -> tuple[Tensor | None, float] | None:
    """Return the regions and the value of the mask for `x`; None if the module's own path must take the call."""
    if not runs_fused(x):
        return None
    if mask is None:
        return None, 0.0
    if _is_regions(mask):
        return mask, _SHIFT_MASK
    # A compiler knows no values: they would break its graph, and stand in its guards.
    return None if hides_values() or mask.is_meta else _read(mask)


def _is_regions(mask: Tensor) -> bool:
    """Distinguish the regions that HuggingFaceLayer passes from a mask."""
    return mask.dtype == torch.uint8 and mask.dim() == 2


def _read(mask: Tensor) -> tuple[Tensor, float] | None:
    """Read a mask, once, since that waits for the device; an inference tensor each time, for it counts no changes."""
    with torch.inference_mode(False), torch.no_grad():
        if mask.is_inference():
            return regions_of_mask(mask)
        cached = _read_masks.get(mask)
        if cached is None or cached[0] != mask._version:
            cached = _read_masks[mask] = (mask._version, regions_of_mask(mask))
        return cached[1]  # type: ignore[no-any-return]


# -- timm, official, mmdet: qkv in one layer ---------------------------------------------------------------------------


class PackedWindows(DropIn):
    """`WindowAttention.forward(x, mask)` of timm, the official repository and mmdetection (`WindowMSA`), V1 and V2."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within the windows [W, N, C]."""
        read = _regions(x, mask)
        if read is None or is_hooked(self.softmax, self.attn_drop):
            return super().forward(x, mask)  # type: ignore[misc, no-any-return]
        qkv, table, scores = _packed(self, x)
        out = window_attention(
            qkv,
            table,
            heads=self.num_heads,
            window=tuple(self.window_size),
            regions=read[0],
            mask_value=read[1],
            dropout=self.attn_drop.p if self.training else 0.0,
            **scores,
        )
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]


def _packed(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return qkv, the table of biases, and how scores are scaled: as in Swin V2, by cosine, where there is a scale."""
    if not hasattr(attention, "logit_scale"):  # a replica or a shard has it as a plain attribute
        return attention.qkv(x), attention.relative_position_bias_table, {"scale": attention.scale}
    table = _cosine_table(attention.cpb_mlp, attention.relative_coords_table, attention.num_heads)
    return _cosine_qkv(attention, x), table, {"head_scale": _head_scale(attention.logit_scale)}


def _cosine_qkv(attention: Any, x: Tensor) -> Tensor:
    if attention.q_bias is None or getattr(attention, "qkv_bias_separate", False) or is_hooked(attention.qkv):
        qkv: Tensor = attention.qkv(x)
        return qkv if attention.q_bias is None else qkv + _cosine_bias(attention)
    return F.linear(x, attention.qkv.weight, _cosine_bias(attention))


def _cosine_bias(attention: Any) -> Tensor:
    return torch.cat((attention.q_bias, torch.zeros_like(attention.v_bias), attention.v_bias))


def _cosine_table(mlp: nn.Module, coordinates: Tensor, heads: int) -> Tensor:
    # The host looks entries up and then takes the sigmoid of N · N numbers; here of the table's.
    table: Tensor = 16 * torch.sigmoid(mlp(coordinates).view(-1, heads))
    return table


def _head_scale(logarithm: Tensor) -> Tensor:
    return torch.clamp(logarithm, max=_HIGHEST_LOG_SCALE).exp().flatten()


class TimmBlock(DropIn):
    """`_attn` of timm's blocks: without roll, partition and merge where the map is cut without a rest."""

    def _attn(self: Any, x: Tensor) -> Tensor:
        attention = self.attn
        _, height, width, _ = x.shape
        tall, wide = self.window_size
        inner = (attention, attention.softmax, attention.attn_drop)
        if height % tall or width % wide or not runs_fused(x) or is_hooked(*inner):
            return super()._attn(x)  # type: ignore[misc, no-any-return]
        qkv, table, scores = _packed(attention, x)
        out = shifted_window_attention(
            qkv,
            table,
            heads=attention.num_heads,
            window=(tall, wide),
            shift=tuple(self.shift_size),
            dropout=attention.attn_drop.p if attention.training else 0.0,
            **scores,
        )
        return attention.proj_drop(attention.proj(out))  # type: ignore[no-any-return]


# -- torchvision: attention on the map ---------------------------------------------------------------------------------


class TorchvisionMap(DropIn):
    """`ShiftedWindowAttention.forward(x)` and V2's: pads the map, and needs no roll, partition or merge."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Attend within the windows of a map [B, Y, X, C]."""
        if not runs_fused(x):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        _, height, width, _ = x.shape
        tall, wide = self.window_size
        padded = F.pad(x, (0, 0, 0, -width % wide, 0, -height % tall))
        # A window as large as the map is not shifted.
        fits = (tall < padded.shape[1], wide < padded.shape[2])
        shift = tuple(s if moves else 0 for s, moves in zip(self.shift_size, fits, strict=True))
        cosine = hasattr(self, "logit_scale")
        bias = self.qkv.bias
        if cosine and bias is not None:
            q_bias, k_bias, v_bias = bias.chunk(3)
            bias = torch.cat((q_bias, torch.zeros_like(k_bias), v_bias))
        out = shifted_window_attention(
            F.linear(padded, self.qkv.weight, bias),
            _cosine_table(self.cpb_mlp, self.relative_coords_table, self.num_heads)
            if cosine
            else self.relative_position_bias_table,
            heads=self.num_heads,
            window=(tall, wide),
            shift=shift,  # type: ignore[arg-type]
            head_scale=_head_scale(self.logit_scale) if cosine else None,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        out = F.linear(out, self.proj.weight, self.proj.bias)
        out = F.dropout(out, self.dropout, self.training)
        return out[:, :height, :width].contiguous()


# -- Hugging Face: q, k and v in layers of their own -------------------------------------------------------------------


class HuggingFaceWindows(DropIn):
    """`SwinAttention.forward`; asked for the attention weights, it takes its own path."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """Attend within the windows [W, N, C]."""
        read = _regions(hidden_states, attention_mask)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        returns_weights = options.get("output_attentions") or self.config.output_attentions or is_hooked(self)
        if read is None or returns_weights or not _are_plain(projections):
            return super().forward(hidden_states, _as_mask(attention_mask, hidden_states), **options)  # type: ignore[misc]
        side = round(hidden_states.shape[1] ** 0.5)
        out = window_attention(
            _projected(hidden_states, projections),
            self.relative_position_bias.relative_position_bias_table,
            heads=self.num_attention_heads,
            window=(side, side),
            regions=read[0],
            mask_value=read[1],
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(out), None


class HuggingFaceCosineWindows(DropIn):
    """`Swinv2SelfAttention.forward`, which adds the mask twice."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> Any:
        """Attend within the windows [W, N, C]."""
        read = _regions(hidden_states, attention_mask)
        projections = (self.query, self.key, self.value)
        if read is None or output_attentions or is_hooked(self, self.dropout) or not _are_plain(projections):
            return super().forward(hidden_states, _as_mask(attention_mask, hidden_states), output_attentions)  # type: ignore[misc]
        out = window_attention(
            _projected(hidden_states, projections),
            _cosine_table(self.continuous_position_bias_mlp, self.relative_coords_table, self.num_attention_heads),
            heads=self.num_attention_heads,
            window=tuple(self.window_size),
            regions=read[0],
            mask_value=2 * read[1],
            head_scale=_head_scale(self.logit_scale),
            dropout=self.dropout.p if self.training else 0.0,
        )
        return (out,)


class HuggingFaceLayer(DropIn):
    """`get_attn_mask` of Hugging Face's layers: for attention that is fused, the regions of the shift, not a mask."""

    def get_attn_mask(self: Any, height: int, width: int, *rest: Any, **options: Any) -> Tensor | None:
        """Return the regions [windows, N] of a shifted map, None without a shift; a mask where hooks would see it."""
        inner = getattr(self.attention, "self", self.attention)
        if self.shift_size <= 0 or not isinstance(inner, DropIn) or is_hooked(self.attention, inner):
            return super().get_attn_mask(height, width, *rest, **options)  # type: ignore[misc, no-any-return]
        device = next((value for value in (*rest, *options.values()) if isinstance(value, torch.device)), None)
        window, shift = (self.window_size, self.window_size), (self.shift_size, self.shift_size)
        return shift_regions((height, width), window, shift, device or self.layernorm_before.weight.device)


def _as_mask(regions: Tensor | None, x: Tensor) -> Tensor | None:
    """Return what the module's own path takes for the regions of HuggingFaceLayer."""
    if regions is None or not _is_regions(regions):
        return regions
    return mask_of_regions(regions, _SHIFT_MASK, x.dtype)


def _are_plain(projections: tuple[Any, ...]) -> bool:
    """Return whether layers can be computed as one: torch's own linear layers, without hooks."""
    return all(type(layer) is nn.Linear for layer in projections) and not is_hooked(*projections)


def _projected(x: Tensor, projections: tuple[Any, ...]) -> Tensor:
    """Return q, k and v from one product; the weights are small compared with the tokens."""
    biases = [p.bias for p in projections]
    if any(b is not None for b in biases):
        biases = [
            p.weight.new_zeros(p.out_features) if b is None else b for p, b in zip(projections, biases, strict=True)
        ]
    weight = torch.cat([p.weight for p in projections])
    return F.linear(x, weight, torch.cat(biases) if biases[0] is not None else None)
