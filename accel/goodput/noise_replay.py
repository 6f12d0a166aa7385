"""Two parts of one batch: the recorded call of the model is replayed on a part, the other part is the difference.

    T = Σ_i g_i          what arrived at the parameters in the step itself, before clipping
    A = Σ_{i in part} g_i   by a replay; the other part's gradient is T - A

The gradient that arrived at the model's outputs is sent back again, so the loss need not be known, and the weights are
those of the step: no bias by momentum, as estimates from the gradients of neighbouring steps have. The samples of the
part are drawn at random, since a batch may be sorted.

    rows    the inputs' rows of the part alone go through the model: it costs the part's share of a step
    masks   all rows go through, and a gradient of zero is sent back for the others: a whole forward and backward pass,
            but dropout draws what it drew in the step, and batch normalisation sees the same batch
    losses  where the outputs are losses themselves, means over the samples: as rows, with both parts replayed and the
            step's own gradient left aside, since dropout draws anew for each

Where a loss is among the outputs, only what arrived at losses is sent back: it has been through the other outputs.

Which one is right is found out at the first measurement, and looked at again at the 10th, 100th, …: A and the other
part's own replay B must give A + B = T. An error e of that sum adds n (‖e‖ / ‖T‖)² samples to φ at a batch of n, so up
to 2 % is allowed (0.0004 n samples). Masks are linear for any loss and any model, so there the samples must be
independent too: in evaluation mode, other samples beside the part must leave its outputs as they are. For losses, the
whole batch's replay must give T, and the parts' losses in evaluation mode must have the whole batch's as their mean.
What fails is refused, with the reason. All that is asked of plain gradients: in Adam's coordinates the rounding noise
of a gradient that is zero, such as that of a bias before batch normalisation, is as large as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from accel.goodput.noise_gradients import Unmeasurable
from accel.goodput.noise_scale import NoiseSums
from accel.guard import guard
from accel.guard.guard import Recording
from accel.profiler.interruptions import ours
from accel.profiler.trees import map_tensors, tensors

Call = Callable[..., Any]
Vector = Callable[[Sequence[Tensor | None]], Tensor]
Mode = Literal["rows", "masks", "losses"]

_PARTS = 4
"""The replayed part is one of so many. A smaller part costs less, and the distance of its gradient from the batch's
tells tr(Σ) as well, down to a few samples."""
_SUM_ERROR = 0.02
"""‖A + B - T‖ / ‖T‖ that is rounding, or too small to matter."""
_ROW_ERROR = 1e-3
_ROW_ERROR_16_BIT = 2.0**-6
"""Relative error of an output's rows when other samples stand beside them."""


class _Part(NamedTuple):
    rows: Tensor
    share: float
    gradient: Tensor


class _Batch(NamedTuple):
    recording: Recording
    call: Call
    vector: Vector
    samples: int
    chosen: Tensor
    others: Tensor


