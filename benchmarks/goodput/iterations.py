"""How many steps a larger batch needs, predicted from the noise scale measured at smaller ones.

    steps at batch M = Σ over epochs of progress in the epoch / gain(M, φ)

against the steps of a run at M, which took the gain from the noise that it measured itself. φ comes from the run at the
least batch, M0, in one of three ways: as measured there; corrected by a share f of oscillation that is fitted to the
other applications; corrected by a share that is measured, from the runs at M0 and 2 M0 up to that epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from accel.goodput.efficiency import NoiseInterval, efficiency
from accel.goodput.throughput import Floats
from benchmarks.goodput.profiles import Run

WINDOW = 5
"""Epochs of which the median share is taken."""
SHARES = np.linspace(0, 0.99, 100)

Shares = Callable[[int], float]
"""The share of oscillation at an epoch."""


class Application(NamedTuple):
    """The runs of an application, and the noise that it is predicted from."""

    runs: Sequence[Run]
    """By batch size, the least first."""
    clean: bool
    """Whether the first epoch has the noise of the second: its own is an average over the first steps of training,
    with gradients that are orders of magnitude larger. It isn't touched where there are only two epochs."""

    def noise(self, run: Run) -> Floats:
        """Return the noise scale of each epoch of a run, samples."""
        if not self.clean or len(run.noise) < 3:
            return run.noise
        return np.append(run.noise[1], run.noise[1:])


def predicted_over_real(application: Application, run: Run, share: Shares) -> float:
    """Return the predicted steps of a run over those that it took."""
    base = application.runs[0]
    epochs = min(len(base.noise), len(run.steps))
    progress, steps = np.diff(base.progress[:epochs], prepend=0.0), 0.0
    for epoch, noise in enumerate(application.noise(base)[:epochs].tolist()):
        at = NoiseInterval(noise, noise, noise, batch=base.batch, share=share(epoch)).at(run.batch)
        steps += progress[epoch] / gain(run.batch, base.batch, at)
    return steps / float(run.steps[epochs - 1])


def gain(batch: float, base_batch: float, noise_scale: float) -> float:
    """Return how many steps of the base batch a step is worth: (φ/M0 + 1) / (φ/M + 1), in [1, M/M0] (AdaScale)."""
    return float(efficiency(batch, base_batch, noise_scale)) * batch / base_batch


def oscillation_share(noise_scale: float, batch: float, larger_noise_scale: float, larger_batch: float) -> float:
    """Return f at a batch, from the noise scales at it and at a larger one: (1 - φ(B) / φ(M)) / (1 - B / M)."""
    share = (1 - noise_scale / larger_noise_scale) / (1 - batch / larger_batch)
    return min(max(share, 0.0), 0.999)


def measured_share(application: Application) -> Shares:
    """Return the share that the first two runs show: the median of the last five epochs at each."""
    one, two = application.runs[:2]
    pairs = zip(application.noise(one).tolist(), application.noise(two).tolist(), strict=False)
    each = [oscillation_share(small, one.batch, large, two.batch) for small, large in pairs]

    def share(epoch: int) -> float:
        return float(np.median(each[max(0, epoch - WINDOW + 1) : epoch + 1] or each[-WINDOW:]))

    return share


def share_of_others(applications: Mapping[str, Application], left_out: str) -> float:
    """Return the one share that predicts the other applications best: least mean square of log ratios; 0 for none."""
    others = [application for name, application in applications.items() if name != left_out]
    best: float = min(SHARES.tolist(), key=lambda share: sum(_mean_square(other, share) for other in others))
    return best


def _mean_square(application: Application, share: float) -> float:
    ratios = [predicted_over_real(application, run, lambda _: share) for run in application.runs[1:]]
    return float(np.mean(np.log(ratios) ** 2))


def usable(runs: Sequence[Run]) -> bool:
    """Tell whether every epoch has a finite noise scale."""
    return len(runs) > 1 and all(np.isfinite(run.noise).all() for run in runs)
