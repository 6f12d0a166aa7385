"""What a sample of a larger batch is worth: statistical efficiency, and the noise scale at another batch.

    φ             gradient noise scale, samples: tr Σ / ‖∇L‖², Σ the covariance of one sample's gradient
    efficiency    (φ + M0) / (φ + M), M0 the batch of the user, M ≥ M0
    noise scale   1 / φ(M) = (1 - f) / φ(B) + f / φ(B) · B / M, measured at B

Efficiency: Pollux (Qiao et al., OSDI 2021), equation 6, after McCandlish et al. (https://arxiv.org/abs/1812.06162).

The last line: the measured ‖∇L‖² has a part that the batch's own noise causes, as the weights oscillate in the steep
directions of the loss. Its share f falls as 1/M, and φ grows as the batch does: on ImageNet from 1.4e4 at batch 200 to
1.7e5 at 12,800, late in training. f differs between jobs, from 0 (yolov3) to 1 (bert); without knowledge of the job one
half is the best guess. docs/goodput.md has the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from accel.errors import InvalidArgument

Bound = Literal["phi", "low", "high"]

UNMEASURED_SHARE = 0.5
"""f of a job that has not shown its own: most have one, from 0.6 to 1 in four of five recorded jobs."""


@dataclass(frozen=True)
class NoiseInterval:
    """A measured noise scale and the interval it lies in, samples.

    Args:
        phi: the estimate, ≥ 0; infinite if the gradients show no signal.
        low: lower end of the interval, ≤ phi.
        high: upper end, ≥ phi.
        batch: at which it was measured, > 0; only needed with `share`.
        share: f, the share of the measured ‖∇L‖² that the noise of that batch causes, in [0, 1).

    Raises:
        InvalidArgument: if a value is out of its range.

    Example:
        >>> noise = NoiseInterval(1000.0, 800.0, 1300.0, batch=100, share=0.5)
        >>> noise.at(100), round(noise.at(10**9))
        (1000.0, 2000)
    """

    phi: float
    low: float
    high: float
    batch: float = 1.0
    share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.phi <= self.high:
            values = f"low {self.low}, phi {self.phi}, high {self.high}"
            raise InvalidArgument(f"a noise scale must have 0 ≤ low ≤ phi ≤ high. Found: {values}")
        if not (0 < self.batch < math.inf and 0 <= self.share < 1):
            raise InvalidArgument(
                f"batch must be positive and finite, share in [0, 1). Found: {self.batch} and {self.share}"
            )

    @property
    def is_known(self) -> bool:
        """False if it may have any value."""
        return self.low > 0 or self.high < math.inf

    def at(self, batch: ArrayLike, bound: Bound = "phi") -> Any:
        """Return the noise scale at a batch, samples: a float for a number, an array for an array.

        Args:
            batch: samples of a step, > 0.
            bound: "phi" for the estimate, "low" and "high" for the ends of the interval.
        """
        value, size = float(getattr(self, bound)), np.asarray(batch, float)
        noise = value / (1 - self.share + self.share * (self.batch / size))
        return noise if np.ndim(batch) else float(noise)


def efficiency(batch: ArrayLike, base_batch: float, noise_scale: ArrayLike) -> Any:
    """Return the progress per sample at a batch, as a share of that at the base batch: (φ + M0) / (φ + M).

    Args:
        batch: M, samples of a step, ≥ base_batch; a number or an array.
        base_batch: M0, samples of a step of the user's, > 0.
        noise_scale: φ at M, samples, ≥ 0; infinite for pure noise.

    Returns:
        In (0, 1], 1 at the base batch; a float for numbers.

    Raises:
        InvalidArgument: if an argument is out of its range.

    Example:
        >>> efficiency(batch=300, base_batch=100, noise_scale=700)
        0.8
    """
    size, noise = np.asarray(batch, float), np.asarray(noise_scale, float)
    if not 0 < base_batch < math.inf:
        raise InvalidArgument(f"base_batch must be positive and finite. Found: {base_batch}")
    if not (np.isfinite(size) & (size >= base_batch)).all():
        raise InvalidArgument(f"batch must be finite and at least base_batch, {base_batch:g}. Found: {size.min():g}")
    if not (noise >= 0).all():
        raise InvalidArgument(f"noise_scale must be at least 0. Found: {noise.min():g}")
    # Divided by φ + M0 first: φ may be infinite.
    result = 1 / (1 + (size - base_batch) / (noise + base_batch))
    return result if np.ndim(batch) or np.ndim(noise_scale) else float(result)