class ReplayedParts:
    """Measure the noise in a recorded call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.mode: Mode | None = None
        self._measured = 0
        self._look_again = 1

    def sums(
        self,
        recording: Recording,
        call: Call,
        total: Tensor,
        vector: Vector,
        coordinates: Callable[[Tensor], Tensor],
        samples: int = 0,
    ) -> NoiseSums:
        """Return what the batch says of the noise.

        The caller restores what a replay changes (`guard.untouched`).

        Args:
            recording: the only call of the model in the step, and the gradients that arrived at its outputs.
            call: makes the call, as in the step.
            total: what arrived at the parameters, as `vector` returns it.
            vector: makes one vector of a replay's gradients.
            coordinates: maps such a vector, linearly, to the optimizer's coordinates.
            samples: in the batch, if known; 0 takes the first dimension of the first input.
        """
        count = _samples(recording, samples)
        losses = {number: each for number, each in recording.arrived.items() if not each.dim()}
        recording = replace(recording, arrived=losses) if losses else recording
        modes = _modes(recording, count)
        square = float(total.square().sum())
        if not math.isfinite(square):
            return NoiseSums(math.nan, math.nan, count / 2, count)  # the statistics skip it
        if square == 0:
            raise Unmeasurable("the step's gradient is zero")
        self._measured += 1
        batch = _Batch(recording, call, vector, count, *self._drawn(count, _PARTS))
        if self.mode not in modes or self._measured >= self._look_again:
            self.mode = None
            chosen, others = self._drawn(count, 2)  # halves: a small part hides its error in the rest
            self.mode = self._find_mode(modes, batch._replace(chosen=chosen, others=others), total)
            self._look_again = 10 * self._measured
        one = self._replayed(self.mode, batch, batch.chosen)
        if self.mode == "losses":
            total = one.gradient + self._replayed("losses", batch, batch.others).gradient
        return _sums(one, total, count, coordinates)

    def _drawn(self, count: int, parts: int) -> tuple[Tensor, Tensor]:
        """Draw the part's samples, without touching the loop's random state."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self._measured))
        # Batch normalisation takes no single sample, and a dimension of one may be squeezed away.
        size = min(max(2, count // parts), max(1, count - 1))
        return order[:size], order[size:]

    def _find_mode(self, modes: list[Mode], batch: _Batch, total: Tensor) -> Mode:
        reason = ""
        for mode in modes:
            try:
                if mode == "masks":
                    self._check_independence(batch)
                if mode == "losses":
                    self._check_mean(batch)
                    _check_sum(self._gradient(batch, recording=batch.recording), total)
                    return mode
                one, other = (self._replayed(mode, batch, rows) for rows in (batch.chosen, batch.others))
                _check_sum(one.gradient + other.gradient, total)
                return mode
            except Unmeasurable as refusal:
                reason = str(refusal)
            except ours() as error:  # the model does not take such a batch
                reason = f"the call can't be replayed: {type(error).__name__}: {error}"
        raise Unmeasurable(reason)

    def _check_independence(self, batch: _Batch) -> None:
        """Raise if, in evaluation mode, a sample's output depends on the samples beside it."""
        # The same shapes: the others' rows hold samples of the part.
        chosen, rows = batch.chosen, torch.arange(batch.samples)
        rows[batch.others] = chosen[torch.arange(len(batch.others)) % len(chosen)]
        whole, mixed = self._evaluated(batch, None), self._evaluated(batch, rows)
        for expected, actual in zip(whole, mixed, strict=True):
            own = chosen.to(expected.device)
            off, length = float((actual[own] - expected[own]).norm()), float(expected[own].norm())
            if not off <= self._row_error(batch.recording) * length:
                raise Unmeasurable(
                    "a sample's output depends on the samples beside it, or the first dimension is not the batch"
                )

    def _check_mean(self, batch: _Batch) -> None:
        """Raise if, in evaluation mode, the parts' losses don't have the whole batch's as their mean."""
        losses = [self._evaluated(batch, rows) for rows in (None, batch.chosen, batch.others)]
        share = len(batch.chosen) / batch.samples
        for whole, one, other in zip(*losses, strict=True):
            mean = share * float(one) + (1 - share) * float(other)
            if not abs(mean - float(whole)) <= max(_SUM_ERROR, self._row_error(batch.recording)) * abs(float(whole)):
                raise Unmeasurable(
                    f"the model's loss of a batch is {float(whole):.4g} and the mean over its parts {mean:.4g}, so it "
                    "is not a mean over samples"
                )

    def _evaluated(self, batch: _Batch, rows: Tensor | None) -> list[Tensor]:
        """Return the outputs that gradients arrived at, in evaluation mode; of some rows, or of all."""
        recording = batch.recording if rows is None else _with_rows(batch.recording, rows, batch.samples)
        batch.recording.before.restore()
        outputs = guard.replay(self._model, batch.call, recording, evaluates=True).outputs
        shapes = {number: each.shape for number, each in recording.arrived.items()}
        if any(number >= len(outputs) or outputs[number].shape != shape for number, shape in shapes.items()):
            raise Unmeasurable("in evaluation mode the model has other outputs, so nothing tells its samples apart")
        return [outputs[number].float() for number in shapes]

    def _row_error(self, recording: Recording) -> float:
        half = (torch.float16, torch.bfloat16)
        is_half = recording.autocast[0] or any(p.dtype in half for p in self._model.parameters())
        return _ROW_ERROR_16_BIT if is_half else _ROW_ERROR

    def _replayed(self, mode: Mode, batch: _Batch, rows: Tensor) -> _Part:
        whole = batch.recording
        recording = _with_masks(whole, rows) if mode == "masks" else _with_rows(whole, rows, batch.samples)
        gradient, share = self._gradient(batch, recording), len(rows) / batch.samples
        return _Part(rows, share, gradient * share if mode == "losses" else gradient)

    def _gradient(self, batch: _Batch, recording: Recording) -> Tensor:
        recording.before.restore()
        done = guard.replay(self._model, batch.call, recording)
        for number, arrived in recording.arrived.items():
            if number >= len(done.outputs) or done.outputs[number].shape != arrived.shape:
                shapes = ", ".join(str(tuple(each.shape)) for each in done.outputs)
                raise Unmeasurable(f"called again for a part of the batch, the model has outputs of shapes {shapes}")
        trained = sum(1 for p in self._model.parameters() if p.requires_grad)  # gradients of inputs follow
        return batch.vector(done.gradients[:trained])


def _samples(recording: Recording, samples: int) -> int:
    sizes = [len(each) for each in tensors((recording.args, recording.kwargs)) if each.dim()]
    if not sizes:
        raise Unmeasurable("the model was called without a tensor that has a batch dimension")
    count = samples or sizes[0]
    if count not in sizes:
        raise Unmeasurable(
            f"no input of the model has the batch's {count} samples as its first dimension; the first has {sizes[0]}"
        )
    if count < 2:
        raise Unmeasurable("a batch of one sample has no parts")
    return count


def _modes(recording: Recording, count: int) -> list[Mode]:
    """Return the modes that may suit the outputs, the cheapest first."""
    if not recording.arrived:
        raise Unmeasurable("no gradient has arrived at the outputs of the recorded call")
    if any(each.layout != torch.strided for each in recording.arrived.values()):
        raise Unmeasurable("the gradient of an output is sparse")
    if not any(each.dim() for each in recording.arrived.values()):
        return ["losses"]
    for arrived in recording.arrived.values():
        if len(arrived) != count:
            shape = tuple(arrived.shape)
            raise Unmeasurable(f"an output of shape {shape} has not the {count} samples as its first dimension")
    return ["rows", "masks"]


def _with_rows(recording: Recording, rows: Tensor, count: int) -> Recording:
    def chosen(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != count:
            return tensor
        return tensor.detach()[rows.to(tensor.device)].requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(chosen, recording.args), map_tensors(chosen, recording.kwargs)
    arrived = {number: chosen(gradient) for number, gradient in recording.arrived.items()}
    return replace(recording, args=args, kwargs=kwargs, arrived=arrived)


def _with_masks(recording: Recording, rows: Tensor) -> Recording:
    arrived = {}
    for number, gradient in recording.arrived.items():
        own = rows.to(gradient.device)
        masked = torch.zeros_like(gradient)
        masked[own] = gradient[own]
        arrived[number] = masked
    return replace(recording, arrived=arrived)


def _check_sum(replayed: Tensor, total: Tensor) -> None:
    error = float((replayed - total).norm() / total.norm())
    if not error <= _SUM_ERROR:
        raise Unmeasurable(
            f"what was replayed adds up to the step's gradient with an error of {error:.1%}, allowed are "
            f"{_SUM_ERROR:.1%}: so that is not a sum over the samples of the model's call"
        )


def _sums(part: _Part, total: Tensor, count: int, coordinates: Callable[[Tensor], Tensor]) -> NoiseSums:
    """Return the squares of two parts and of their mean; Q - ‖G‖² = ‖A - w T‖² / (w (1 - w)) loses no digits."""
    apart = coordinates(part.gradient - part.share * total)
    square, distance = torch.stack([coordinates(total).square().sum(), apart.square().sum()]).tolist()
    return NoiseSums(square + distance / (part.share * (1 - part.share)), square, count / 2, count)
