"""Models whose gradients have the shapes and the pace of known networks, without their arithmetic.

A layer's backward pass sleeps for as long as an accelerator of `TFLOPS` would take for it and then hands over gradients
of the layer's shapes; so buckets fill as they would, and the cores of this machine are free for communication, as they
are beside an accelerator. Shapes and operations are those of ResNet-50 (He et al. 2015) at 224², VGG-16 (Simonyan and
Zisserman 2014) at 224² and BERT-base (Devlin et al. 2018) at 128 tokens.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TFLOPS = 10.0


class Layer(NamedTuple):
    """Parameters whose gradients become ready together."""

    shapes: tuple[tuple[int, ...], ...]
    macs: float
    """Multiplications for one sample, forward."""


def _conv(ins: int, outs: int, kernel: int, side: int, *, bias: bool) -> Layer:
    """Return a convolution to a square of `side`: with a bias, or with the two vectors of a batch norm."""
    macs = ins * outs * kernel * kernel * side * side
    return Layer(((outs, ins, kernel, kernel), (outs,)) + (() if bias else ((outs,),)), macs)


def _linear(ins: int, outs: int, tokens: int = 1) -> Layer:
    return Layer(((outs, ins), (outs,)), ins * outs * tokens)


def resnet50() -> list[Layer]:
    """Return the layers of ResNet-50."""
    found, ins = [_conv(3, 64, 7, 112, bias=False)], 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            found += [
                _conv(ins, width, 1, side, bias=False),
                _conv(width, width, 3, side, bias=False),
                _conv(width, 4 * width, 1, side, bias=False),
            ]
            if block == 0:
                found.append(_conv(ins, 4 * width, 1, side, bias=False))
            ins = 4 * width
    return [*found, _linear(2048, 1000)]


def vgg16() -> list[Layer]:
    """Return the layers of VGG-16."""
    found, ins = [], 3
    for width, count, side in ((64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14)):
        for _ in range(count):
            found.append(_conv(ins, width, 3, side, bias=True))
            ins = width
    return [*found, _linear(512 * 49, 4096), _linear(4096, 4096), _linear(4096, 1000)]


def bert_base(tokens: int = 128) -> list[Layer]:
    """Return the layers of BERT-base, without a head."""
    width = 768
    norm = Layer(((width,), (width,)), 0)
    found = [Layer(((30522, width), (512, width), (2, width)), 0), norm]
    for _ in range(12):
        found += [_linear(width, width, tokens) for _ in range(4)]
        found += [norm, _linear(width, 4 * width, tokens), _linear(4 * width, width, tokens), norm]
    return [*found, _linear(width, width)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, noise: Tensor, *parameters: Tensor) -> Tensor:
        time.sleep(seconds / 2)
        ctx.seconds, ctx.noise, ctx.shapes = seconds, noise, [one.shape for one in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        time.sleep(ctx.seconds)
        # One buffer serves all layers; autograd copies it, as it must: other layers have it, too.
        return above[0], None, None, *(ctx.noise[: shape.numel()].view(shape) for shape in ctx.shapes)


class Replayed(nn.Module):
    """A model that replays the gradients of layers.

    Args:
        layers: in forward order.
        batch: samples of each rank in a step.
    """

    def __init__(self, layers: list[Layer], batch: int) -> None:
        super().__init__()
        self.seconds = [
            4 * one.macs * batch / (TFLOPS * 1e12) for one in layers
        ]  # backward: two products, two FLOP each
        self.layers = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in one.shapes) for one in layers
        )
        largest = max(p.numel() for p in self.parameters())
        self.register_buffer("noise", torch.randn(largest, generator=torch.Generator().manual_seed(1)) * 1e-3)

    def forward(self, batch: Tensor) -> Tensor:
        x = batch.flatten()[:1].clone().requires_grad_()
        replay: Any = _Replay.apply
        for seconds, parameters in zip(self.seconds, self.layers, strict=True):
            x = replay(x, seconds, self.noise, *parameters.parameters())
        return x


PROFILES = {"resnet": (resnet50, 64), "vgg": (vgg16, 64), "bert": (bert_base, 32)}
"""Layers by name, and samples of each rank in a step."""
