"""Momentum accumulated on each rank, before error feedback (momentum correction).

    u ← m u + g,  what is compressed: u  (Nesterov: g + m u)

If momentum is applied to the mean gradient, a residual is amplified late and all at once; if it is applied before error
feedback, the residual consists of steps of SGD that arrive late, unchanged. A small convolutional network lost 0.4
points of accuracy with signs of gradients, 0.1 with signs of accumulated momentum (`python -m
benchmarks.comm_accuracy`, "1-bit alone" and "1-bit").

Source: Lin et al. 2018, arxiv.org/abs/1712.01887, section 3.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel.comm.compressor import Compressor
from accel.comm.layout import Layout, Piece
from accel.profiler.errors import InvalidArgument

if TYPE_CHECKING:
    from accel.comm.sgd_momentum import SGDMomentum

VELOCITY = "velocity"


class ParameterRange(NamedTuple):
    """The elements of a piece that belong to one parameter."""

    name: str
    span: slice
    sent: int
    """How many of them are sent compressed; 0 where all are sent as they are."""


class MomentumCorrection(Compressor):
    """Base of compressors that can take an optimizer's momentum over.

    Attributes:
        momentum: whether it does; what is remembered then does not depend on the loss scale.
        exact_below: parameters of fewer elements, and all of less than two dimensions, are sent as they are.
    """

    momentum = False
    exact_below: int
    _source: SGDMomentum | None = None
    _scale: float | None = None
    _unsaved: tuple[str, ...] = ("_source", "_scale", "fields")

    def _bind(self, source: SGDMomentum | None) -> None:
        """Read coefficients and the loss scale from `source` from now on."""
        self._source, self._scale = source, None
        self.fields = (VELOCITY,) if self.momentum else ()

    def is_dense(self, shape: torch.Size) -> bool:
        """Return whether parameters of this shape are sent as they are; the optimizer keeps their momentum."""
        return len(shape) < 2 or shape.numel() < self.exact_below

    def _parts(self, piece: Piece, ratio: float = 1.0) -> list[ParameterRange]:
        """Return what of a piece belongs to each parameter, of which a share is sent compressed."""
        return [
            ParameterRange(extent.name, extent.span, 0 if self.is_dense(shape) else math.ceil(ratio * extent.length))
            for extent, shape in piece.parameters()
        ]

    def check(self, layout: Layout) -> None:
        self._momentum_source()

    def begin_pass(self) -> None:
        if self._source is not None:
            self._source.begin_pass()

    def _momentum_source(self) -> SGDMomentum | None:
        if self.momentum and self._source is None:
            kind = type(self).__name__
            raise InvalidArgument(
                f"{kind} accumulates the optimizer's momentum, which was not handed over: call "
                f"accel.take_momentum(state, optimizer) first, or use {kind}(momentum=False)"
            )
        return self._source

    def _loss_scale(self, piece: Piece) -> float:
        """Return this step's scale, asked once: on a GPU the host waits for it."""
        source = self._momentum_source()
        if piece.layout.index == 0 or self._scale is None:
            self._scale = 1.0 if source is None else source.loss_scale()
        return self._scale

    def _corrected(self, piece: Piece, name: str, span: slice) -> Tensor:
        """Return what momentum makes of a parameter's gradients, in `piece.values` or the velocity's next value."""
        gradient, source = piece.values[span], self._momentum_source()
        if source is None:
            return gradient
        momentum, nesterov = source.coefficients(name)
        old, new = piece.slot.read(VELOCITY)[span], piece.slot.write(VELOCITY)[span]
        torch.add(gradient, old, alpha=momentum, out=new)
        return gradient.add_(new, alpha=momentum) if nesterov else new

    # Settings alone: a source belongs to a run.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._unsaved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind(None)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(self.__getstate__().items()))
        return f"{type(self).__name__}({settings})"
