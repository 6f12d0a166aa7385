"""Student's t distribution for whole degrees of freedom, without a statistics package.

Closed form of the central probability A(t | ν): Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3-26.7.4.
"""

from __future__ import annotations

import math
from functools import lru_cache


def cdf(t: float, degrees: int) -> float:
    """Return P(T ≤ t) for Student's t with `degrees` ≥ 1 degrees of freedom."""
    theta = math.atan(abs(t) / math.sqrt(degrees))
    cos, sin = math.cos(theta), math.sin(theta)
    odd = degrees % 2 == 1
    term = cos if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    central = 2 / math.pi * (theta + sin * total) if odd else sin * total
    return 0.5 + math.copysign(min(central, 1.0), t) / 2  # rounding takes far tails an ulp beyond 1


@lru_cache(maxsize=256)
def quantile(p: float, degrees: int) -> float:
    """Return t with P(T ≤ t) = p, for 0.5 ≤ p < 1, to 1e-9."""
    low, high = 0.0, 1.0
    while cdf(high, degrees) < p:
        high *= 2
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle, degrees) < p else (low, middle)
    return high
