"""Fit the step-time model to measured steps: robust least squares of logarithms, by scipy.

    minimise  Σ 2 (√(1 + z²) - 1) + Σ ((θ - centre) / width)²,   z = (log predicted - log measured) / deviation

θ are the logarithms of the eight times, and the logits of the two exponents on [1, 10]. The first sum is quadratic for
small errors and linear for large ones (soft L1). The second are weak priors: they decide what was never observed, and
give way to a few observations. With one replica the sync times stay at their centres, small parts of a step, so that a
scheduler tries a second replica but expects no miracle; with one batch size a third of the computation is taken as
fixed, so that a larger batch promises little. Pollux (https://www.usenix.org/conference/osdi21/presentation/qiao, §4.1)
sets what is unexplored to 0 instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from accel.errors import InvalidArgument
from accel.goodput.observations import StepTimes
from accel.goodput.throughput import MOST, SYNC_TERMS, Floats, ThroughputModel, log_or_none, log_step, sync_terms
from accel.profiler import renamed


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

_ENOUGH = 1e-4
"""A step that lowers the loss by less than this share is the last; the loss is then within 1 % of the least one."""
_DIFFERENCE = 1e-6
"""Of a logarithm, by which its derivative is taken."""
_MOVED = 3.0
"""What is left of a time that is taken for another's is e^-3 of it."""
_FARTHEST = 10.0
"""A start is brought to within e^10 of what the priors say: times of 0 have no logarithm."""


def fit_throughput(times: StepTimes, start: ThroughputModel | None = None) -> ThroughputModel:
    """Return the model of a job's step times.

    Args:
        times: by configuration, at least one.
        start: an earlier model of the job; the fit begins there if that is better than what the priors say, and takes
            a fraction of the time.

    Raises:
        InvalidArgument: if scipy is not installed.

    Example:
        >>> from accel.goodput.observations import Configuration, Observations
        >>> observations = Observations()
        >>> for replicas, seconds in ((1, 0.10), (2, 0.12), (4, 0.13)):
        ...     observations.add(Configuration(nodes=1, replicas=replicas, local_batch=32), seconds)
        >>> model = fit_throughput(observations.step_times())
        >>> round(model.step_s(nodes=1, replicas=2, local_batch=32), 2)
        0.12
    """
    problem = Problem(times)
    return model_of(problem.minimise(None if start is None else theta_of(start)))


fit = renamed.function("fit", fit_throughput)


def solver() -> Callable[..., Any]:
    """Return scipy's least squares.

    Raises:
        InvalidArgument: if it is not installed.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise InvalidArgument(
            "the times of steps are predicted with scipy, which is not installed; pip install 'accel-train[elastic]'"
        ) from None
    return least_squares  # type: ignore[no-any-return]


class Problem:
    """The loss of a fit, and its minimum.

    Args:
        times: to be fitted.
    """

    def __init__(self, times: StepTimes) -> None:
        self._log_seconds, self._deviation = np.log(times.seconds), times.deviation
        self._log_batch, self._log_extra = np.log(times.local_batch), log_or_none(times.accumulation)
        self._sync = sync_terms(times.nodes, times.replicas) * times.communication_scale[:, None]
        self._accumulates = bool((times.accumulation > 0)[self._sync.any(axis=1)].any())
        self.centre = _centre(times)

    def predict(self, theta: Floats) -> Floats:
        """Return the logarithm of each step time (..., n) for one θ or several (..., 10)."""
        columns = theta[..., None]
        p, overlap = (1 + (MOST - 1) * _logistic(columns[..., number, :]) for number in (2, 3))
        sync = log_or_none(np.exp(theta[..., _SYNC]) @ self._sync.T)
        return log_step(columns[..., 0, :], columns[..., 1, :] + self._log_batch, p, sync, overlap, self._log_extra)

    def residuals(self, theta: Floats) -> Floats:
        """Return the errors of the times in their deviations (n,), and those of the priors (10,)."""
        errors = (self.predict(theta) - self._log_seconds) / self._deviation
        return np.concatenate([errors, (theta - self.centre) / _WIDTHS])

    def _jacobian(self, theta: Floats) -> Floats:
        """Return the derivatives of the residuals (n + 10, 10), by differences: all of them in one prediction."""
        log = self.predict(np.concatenate([theta[None], theta + _DIFFERENCE * np.eye(len(theta))]))
        errors = (log[1:] - log[0]) / (_DIFFERENCE * self._deviation)
        return np.concatenate([errors.T, np.diag(1 / _WIDTHS)])

    def loss(self, theta: Floats) -> float:
        """Return what is minimised."""
        return float(_soft_for_times(self.residuals(theta) ** 2)[0].sum())

    def minimise(self, start: Floats | None = None) -> Floats:
        """Return the θ of the least loss, beginning at the priors' centres, or at `start` if the loss is less there.

        Accumulated steps tell the exchange from other work that does not depend on the batch. Where that had been taken
        for computation there is a ridge between the two, so the other side of it is a beginning, too.
        """
        near = self.centre
        if start is not None:
            near = min(
                near, np.clip(start, self.centre - _FARTHEST, self.centre + _FARTHEST), key=lambda each: self.loss(each)
            )
        least = self._descend(near)
        if self._accumulates:
            least = min(least, self._descend(self._by_exchange(least)), key=self.loss)
        return least

    def _by_exchange(self, theta: Floats) -> Floats:
        """Return θ with the fixed part of the computation as part of the exchange."""
        exchange_s = self._sync[self._sync.any(axis=1)] @ np.exp(theta[_SYNC])
        moved = theta.copy()
        moved[0] -= _MOVED
        moved[_SYNC] += np.log1p(np.exp(theta[0]) / float(exchange_s.mean()))
        return moved

    def _descend(self, start: Floats) -> Floats:
        stops = {"ftol": _ENOUGH, "xtol": 1e-6, "gtol": None, "max_nfev": 100}
        fitted = solver()(self.residuals, start, self._jacobian, loss=_soft_for_times, **stops)
        return fitted.x  # type: ignore[no-any-return]


def _soft_for_times(squares: Floats) -> Floats:
    """Return the loss of squared residuals and its two derivatives by them (3, n): soft L1, but for the priors."""
    root = np.sqrt(1 + squares)
    soft = np.stack([2 * (root - 1), 1 / root, -0.5 / root**3])
    priors = squares[-len(_NAMES) :]
    soft[:, -len(_NAMES) :] = priors, np.ones_like(priors), np.zeros_like(priors)
    return soft


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
