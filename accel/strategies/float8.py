"""float8: multiply the large linear layers in 8 bits, by torchao, where that is installed."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, needs_cuda
from accel.strategies.module_switch import ModuleSwitch

if TYPE_CHECKING:
    from accel.kernels.dropins import DropIn, SwitchedModules

_LEAST = 2048
"""Features in and out, below which casting takes longer than 8 bits save."""
_MULTIPLE = 16


class Float8(ModuleSwitch):
    """Let linear layers multiply in float8 (e4m3; gradients e5m2), each tensor scaled by its largest value.

    Weights, gradients and optimizer state keep their dtype. The last linear layer stays as it is. Casts are fused
    only in a compiled model: without `torch_compile` there is rarely a gain.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; torchao.float8.
    """

    name = "float8"
    summary = "large linear layers in 8 bits, by torchao"
    treats = frozenset({Bottleneck.COMPUTE})
    exactness = Exactness.FLOAT8

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, too old a GPU, no torchao, or no layer that would gain."""
        if why := needs_cuda(run):
            return why
        if torch.cuda.get_device_capability(run.device) < (8, 9):
            return "the GPU has no 8-bit products (compute capability 8.9 or newer has)"
        if self._switched is None and not _large_layers(run.model):
            return (
                f"no gain on its shapes: no linear layer but the last has {_LEAST} features in and out, "
                f"both multiples of {_MULTIPLE}"
            )
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed; pip install torchao"
        if run.observed.needs_graphs:
            return f"{run.observed.needs_graphs}, and torchao's layers can be differentiated once"
        return ""

    def switch(self, model: nn.Module, switched: SwitchedModules) -> None:
        """Switch the large layers."""
        for layer in _large_layers(model):
            switched.switch(layer, _dropin())


def _large_layers(model: nn.Module) -> list[nn.Linear]:
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    large = [layer for layer in layers[:-1] if all(map(_is_large, (layer.in_features, layer.out_features)))]
    return [layer for layer in large if layer.weight.requires_grad]  # torchao makes the gradient of a frozen one, too


def _is_large(features: int) -> bool:
    return features >= _LEAST and features % _MULTIPLE == 0


@functools.cache
def _dropin() -> type[DropIn]:
    """Return torchao's layer as a class to lay over `nn.Linear`.

    Its own way puts another module in each one's place, which a guard that puts attributes back would undo.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from accel.kernels.dropins import DropIn, is_transformed

    plain = nn.Linear(_MULTIPLE, _MULTIPLE, device="meta")
    # Padded where the number of rows is no multiple of 16, as in the last batch.
    emulates = not torch.cuda.is_available()
    config = Float8LinearConfig(emulate=emulates, pad_inner_dim=True)
    theirs = convert_to_float8_training(nn.Sequential(plain), config=config)[0]
    settings = {name: value for name, value in vars(theirs).items() if name not in vars(plain)}

    class Float8Linear(DropIn):
        def forward(self: Any, x: Tensor) -> Tensor:
            if (x.is_cuda or emulates) and x.numel() and not is_transformed():
                return type(theirs).forward(self, x)  # type: ignore[no-any-return]
            return super().forward(x)  # type: ignore[misc, no-any-return]

    for name, value in settings.items():
        setattr(Float8Linear, name, value)
    return Float8Linear
