"""Swin modules of the libraries that have them, as oracles."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.kernels import support
from accel.kernels.window_attention import attention as window_attention
from benchmarks.suite.packages import let_torchvision_import


def need(name: str) -> None:
    """Skip without a package; torchvision's models load beside any build of torch."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}, which is not installed")
    let_torchvision_import()


def serve_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drop-ins serve a CPU, where they leave calls to the module: on the reference, which takes no interpreter."""
    monkeypatch.setattr(support, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(window_attention, "_runs_kernels", lambda qkv: False)


def window_operators(*graphs: torch.fx.GraphModule) -> int:
    """Return how often the op stands in graphs."""
    return sum(str(node.target) == "accel.window_attention.default" for graph in graphs for node in graph.graph.nodes)


class OfficialWindowAttention(nn.Module):
    """Attributes and results of the official repository's module, which no package holds."""

    def __init__(self, dim: int, window_size: tuple[int, int], num_heads: int, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, window_size, num_heads
        self.scale = (dim // num_heads) ** -0.5
        tall, wide = window_size
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * tall - 1) * (2 * wide - 1), num_heads))
        self.register_buffer("relative_position_index", self._index(tall, wide))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop, self.softmax = nn.Dropout(attn_drop), nn.Dropout(0.0), nn.Softmax(dim=-1)

    @staticmethod
    def _index(tall: int, wide: int) -> Tensor:
        y, x = torch.arange(tall).repeat_interleave(wide), torch.arange(wide).repeat(tall)
        return (y[:, None] - y + tall - 1) * (2 * wide - 1) + x[:, None] - x + wide - 1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = _heads(self.qkv(x), self.num_heads)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        return _attended(self, q * self.scale @ k.transpose(-2, -1) + bias, v, mask)


class OfficialWindowAttentionV2(nn.Module):
    """The same of its Swin V2: cosines, a scale for each head, and a table that a small network makes."""

    def __init__(self, dim: int, window_size: tuple[int, int], num_heads: int, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, window_size, num_heads
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, num_heads, bias=False))
        tall, wide = window_size
        offsets = torch.meshgrid(torch.arange(1.0 - tall, tall), torch.arange(1.0 - wide, wide), indexing="ij")
        table = 8 * torch.stack(offsets, -1)[None] / torch.tensor([tall - 1, wide - 1])
        table = table.sign() * torch.log2(table.abs() + 1) / math.log2(8)
        self.register_buffer("relative_coords_table", table)
        self.register_buffer("relative_position_index", OfficialWindowAttention._index(tall, wide))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.attn_drop, self.proj_drop, self.softmax = nn.Dropout(attn_drop), nn.Dropout(0.0), nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        q, k, v = _heads(F.linear(x, self.qkv.weight, bias), self.num_heads)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * self.logit_scale.clamp(max=math.log(1 / 0.01)).exp()
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        scores = scores + 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()
        return _attended(self, scores, v, mask)


class WindowMSA(OfficialWindowAttention):
    """MMDetection's: other names, and another way to the same index."""

    def __init__(self, embed_dims: int, window_size: tuple[int, int], num_heads: int) -> None:
        super().__init__(embed_dims, window_size, num_heads)
        del self.dim
        self.embed_dims = embed_dims

    @staticmethod
    def _index(tall: int, wide: int) -> Tensor:
        steps = (torch.arange(tall)[:, None] * (2 * wide - 1) + torch.arange(wide)).reshape(1, -1)
        return (steps + steps.T).flip(1).contiguous()


OfficialWindowAttention.__name__ = OfficialWindowAttentionV2.__name__ = "WindowAttention"
MODULES = {"official v1": OfficialWindowAttention, "official v2": OfficialWindowAttentionV2, "mmdetection": WindowMSA}
"""Attention on windows that were cut out, of libraries that can't be installed here."""


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def _attended(module: Any, scores: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
    out = module.attn_drop(module.softmax(scores)) @ v
    return module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def _timm(version: int, size: int, window: int) -> nn.Module:
    need("timm")
    from timm.models import swin_transformer, swin_transformer_v2

    kind = swin_transformer_v2.SwinTransformerV2 if version == 2 else swin_transformer.SwinTransformer
    return kind(
        img_size=size, patch_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=window, num_classes=5,
        drop_path_rate=0.0,
    )  # fmt: skip


def _torchvision(version: int, size: int, window: int) -> nn.Module:
    need("torchvision")
    from torchvision.models import swin_transformer as tv

    block = tv.SwinTransformerBlockV2 if version == 2 else tv.SwinTransformerBlock
    merging = tv.PatchMergingV2 if version == 2 else tv.PatchMerging
    return tv.SwinTransformer(
        [4, 4], 32, [2, 2], [2, 4], [window, window], stochastic_depth_prob=0.0, num_classes=5, block=block,
        downsample_layer=merging,
    )  # fmt: skip


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits  # type: ignore[no-any-return]


def _hugging_face(version: int, size: int, window: int) -> nn.Module:
    need("transformers")
    import transformers

    name = "Swinv2" if version == 2 else "Swin"
    config = getattr(transformers, f"{name}Config")(
        image_size=size, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=window, num_labels=5,
        drop_path_rate=0.0,
    )  # fmt: skip
    return _Logits(getattr(transformers, f"{name}ForImageClassification")(config))


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    f"{library} v{version}": (lambda size, window, make=make, version=version: make(version, size, window))  # type: ignore[misc]
    for library, make in (("timm", _timm), ("torchvision", _torchvision), ("Hugging Face", _hugging_face))
    for version in (1, 2)
}
"""Name → function of image size and window that returns a small classifier of two stages with shifted blocks."""


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a value that matters: tables and biases start at zero in most models."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.copy_(noise if "table" in name else noise / math.sqrt(parameter[0].numel()))
            elif "logit_scale" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model
