"""The gradient noise of a run under way, as far as it is known: measured in some of its steps, beside its losses.

Whether the loss falls: its slope over the second half of the run, against its scatter.

    t = slope / deviation of the slope, by least squares

The gradient of a small batch is mostly noise: its mean may be far too short to be told from 0 within hundreds of
measurements, and then nothing in the gradients tells a job that learns from one whose labels are random. The loss does,
as soon as it falls. The value that each backward pass begins at is taken for the loss.

The first half is left out: at first any model loses what its initial weights were wrong by. Later a fall is slow: a
loss that goes from 0.5 to 0.4 in 1,000 steps, with a scatter of 0.12, shows it in 512 with a t of 2.7 and in 1,000 with
one of 7.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accel.elastic.batch_size.choice import interval_of
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.noise_gradients import Gather
from accel.goodput.noise_meter import NoiseMeter
from accel.goodput.noise_scale import NoiseScale

if TYPE_CHECKING:
    from accel.session.session import Session

_CONFIDENCE = 0.3
"""Of the noise scale's interval, by whose ends decisions are made: each end is right in 65 % of cases. A batch of
half the best size costs as much as one of twice that, so that being surer than that costs more than it saves."""


class RunNoise:
    """Measure the noise in steps in which no candidate of a session is on.

    The scale of a known GradScaler is divided out of losses and gradients.

    Attributes:
        meter: None until the loop's first steps have shown how many batches a step has.
        is_metered, is_measured: the meter follows the step under way, and measures the noise in it.
        known: rank 0's last interval that says something; the batch stays while none does, and so do its rates.
    """

    def __init__(self, session: Session, scaler: torch.amp.GradScaler | None, clock: Callable[[], float]) -> None:
        self._session, self._scaler, self._clock = session, scaler, clock
        self.meter: NoiseMeter | None = None
        self.trend = LossTrend()
        self.is_metered = self.is_measured = False
        self.known: NoiseInterval | None = None
        self._is_closed = False

    def begin(self, replicas: int, gather: Gather | None, state: dict[str, Any] | None) -> None:
        """Begin to measure, from the state of an earlier run's noise scale if there is one."""
        self.meter = NoiseMeter(
            self._session.run.model,
            self._session.run.optimizers,
            noise=NoiseScale(confidence=_CONFIDENCE),
            replicas=replicas,
            gather=gather,
            scaler=self._scaler,
        )
        self.meter.clock = self._clock
        self._session.events.calls.noise = self.meter
        if state is not None:
            self.meter.noise.load_state_dict(state)

    def begin_step(self) -> None:
        """Measure the step that begins, if one is wanted now.

        A candidate that is on would disturb the measurement, and that the time of the steps without it. And a session
        that has ended may have on this rank alone: nothing changes then.
        """
        if self._is_closed:
            return
        meter, was_measured = self.meter, self.is_measured
        self.is_metered = meter is not None and meter.wants_step and not self._session.is_busy
        self.is_measured = meter is not None and self.is_metered and meter.begin_step()
        if self.is_measured or was_measured:
            self._session.events.calls.measure_noise(self.is_measured)
        if self.is_measured:
            self._session.leave_out_step()

    def begin_batch(self, fresh: int, accumulated: int) -> None:
        if self.meter is not None:
            self.meter.begin_batch(fresh, accumulated)

    def take_loss(self, roots: list[Tensor]) -> None:
        """Take in the loss that a backward pass began at, without the factor of a GradScaler."""
        if self._scaler is not None and self._scaler.is_enabled():
            roots = [root.detach() / self._scaler.scale(torch.ones_like(root)) for root in roots[:1]]
        if (loss := loss_of(roots)) is not None:
            self.trend.add(loss)

    def end_step(self, samples: int) -> None:
        if self.meter is not None:
            self.meter.end_step() if self.is_metered else self.meter.skip_step(samples)

    def check(self) -> None:
        if self.meter is not None and self.meter.refusal:
            raise InvalidArgument(f"the gradient noise can't be measured: {self.meter.refusal}")

    def estimate(self) -> NoiseInterval | None:
        """Return the noise scale by this rank's losses; they might tell on one rank and not on another."""
        assert self.meter is not None
        noise = interval_of(self.meter.noise.estimate(learns=self.trend.falls()))
        # Few measurements may hide the signal for a while. What was known before holds: φ grows in most trainings.
        return self.known if noise is None or not noise.is_known else noise

    def close(self) -> None:
        self.is_metered, self.is_measured, self._is_closed = False, False, True
        if self.meter is not None:
            self._session.events.calls.noise = None
            if self._session.alive:
                self._session.events.calls.measure_noise(False)
                self._session.events.calls.hear(None)
            self.meter.close()


# -- the trend of the loss ---------------------------------------------------------------------------------------------


_WAITING = 512
_BLOCKS = 256
"""Means of losses that are kept, at first of a single one: beyond, two become one."""
_LEAST = 24
"""Means in the second half of the run, from which on its slope is looked at."""
_STEEP = 4.0
"""t of a fall: it is asked for at each decision, hundreds of times in a run."""


class LossTrend:
    """Collects the losses of a run.

    Example:
        >>> trend = LossTrend()
        >>> for step in range(60):
        ...     trend.add(torch.tensor(2.0 - 0.02 * step + 0.1 * (-1) ** step))
        >>> trend.falls()
        True
    """

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._seen = 0
        self._means: list[float] = []
        """Of blocks of losses, over the whole run."""
        self._block: list[float] = []
        self._length = 1
        self._fell_at = 0
        """Losses seen when the fall was last sure."""

    def add(self, loss: Tensor) -> None:
        """Take in the loss of a backward pass, a number without its graph; it is not waited for."""
        self._waiting.append(loss)
        self._seen += 1
        if len(self._waiting) > _WAITING:
            self._read()

    def _read(self) -> None:
        """Read the losses, which waits for a GPU."""
        values = torch.stack([loss.reshape(()).float() for loss in self._waiting]).tolist() if self._waiting else []
        self._waiting = []
        for loss in filter(math.isfinite, values):
            self._block.append(loss)
            if len(self._block) == self._length:
                self._means.append(math.fsum(self._block) / self._length)
                self._block = []
            if len(self._means) == _BLOCKS:
                self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
                self._length *= 2

    def falls(self) -> bool:
        """Return whether the loss surely falls.

        Once it was sure, it holds until as many passes again have shown no further fall.
        """
        self._read()
        if _t(self._means[len(self._means) // 2 :]) < -_STEEP:
            self._fell_at = self._seen
        return self._seen <= 2 * self._fell_at and self._seen > 0


def loss_of(roots: Iterable[Tensor]) -> Tensor | None:
    """Return what a backward pass begins at, if it is a loss: the first single number, without its graph."""
    for root in roots:
        if root.numel() == 1 and root.is_floating_point():
            return root.detach()
    return None


def _t(losses: list[float]) -> float:
    count = len(losses)
    if count < _LEAST:
        return 0.0
    times, values = np.arange(count) - (count - 1) / 2, np.array(losses) - np.mean(losses)
    slope = float(times @ values / (times @ times))
    scatter = float(np.sum((values - slope * times) ** 2)) / (count - 2)
    deviation = math.sqrt(scatter / float(times @ times))
    return slope / deviation if deviation > 0 else math.copysign(math.inf, slope) if slope else 0.0
