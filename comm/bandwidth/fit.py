"""The line t(S) = α + β·S through measured times: α seconds, β seconds per byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accel.profiler.errors import InvalidArgument


class Fit(NamedTuple):
    """The line t(S) = alpha_s + beta_s_per_byte · S."""

    alpha_s: float
    beta_s_per_byte: float
    error: float
    """Largest relative distance of a measured time from the line: 0.5 means that no line describes the operation."""
    largest_bytes: int
    """Largest S measured."""

    def seconds(self, size_bytes: float) -> float:
        """Predict the time of one operation on `size_bytes`."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes


def fit_line(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit t = α + β·S with α, β ≥ 0 by least squares of the relative error.

    The relative error gives small sizes, which hold α, the same say as large ones, which hold β. Where that would make
    α negative it is 0, and β follows from the absolute errors, hence from the largest sizes.

    Args:
        points: (S in bytes, t in seconds), two different sizes at least.

    Raises:
        InvalidArgument: if there are fewer than two sizes.

    Example:
        >>> fit_line([(1000, 0.002), (2000, 0.003)])[:2]
        (0.001, 1e-06)
    """
    sizes = np.array([size for size, _ in points], dtype=float)
    times = np.array([seconds for _, seconds in points], dtype=float)
    if len(set(sizes)) < 2:
        raise InvalidArgument(f"a line needs two different sizes, got {sorted(set(sizes))}; measure another size")
    matrix = np.stack([1 / times, sizes / times], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(matrix / matrix.max(0), np.ones(len(times)), rcond=None)[0] / matrix.max(0), 0
    if alpha < 0:
        # Small sizes that were faster than the rate of large ones (a token bucket let them pass): the large ones count.
        alpha, beta = 0.0, float(times @ sizes / (sizes @ sizes))
    elif beta < 0:
        alpha, beta = float(matrix[:, 0].sum() / (matrix[:, 0] @ matrix[:, 0])), 0.0
    error = float(np.abs(matrix @ np.array([alpha, beta]) - 1).max())
    return Fit(float(alpha), float(beta), error, int(sizes.max()))
