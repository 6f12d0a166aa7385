"""Fit the step-time model to measured steps: robust least squares of logarithms, by Levenberg-Marquardt.

    minimise  Σ 2 (√(1 + z²) - 1) + Σ ((θ - centre) / width)²,   z = (log predicted - log measured) / deviation

θ are the logarithms of the eight times, and the logits of the two exponents on [1, 10]. The first sum is quadratic for
small errors and linear for large ones (soft L1). The second are weak priors: they decide what was never observed, and
give way to a few observations. With one replica the sync times stay at their centres, small parts of a step, so that a
scheduler tries a second replica but expects no miracle; with one batch size a third of the computation is taken as
fixed, so that a larger batch promises little. Pollux (https://www.usenix.org/conference/osdi21/presentation/qiao, §4.1)
sets what is unexplored to 0 instead.

Levenberg-Marquardt: Marquardt, SIAM J. Appl. Math. 11(2), 1963; the weights of soft L1 as in Triggs et al., Bundle
adjustment, 2000.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from accel.goodput.forms import SYNC_TERMS, Floats, power_sum, sync_terms
from accel.goodput.observations import Observations, StepTimes
from accel.goodput.throughput import MOST, ThroughputModel


class Prior(NamedTuple):
    """What a parameter is taken to be before anything is observed."""

    centre: float
    """A time as a share of the typical step, or an exponent."""
    width: float
    """One standard deviation, of the logarithm or the logit."""


PRIORS = {
    "compute_fixed_s": Prior(1 / 3, 2.0),
    "compute_sample_s": Prior(2 / 3, 2.0),  # of a step of the typical batch
    "compute_exponent": Prior(2.0, 1.5),
    "overlap_exponent": Prior(2.0, 1.0),
    "local_ring_s": Prior(0.05, 2.0),
    "local_latency_s": Prior(0.01, 2.0),
    "ring_s": Prior(0.2, 2.0),
    "two_nodes_s": Prior(0.05, 2.0),
    "shared_link_s": Prior(0.05, 2.0),
    "latency_s": Prior(0.02, 2.0),
}
"""By the parameter's name, in the order of θ."""

_NAMES = tuple(PRIORS)
_CENTRES, _WIDTHS = np.array([prior.centre for prior in PRIORS.values()]), np.array([p.width for p in PRIORS.values()])
_EXPONENTS = np.array([name.endswith("exponent") for name in _NAMES])
_SYNC = slice(4, 10)
assert _NAMES[_SYNC] == SYNC_TERMS

ROUNDS = 100
_ENOUGH = 1e-4
"""A step that lowers the loss by less than this share is the last; the loss is then within 1 % of the least one."""
_LONGEST = 2.0
"""A step changes no time by more than e²."""
_MOVED = 3.0
"""What is left of a time that is taken for another's is e^-3 of it."""
_MISSED = 3.0
"""Deviations by which a fit misses a time that it does not explain."""
_FARTHEST = 10.0
"""A start is brought to within e^10 of what the priors say: times of 0 have no logarithm."""


def fit(observations: Observations, start: ThroughputModel | None = None) -> ThroughputModel:
    """Return the model of a job's step times.

    Args:
        observations: step times by configuration, at least one.
        start: an earlier model of the job; the fit begins there if that is better than what the priors say, and takes
            a fraction of the time.

    Raises:
        InvalidArgument: if there is none.

    Example:
        >>> from accel.goodput.observations import Configuration, Observations
        >>> observations = Observations()
        >>> for replicas, seconds in ((1, 0.10), (2, 0.12), (4, 0.13)):
        ...     observations.add(Configuration(nodes=1, replicas=replicas, local_batch=32), seconds)
        >>> model = fit(observations)
        >>> round(model.step_s(nodes=1, replicas=2, local_batch=32), 2)
        0.12
    """
    return fit_step_times(observations.step_times(), start)


def fit_step_times(times: StepTimes, start: ThroughputModel | None = None) -> ThroughputModel:
    """Return the model of step times that stand in columns; see `fit`."""
    problem = Problem(times)
    return model_of(problem.minimise(None if start is None else theta_of(start)))


