"""What the fused op redefines in the Swin modules of timm, torchvision, Hugging Face and the official repository.

Each class here is laid over a module's own (`dropin_class`): a subclass with another `forward`, and nothing else. Where
it can't serve a call (a mask that is none of a shift, attention weights asked for, hooks on layers that the op skips),
it calls the module's own.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from accel.kernels.window_attention import shifted_window_attention, window_attention
from accel.kernels.window_regions import regions_of_mask

_HIGHEST_LOG_SCALE = 4.605170185988092
"""log 100: Swin V2 clamps its scale there."""

_made: dict[tuple[type, type], type[nn.Module]] = {}
_read_masks: Any = WeakTensorKeyDictionary()


class DropIn:
    """Base of the classes that replace a module's own; copies and pickles name the class it had."""

    host: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What object.__reduce_ex__ returns names this class, and pickle insists on it; this is its older form.
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (copyreg._reconstructor, (self.host, object, None), *state)  # type: ignore[attr-defined]


def dropin_class(dropin: type[DropIn], host: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `host` that takes what `dropin` redefines; it bears the host's name."""
    if (dropin, host) not in _made:
        names = {name: getattr(host, name) for name in ("__module__", "__qualname__", "__doc__")}
        _made[dropin, host] = type(host.__name__, (dropin, host), {"host": host, **names})
    return _made[dropin, host]


def _hooked(*modules: Any) -> bool:
    """Tell whether somebody listens to modules that the fused op doesn't call."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def _regions(mask: Tensor | None) -> tuple[Tensor | None, float] | None:
    """Return a mask's regions and value; None if it is no mask of regions."""
    return (None, 0.0) if mask is None else _read(mask)


# A graph break is less than the mask's values in a guard.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read(mask: Tensor) -> tuple[Tensor, float] | None:
    """Read a mask, once: that waits for the device."""
    known = _read_masks.get(mask)
    if known is None or known[0] != mask._version:
        known = _read_masks[mask] = (mask._version, regions_of_mask(mask))
    return known[1]  # type: ignore[no-any-return]


# -- timm, official, mmdet: qkv in one layer ---------------------------------------------------------------------------


class PackedWindows(DropIn):
    """`WindowAttention.forward(x, mask)` of timm, the official repository and mmdetection (there `WindowMSA`)."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within the windows [W, N, C]."""
        read = _regions(mask)
        if read is None or _hooked(self.softmax, self.attn_drop):
            return super().forward(x, mask)  # type: ignore[misc, no-any-return]
        out = window_attention(
            self.qkv(x),
            self.relative_position_bias_table,
            heads=self.num_heads,
            window=tuple(self.window_size),
            regions=read[0],
            mask_value=read[1],
            scale=self.scale,
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]


class PackedCosineWindows(DropIn):
    """`WindowAttention.forward(x, mask)` of Swin V2, in timm and the official repository."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within the windows [W, N, C]."""
        read = _regions(mask)
        if read is None or _hooked(self.softmax, self.attn_drop):
            return super().forward(x, mask)  # type: ignore[misc, no-any-return]
        out = window_attention(
            _cosine_qkv(self, x),
            _cosine_table(self.cpb_mlp, self.relative_coords_table, self.num_heads),
            heads=self.num_heads,
            window=tuple(self.window_size),
            regions=read[0],
            mask_value=read[1],
            head_scale=_head_scale(self.logit_scale),
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]


def _cosine_qkv(attention: Any, x: Tensor) -> Tensor:
    if attention.q_bias is None or getattr(attention, "qkv_bias_separate", False) or _hooked(attention.qkv):
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
        if height % tall or width % wide or _hooked(*inner):
            return super()._attn(x)  # type: ignore[misc, no-any-return]
        cosine = hasattr(attention, "logit_scale")
        out = shifted_window_attention(
            _cosine_qkv(attention, x) if cosine else attention.qkv(x),
            _cosine_table(attention.cpb_mlp, attention.relative_coords_table, attention.num_heads)
            if cosine
            else attention.relative_position_bias_table,
            heads=attention.num_heads,
            window=(tall, wide),
            shift=tuple(self.shift_size),
            scale=None if cosine else attention.scale,
            head_scale=_head_scale(attention.logit_scale) if cosine else None,
            dropout=attention.attn_drop.p if attention.training else 0.0,
        )
        return attention.proj_drop(attention.proj(out))  # type: ignore[no-any-return]


# -- torchvision: attention on the map ---------------------------------------------------------------------------------


class TorchvisionMap(DropIn):
    """`ShiftedWindowAttention.forward(x)` and V2's: pads the map, and needs no roll, partition or merge."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Attend within the windows of a map [B, Y, X, C]."""
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
        read = _regions(attention_mask)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        asked = options.get("output_attentions") or self.config.output_attentions or _hooked(self)
        if read is None or asked or not _are_plain(projections):
            return super().forward(hidden_states, attention_mask, **options)  # type: ignore[misc]
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
        read = _regions(attention_mask)
        projections = (self.query, self.key, self.value)
        if read is None or output_attentions or _hooked(self, self.dropout) or not _are_plain(projections):
            return super().forward(hidden_states, attention_mask, output_attentions)  # type: ignore[misc]
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
    """`get_attn_mask` of Hugging Face's layers: the same mask object for the same map, so that it is read once."""

    def get_attn_mask(self: Any, height: int, width: int, *rest: Any, **options: Any) -> Tensor | None:
        """Return the mask of a shifted map, None without a shift."""
        key = (height, width, self.shift_size, self.window_size, *rest, *options.values())
        kept = self.__dict__.setdefault("_accel_masks", {})
        if key not in kept:
            kept[key] = super().get_attn_mask(height, width, *rest, **options)  # type: ignore[misc]
        return kept[key]  # type: ignore[no-any-return]


def _are_plain(projections: tuple[Any, ...]) -> bool:
    """Tell whether layers can be computed as one: linear layers as torch has them, that nobody listens to."""
    return all(type(layer) is nn.Linear for layer in projections) and not _hooked(*projections)


def _projected(x: Tensor, projections: tuple[Any, ...]) -> Tensor:
    """Return q, k and v from one product; the weights are small beside the tokens."""
    biases = [p.bias for p in projections]
    if any(b is not None for b in biases):
        biases = [
            p.weight.new_zeros(p.out_features) if b is None else b for p, b in zip(projections, biases, strict=True)
        ]
    weight = torch.cat([p.weight for p in projections])
    return F.linear(x, weight, torch.cat(biases) if biases[0] is not None else None)
