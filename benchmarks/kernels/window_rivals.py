"""Window attention by other means: as published, SDPA, FlexAttention, torch.compile, and timm's own module.

All take the qkv map [B, Y, X, 3·H·D] and the bias table, and return the map [B, Y, X, H·D]; so they roll and cut. What
libraries keep in buffers, the mask of the shift and the index of the bias, is made before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.kernels.window_attention import Spec, shifted_window_attention
from accel.kernels.window_attention.regions import merge, partition, relative_index, shift_regions

Op = Callable[[Tensor, Tensor], Tensor]


class Rivals:
    """The ways to attend within the shifted windows of maps of one size."""

    def __init__(self, spec: Spec, size: tuple[int, int], device: torch.device) -> None:
        self.spec, self.size = spec, size
        self.regions = shift_regions(size, spec.window, spec.shift, device)
        apart = self.regions[:, :, None] != self.regions[:, None, :]
        self.mask = torch.where(apart, spec.mask_value, 0.0)
        """[windows of one image, N, N], as timm and the official repository keep it."""
        self.index = relative_index(spec.window, device)

    def ops(self) -> dict[str, Op]:
        """Return the fused op and its rivals by name.

        Compiled ones are compiled anew, whole and for one shape: what torch.compile would run uncompiled is an error.
        """
        torch._dynamo.reset()
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
        return {
            "fused": self.fused,
            "eager": self.eager,
            "sdpa": self.sdpa,
            "timm fused": self.timm(),
            "compile": torch.compile(self.eager, **options),
            "flex": torch.compile(self.flex, **options),
        }

    def fused(self, qkv: Tensor, table: Tensor) -> Tensor:
        """Attend with the fused op."""
        spec = self.spec
        return shifted_window_attention(qkv, table, heads=spec.heads, window=spec.window, shift=spec.shift)

    def eager(self, qkv: Tensor, table: Tensor) -> Tensor:
        """Attend as the published code does under autocast: products in half precision, softmax in fp32."""
        spec = self.spec
        windows = partition(self._rolled(qkv), spec.window)
        q, k, v = windows.view(len(windows), spec.tokens, 3, spec.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * spec.scale) @ k.transpose(-2, -1)
        scores = scores + self._bias(table)
        scores = (scores.view(-1, len(self.mask), *scores.shape[1:]) + self.mask[None, :, None]).flatten(0, 1)
        out = scores.softmax(-1).to(v.dtype) @ v
        return self._unrolled(merge(out.transpose(1, 2).flatten(2), spec.window, self.size))

    def sdpa(self, qkv: Tensor, table: Tensor) -> Tensor:
        """Attend with scaled_dot_product_attention, bias and mask folded into one tensor that all images share."""
        q, k, v = self._cut(qkv)
        folded = (self._bias(table) + self.mask[:, None]).to(q.dtype).flatten(0, 1)[None]
        return self._joined(F.scaled_dot_product_attention(q, k, v, folded, scale=self.spec.scale))

    def flex(self, qkv: Tensor, table: Tensor) -> Tensor:
        """Attend with FlexAttention, bias and mask as score modifications."""
        from torch.nn.attention.flex_attention import flex_attention

        regions, index, heads, mask_value = self.regions, self.index, self.spec.heads, self.spec.mask_value

        def modified(score: Tensor, b: Tensor, wh: Tensor, i: Tensor, j: Tensor) -> Tensor:
            apart = regions[wh // heads, i] != regions[wh // heads, j]
            return score + table[index[i, j], wh % heads] + torch.where(apart, mask_value, 0.0)

        q, k, v = self._cut(qkv)
        out = flex_attention(q, k, v, score_mod=modified, scale=self.spec.scale)
        return self._joined(out)

    def timm(self) -> Op:
        """Return timm's module on its fused path, without its two linear layers, rolled and cut as timm's block does.

        Where there is no such module, the op raises why.
        """
        try:
            attention = timm_attention(self.spec, self.mask.device)
        except (ImportError, RuntimeError) as missing:  # torchvision beside another build of torch
            return _failing(missing)

        def attend(qkv: Tensor, table: Tensor) -> Tensor:
            attention.__dict__["relative_position_bias_table"] = table
            windows = partition(self._rolled(qkv), self.spec.window)
            with torch.autocast(qkv.device.type, qkv.dtype):
                out = attention(windows, self.mask)
            return self._unrolled(merge(out, self.spec.window, self.size))

        return attend

    def _rolled(self, qkv: Tensor) -> Tensor:
        down, right = self.spec.shift
        return qkv.roll((-down, -right), (1, 2))

    def _unrolled(self, out: Tensor) -> Tensor:
        return out.roll(self.spec.shift, (1, 2))

    def _bias(self, table: Tensor) -> Tensor:
        tokens = self.spec.tokens
        return table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)

    def _cut(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each [B, windows of an image · H, N, D] and contiguous: one copy, as `partition` makes."""
        (tall, wide), (height, width) = self.spec.window, self.size
        shape = len(qkv), height // tall, tall, width // wide, wide, 3, self.spec.heads, -1
        cut = self._rolled(qkv).view(shape).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = cut.reshape(3, len(qkv), len(self.mask) * self.spec.heads, self.spec.tokens, -1)
        return q, k, v

    def _joined(self, out: Tensor) -> Tensor:
        (tall, wide), (height, width) = self.spec.window, self.size
        shape = len(out), height // tall, width // wide, self.spec.heads, tall, wide, -1
        joined = out.reshape(shape).permute(0, 1, 4, 2, 5, 3, 6)
        return self._unrolled(joined.reshape(len(out), height, width, -1))


def timm_attention(spec: Spec, device: torch.device) -> nn.Module:
    """Return timm's WindowAttention on its fused path; its linear layers and its table are left to the caller.

    Raises:
        ImportError: without timm.
        RuntimeError: if it did not take its fused path.
    """
    from timm.layers import config
    from timm.models.swin_transformer import WindowAttention

    before = config._USE_FUSED_ATTN
    config.set_fused_attn(True, experimental=True)  # without `experimental`, Swin stays on its plain path
    try:
        made: Any = WindowAttention(32 * spec.heads, spec.heads, window_size=spec.window)
    finally:
        config._USE_FUSED_ATTN = before
    if not made.fused_attn:
        raise RuntimeError("timm's WindowAttention did not take its fused path")
    made.qkv, made.proj = nn.Identity(), nn.Identity()
    del made._parameters["relative_position_bias_table"]
    return made.to(device)  # type: ignore[no-any-return]


def _failing(why: Exception) -> Op:
    def attend(qkv: Tensor, table: Tensor) -> Tensor:
        raise why

    return attend
