"""Pollux's form of the step time, fitted by the same loss as ours: what the form alone is worth.

compute = α + β m; sync = α' + β' (K - 2) on one node, α'' + β'' (K - 2) on several; their γ-norm. Qiao et al., OSDI
2021, equations 8 to 11. The derivatives are finite differences: time does not matter here.
"""

from __future__ import annotations

import numpy as np

from accel.goodput.observations import StepTimes
from accel.goodput.throughput import Floats

PARTS = 7
_WIDTH = 2.0
"""Of the priors, as in ours."""


def predicted(theta: Floats, times: StepTimes) -> Floats:
    """Return the logarithm of the step times; θ are the logarithms of six times, then the logit of (γ - 1) / 9."""
    fixed, sample, local, local_more, remote, remote_more = np.exp(theta[:6])
    gamma = 1 + 9 / (1 + np.exp(-theta[6]))
    compute = fixed + sample * times.local_batch
    further = np.maximum(times.replicas - 2, 0)
    sync = np.where(times.nodes > 1, remote + remote_more * further, local + local_more * further)
    sync = np.where(times.replicas > 1, sync, 0.0)
    log: Floats = np.log((compute**gamma + sync**gamma) ** (1 / gamma))
    return log


def fit_pollux_form(times: StepTimes, rounds: int = 200) -> Floats:
    """Return θ by Levenberg-Marquardt on the soft L1 loss of logarithms, with weak priors."""
    step_s = float(np.median(times.seconds[times.replicas == times.replicas.min()]))
    batch = float(np.median(times.local_batch))
    centre = np.append(np.log(step_s * np.array([1 / 3, 2 / 3 / batch, 0.05, 0.01, 0.2, 0.02])), -2.0)
    theta, damping = centre.copy(), 1e-2

    def errors(at: Floats) -> Floats:
        residual: Floats = (predicted(at, times) - np.log(times.seconds)) / times.deviation
        return residual

    def loss(at: Floats) -> float:
        return float(2 * (np.sqrt(1 + errors(at) ** 2) - 1).sum() + (((at - centre) / _WIDTH) ** 2).sum())

    for _ in range(rounds):
        residual = errors(theta)
        shifted = [errors(theta + 1e-6 * np.eye(PARTS)[part]) for part in range(PARTS)]
        jacobian = np.stack([(each - residual) / 1e-6 for each in shifted], axis=1)
        weighted = (jacobian / np.sqrt(1 + residual**2)[:, None]).T
        curvature = weighted @ jacobian + np.eye(PARTS) / _WIDTH**2
        gradient = weighted @ residual + (theta - centre) / _WIDTH**2
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
        trial = theta + np.clip(step, -2, 2)
        if loss(trial) < loss(theta):
            theta, damping = trial, max(damping / 5, 1e-9)
        else:
            damping *= 4
            if damping > 1e8:
                break
    return theta
