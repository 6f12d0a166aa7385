"""gradient_compression: gradients compressed where the network is slow, with error feedback."""

from __future__ import annotations

from accel.strategies.base import Exactness
from accel.strategies.gradient_strategy import GradientStrategy


class GradientCompression(GradientStrategy):
    """Offer, beside DDP's own all-reduce, sums by hosts, 16 bits, int8, 1-bit, PowerSGD and DGC."""

    name = "gradient_compression"
    summary = "gradients compressed on slow links, with error feedback"
    exactness = Exactness.LOSSY
    level = "lossy"
