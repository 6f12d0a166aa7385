"""Momentum accumulated on each rank, before error feedback (momentum correction).

    u ← m u + g,  what is compressed: u  (Nesterov: g + m u)

If momentum is applied to the mean gradient, a residual is amplified late and all at once; if it is applied before error
feedback, the residual consists of steps of SGD that arrive late, unchanged. A small convolutional network lost 0.4
points of accuracy with signs of gradients, 0.1 with signs of accumulated momentum (`python -m
benchmarks.comm_accuracy`, "1-bit alone" and "1-bit").

Source: Lin et al. 2018, arxiv.org/abs/1712.01887, section 3.2.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel.comm.compressor import Compressor
from accel.comm.layout import Layout, Piece
from accel.profiler.errors import InvalidArgument

if TYPE_CHECKING:
    from accel.comm.sgd_momentum import SGDMomentum

VELOCITY = "velocity"


class MomentumCorrection(Compressor):
    """Base of compressors that can take an optimizer's momentum over.

    Attributes:
        momentum: whether it does; what is remembered then does not depend on the loss scale.
    """

    momentum = False
    _source: SGDMomentum | None = None
    _scale: float | None = None
    _unsaved: tuple[str, ...] = ("_source", "_scale", "fields")

    def _bind(self, source: SGDMomentum | None) -> None:
        """Read coefficients and the loss scale from `source` from now on."""
        self._source, self._scale = source, None
        self.fields = (VELOCITY,) if self.momentum else ()

    @abstractmethod
    def is_dense(self, shape: torch.Size) -> bool:
        """Return whether parameters of this shape are sent as they are; the optimizer keeps their momentum."""

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
