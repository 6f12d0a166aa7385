"""The noise scale as the batch controller measures it, and takes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from accel.goodput.efficiency import UNMEASURED_SHARE, NoiseInterval
from accel.goodput.noise_gradients import Gather
from accel.goodput.noise_meter import NoiseMeter
from accel.goodput.noise_scale import NoiseEstimate, NoiseScale
from accel.run.context import Run

_CONFIDENCE = 0.3
"""Of the noise scale's interval, by whose ends decisions are made: each end is right in 65 % of cases. A batch of
half the best size costs as much as one of twice that, so that being surer than that costs more than it saves."""


def meter_of(
    run: Run, replicas: int, gather: Gather | None, scaler: torch.amp.GradScaler | None, clock: Callable[[], float]
) -> NoiseMeter:
    """Return what measures a loop's noise, see `NoiseMeter`."""
    noise = NoiseScale(confidence=_CONFIDENCE)
    return NoiseMeter(
        run.model, run.optimizers, noise=noise, replicas=replicas, gather=gather, scaler=scaler, clock=clock
    )


def interval_of(estimate: NoiseEstimate) -> NoiseInterval | None:
    """Return the noise scale as the controller takes it; None before it was measured."""
    if math.isnan(estimate.phi):
        return None
    # Few measurements may put the variance below 0.
    phi = max(estimate.phi, estimate.low, 0.0)
    high = max(estimate.high, phi)
    return NoiseInterval(phi, estimate.low, high, batch=max(estimate.batch, 1.0), share=UNMEASURED_SHARE)
