"""gradient_half: 16-bit gradients on the wire, by hosts or not."""

from __future__ import annotations

from accel.strategies.base import Exactness
from accel.strategies.gradient_strategy import GradientStrategy


class GradientHalf(GradientStrategy):
    """Offer, beside DDP's own all-reduce, sums by hosts and bfloat16 on the wire."""

    name = "gradient_half"
    summary = "16-bit gradients on slow links"
    exactness = Exactness.REDUCED
    level = "reduced"
    above = ("lossy",)