class Problem:
    """The loss of a fit, and its minimum.

    Args:
        times: to be fitted.
    """

    def __init__(self, times: StepTimes) -> None:
        self._log_seconds = np.log(times.seconds)
        self._log_batch = np.log(times.local_batch)
        self._has_extra = times.accumulation > 0
        self._log_extra = np.log(times.accumulation, where=self._has_extra, out=np.full(len(times.seconds), -np.inf))
        self._sync = sync_terms(times.nodes, times.replicas) * times.communication_scale[:, None]
        self._is_sync = (self._sync > 0).any(axis=1)
        self._deviation = times.deviation
        self.centre = _centre(times)

    def predict(self, theta: Floats) -> tuple[Floats, Floats]:
        """Return the logarithm of each step time (n,), and its derivatives by θ (n, 10)."""
        p, overlap = (1 + (MOST - 1) * _logistic(each) for each in theta[2:4])
        compute = power_sum(theta[0], theta[1] + self._log_batch, p)
        parts = self._sync * np.exp(theta[_SYNC])
        sync = parts.sum(axis=1)
        log_sync = np.log(sync, where=self._is_sync, out=np.full(len(sync), -np.inf))
        last = power_sum(compute.log, log_sync, overlap)
        whole = power_sum(last.log, self._log_extra + compute.log, 1.0)
        by_compute = whole.by_log_x * last.by_log_x + whole.by_log_y
        jacobian = np.empty((len(sync), len(theta)))
        jacobian[:, 0] = by_compute * compute.by_log_x
        jacobian[:, 1] = by_compute * compute.by_log_y
        jacobian[:, 2] = by_compute * compute.by_exponent * _by_logit(p)
        jacobian[:, 3] = whole.by_log_x * last.by_exponent * _by_logit(overlap)
        share = whole.by_log_x * last.by_log_y / np.where(self._is_sync, sync, 1.0)
        jacobian[:, _SYNC] = share[:, None] * parts
        return whole.log, jacobian

    def loss(self, theta: Floats) -> float:
        """Return what is minimised."""
        return self._evaluate(theta).loss

    def derivative(self, theta: Floats) -> Floats:
        """Return the loss's derivative by θ (10,)."""
        return 2 * self._evaluate(theta).gradient

    def _evaluate(self, theta: Floats) -> _Point:
        log, jacobian = self.predict(theta)
        errors = (log - self._log_seconds) / self._deviation
        root = np.sqrt(1 + errors**2)
        shift = (theta - self.centre) / _WIDTHS
        # Half the second derivative, with the errors' own curvature left out; never negative.
        weighted = (jacobian / (self._deviation * root)[:, None]).T
        gradient = weighted @ errors + shift / _WIDTHS
        curvature = weighted @ (jacobian / self._deviation[:, None]) + np.diag(_WIDTHS**-2.0)
        return _Point(theta, float(2 * (root - 1).sum() + shift @ shift), gradient, curvature)

    def minimise(self, start: Floats | None = None) -> Floats:
        """Return the θ of the least loss, beginning at the priors' centres, or at `start` if the loss is less there.

        Accumulated steps tell the exchange from other work that does not depend on the batch. Where that had been taken
        for computation there is a ridge between the two, so the other side of it is a beginning, too.
        """
        point = self._evaluate(self.centre)
        if start is not None:
            near = np.clip(start, self.centre - _FARTHEST, self.centre + _FARTHEST)
            point = min(point, self._evaluate(near), key=lambda each: each.loss)
        least = self._descend(point)
        if self._misses_accumulated(least):
            least = min(least, self._descend(self._evaluate(self._by_exchange(least.theta))), key=lambda p: p.loss)
        return least.theta

    def _misses_accumulated(self, point: _Point) -> bool:
        log, _ = self.predict(point.theta)
        misses = np.abs(log - self._log_seconds) > _MISSED * self._deviation
        return bool((misses & self._has_extra & self._is_sync).any())

    def _by_exchange(self, theta: Floats) -> Floats:
        """Return θ with the fixed part of the computation as part of the exchange."""
        fixed_s, exchange_s = np.exp(theta[0]), float((self._sync[self._is_sync] @ np.exp(theta[_SYNC])).mean())
        moved = theta.copy()
        moved[0] -= _MOVED
        moved[_SYNC] += np.log1p(fixed_s / exchange_s)
        return moved

    def _descend(self, point: _Point) -> _Point:
        damping = 1e-2
        for _ in range(ROUNDS):
            scaled = point.curvature + damping * np.diag(np.diag(point.curvature))
            step = np.clip(np.linalg.solve(scaled, -point.gradient), -_LONGEST, _LONGEST)
            trial = self._evaluate(point.theta + step)
            if not trial.loss < point.loss:
                damping *= 4
                if damping > 1e8:
                    break
                continue
            is_enough = point.loss - trial.loss < _ENOUGH * point.loss
            point, damping = trial, max(damping / 5, 1e-9)
            if is_enough:
                break
        return point


class _Point(NamedTuple):
    """The loss at a θ, with half its derivatives."""

    theta: Floats
    loss: float
    gradient: Floats
    curvature: Floats


def model_of(theta: Floats) -> ThroughputModel:
    """Return the model with these logarithms and logits."""
    values = np.where(_EXPONENTS, 1 + (MOST - 1) * _logistic(theta), np.exp(theta))
    return ThroughputModel(**dict(zip(_NAMES, values.tolist(), strict=True)))


def theta_of(model: ThroughputModel) -> Floats:
    """Return the logarithms and logits of a model; infinite for times of 0 s, and exponents of 1 and 10."""
    return _theta(np.array([getattr(model, name) for name in _NAMES]))


def _centre(times: StepTimes) -> Floats:
    """Return the θ that the priors point at.

    The typical step is that of the fewest replicas: the one that is computation for the most part.
    """
    fewest = times.replicas == times.replicas.min()
    step_s = float(np.median(times.seconds[fewest] / (1 + times.accumulation[fewest])))
    values = np.where(_EXPONENTS, _CENTRES, _CENTRES * step_s)
    values[1] /= float(np.median(times.local_batch[fewest]))
    return _theta(values)


def _theta(values: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        part = np.where(_EXPONENTS, (values - 1) / (MOST - 1), 0.5)
        return np.where(_EXPONENTS, np.log(part) - np.log1p(-part), np.log(np.where(_EXPONENTS, 1.0, values)))


def _logistic(logit: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(logit, -30, 30)))


def _by_logit(exponent: Floats) -> Floats:
    return (exponent - 1) * (MOST - exponent) / (MOST - 1)
