"""The measured noise scale as the batch controller takes it."""

from __future__ import annotations

import math

from accel.goodput.efficiency import UNMEASURED_SHARE, NoiseInterval
from accel.goodput.noise_scale import NoiseEstimate


def interval_of(estimate: NoiseEstimate) -> NoiseInterval | None:
    """Return the noise scale as the controller takes it; None before it was measured."""
    if math.isnan(estimate.phi):
        return None
    # Few measurements may put the variance below 0.
    phi = max(estimate.phi, estimate.low, 0.0)
    high = max(estimate.high, phi)
    return NoiseInterval(phi, estimate.low, high, batch=max(estimate.batch, 1.0), share=UNMEASURED_SHARE)
