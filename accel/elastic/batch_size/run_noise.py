"""The gradient noise of a run under way, as far as it is known: measured in some of its steps, beside its losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel.elastic.batch_size.choice import interval_of
from accel.elastic.batch_size.loss_trend import LossTrend, loss_of
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.noise_gradients import Gather
from accel.goodput.noise_meter import NoiseMeter
from accel.goodput.noise_scale import NoiseScale
from accel.run.context import Run

if TYPE_CHECKING:
    from accel.session.session import Session

_CONFIDENCE = 0.3
"""Of the noise scale's interval, by whose ends decisions are made: each end is right in 65 % of cases. A batch of
half the best size costs as much as one of twice that, so that being surer than that costs more than it saves."""


class RunNoise:
    """Measure the noise in steps in which no candidate of a session is on.

    Args:
        session: whose steps they are.
        run: the user's objects.
        scaler: of the loop, if it has one and it is known: its scale is divided out of losses and gradients.
        clock: seconds, monotonic.

    Attributes:
        meter: None until the loop's first steps have shown how many batches a step has.
        trend: of the losses.
        is_measured: the step under way is one that measures the noise.
        known: rank 0's last interval that says something; the batch stays while none does, and so do its rates.
    """

    def __init__(
        self, session: Session, run: Run, scaler: torch.amp.GradScaler | None, clock: Callable[[], float]
    ) -> None:
        self._session, self._run, self._scaler, self._clock = session, run, scaler, clock
        self.meter: NoiseMeter | None = None
        self.trend = LossTrend()
        self._is_metered = self.is_measured = False
        """Whether the noise meter follows this step, and whether it measures it."""
        self.known: NoiseInterval | None = None
        self._is_closed = False

    def begin(self, replicas: int, gather: Gather | None, state: dict[str, Any] | None) -> None:
        """Begin to measure.

        Args:
            replicas: ranks.
            gather: see `NoiseMeter`.
            state: of the noise scale in the run that this one goes on from; None if there was none.
        """
        self.meter = NoiseMeter(
            self._run.model,
            self._run.optimizers,
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
        self._is_metered = meter is not None and meter.wants_step and not self._session.is_busy
        self.is_measured = meter is not None and self._is_metered and meter.begin_step()
        if self.is_measured or was_measured:
            self._session.events.calls.measure_noise(self.is_measured)
        if self.is_measured:
            self._session.leave_out_step()

    def begin_batch(self, fresh: int, accumulated: int) -> None:
        """A batch was delivered, see `NoiseMeter.begin_batch`."""
        if self._is_metered and self.meter is not None:
            self.meter.begin_batch(fresh, accumulated)

    def take_loss(self, roots: list[Tensor]) -> None:
        """Take in the loss that a backward pass began at, without the factor of a GradScaler."""
        if self._scaler is not None and self._scaler.is_enabled():
            roots = [root.detach() / self._scaler.scale(torch.ones_like(root)) for root in roots[:1]]
        if (loss := loss_of(roots)) is not None:
            self.trend.add(loss)

    def end_step(self, samples: int) -> None:
        """A step has ended that had so many samples on each rank."""
        if self.meter is not None:
            self.meter.end_step() if self._is_metered else self.meter.skip_step(samples)

    def check(self) -> None:
        """Raise InvalidArgument if the noise can't be measured."""
        if self.meter is not None and self.meter.refusal:
            raise InvalidArgument(f"the gradient noise can't be measured: {self.meter.refusal}")

    def estimate(self) -> NoiseInterval | None:
        """Return the noise scale by this rank's losses; they might tell on one rank and not on another."""
        assert self.meter is not None
        noise = interval_of(self.meter.noise.estimate(learns=self.trend.falls()))
        # Few measurements may hide the signal for a while. What was known before holds: φ grows in most trainings.
        return self.known if noise is None or not noise.is_known else noise

    def close(self) -> None:
        """Measure no more."""
        self._is_metered, self.is_measured, self._is_closed = False, False, True
        if self.meter is not None:
            self._session.events.calls.noise = None
            if self._session.alive:
                self._session.events.calls.measure_noise(False)
                self._session.events.calls.hear(None)
            self.meter.close()
