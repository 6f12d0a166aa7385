"""Learning-rate rules: what to multiply an optimizer's rates by when a step takes S = M / M0 times the samples.

AdaScale's gain is r = (σ² + μ²) / (σ²/S + μ²), σ² the variance of the gradient of a batch of M0 samples, μ² its mean's
squared norm. With the noise scale φ = M0·σ²/μ² in samples it is S·(φ + M0) / (φ + S·M0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from accel.errors import InvalidArgument
from accel.goodput.efficiency import efficiency


@dataclass(frozen=True)
class BatchScale:
    """The batch of a step, and what is known of its gradient noise.

    Args:
        batch_size: M, samples of one step over all ranks and accumulated micro-batches, at least `base_batch_size`.
        base_batch_size: M0, samples for which the user chose the learning rate.
        noise: gradient noise scale φ in samples, at least 0 (inf: nothing but noise); None where it was not measured.
        noise_bounds: lower and upper bound of φ in samples; None where they are not known.
        gain: AdaScale's r where it was estimated directly; default from `noise`.
        epoch: passes over the data since training began, in fractions; `LEGW` alone needs it.

    Raises:
        InvalidArgument: if a number is out of its range.

    Example:
        >>> BatchScale(512, 128, noise=384.0).scale
        4.0
    """

    batch_size: float
    base_batch_size: float
    noise: float | None = None
    noise_bounds: tuple[float, float] | None = None
    gain: float | None = None
    epoch: float | None = None

    def __post_init__(self) -> None:
        _check(0 < self.base_batch_size < math.inf, "base_batch_size must be positive", self.base_batch_size)
        _check(
            self.base_batch_size <= self.batch_size < math.inf,
            f"batch_size must be at least base_batch_size, which is {self.base_batch_size}",
            self.batch_size,
        )
        for name, value in (("noise", self.noise), ("gain", self.gain), ("epoch", self.epoch)):
            _check(value is None or value >= 0, f"{name} must be at least 0, or None", value)
        low, high = self.noise_bounds or (0.0, 0.0)
        _check(0 <= low <= high, "noise_bounds must be two numbers in order, at least 0", self.noise_bounds)

    @property
    def scale(self) -> float:
        """S = M / M0, at least 1."""
        return self.batch_size / self.base_batch_size

    @property
    def bounded_gain(self) -> float:
        """AdaScale's r, held in [1, S]; 1 where neither the gain nor the noise is known."""
        gain, noise = self.gain, self._sure_noise
        if gain is None:
            gain = 1.0 if noise is None else self.scale * efficiency(self.batch_size, self.base_batch_size, noise)
        return min(max(gain, 1.0), self.scale)

    @property
    def scale_within_noise(self) -> float:
        """The part of S up to which more noise is averaged out: min(S, max(1, φ / M0)); S where φ is not known."""
        noise = self._sure_noise
        return self.scale if noise is None else min(self.scale, max(1.0, noise / self.base_batch_size))

    @property
    def _sure_noise(self) -> float | None:
        """φ, its lower bound where there is one: a rate that is too low costs less than one that is too high."""
        return self.noise if self.noise_bounds is None else self.noise_bounds[0]


class Multipliers(NamedTuple):
    """What a parameter group's values are multiplied by while a step runs."""

    lr: float = 1.0
    averages: float = 1.0
    """Of 1 − β, the weight of a new gradient in a moving average; β never falls below 0."""
    eps: float = 1.0


class ScalingRule(Protocol):
    """What a rule offers: the multipliers for a batch, 1 throughout at S = 1."""

    def multipliers(self, batch: BatchScale) -> Multipliers: ...


Rule: TypeAlias = ScalingRule | Callable[[BatchScale], Multipliers | float]
"""A rule, or a function of a `BatchScale` that returns multipliers, or that of the learning rate alone."""


@dataclass(frozen=True)
class NoScaling:
    """Leave the learning rate as it is.

    Args:
        reason: one sentence on why, for the log; empty where that was wanted.
    """

    reason: str = ""

    def multipliers(self, batch: BatchScale) -> Multipliers:
        """Return 1 throughout."""
        return Multipliers()


@dataclass(frozen=True)
class AdaScale:
    """Multiply SGD's learning rate by the gain r: 1 ≤ r ≤ S, so never above linear.

    Source: Johnson et al. 2020, https://arxiv.org/abs/2007.05105, algorithm 1.

    Example:
        >>> AdaScale().multipliers(BatchScale(512, 128, noise=384.0)).lr  # 4·(384 + 128) / (384 + 512)
        2.2857142857142856
    """

    def multipliers(self, batch: BatchScale) -> Multipliers:
        """Return the gain."""
        return Multipliers(lr=batch.bounded_gain)


@dataclass(frozen=True)
class Linear:
    """Multiply SGD's learning rate by S; it holds while S·M0 is far below the noise scale.

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677.
    """

    def multipliers(self, batch: BatchScale) -> Multipliers:
        """Return S."""
        return Multipliers(lr=batch.scale)


@dataclass(frozen=True)
class Sqrt:
    """Multiply the learning rate of Adam and its kin by √K, and keep their averages as long in samples.

    K-fold batch: lr·√K, 1 − K·(1 − β), eps / √K (https://arxiv.org/abs/2205.10287, definition 5.1). It comes from a
    stochastic differential equation that Adam follows while noise dominates its gradients and an average spans many
    steps: from K = 1 / (1 − β) on, 10 for β = 0.9, there is no average left, β stays at 0, and the rule has no ground.

    Beyond the noise scale the best rate of Adam falls again as the batch grows (https://arxiv.org/abs/2405.14578):
    so K = min(S, max(1, φ / M0)), with the lower bound of φ where one is known.

    Args:
        moments: scale 1 − β and eps too, default True; False for LAMB, whose authors scale the rate alone.
        capped: stop at the noise scale, default True.

    Example:
        >>> Sqrt().multipliers(BatchScale(512, 128))
        Multipliers(lr=2.0, averages=4.0, eps=0.5)
    """

    moments: bool = True
    capped: bool = True

    def multipliers(self, batch: BatchScale) -> Multipliers:
        """Return √K for the rate, K for 1 − β and 1/√K for eps."""
        scale = batch.scale_within_noise if self.capped else batch.scale
        root = math.sqrt(scale)
        return Multipliers(root, scale, 1 / root) if self.moments else Multipliers(root)


@dataclass(frozen=True)
class LEGW:
    """Multiply the learning rate by √S and make its warm-up S times as long in epochs.

    The user's schedule warms up linearly over E0 epochs. This turns it into one that does so over S·E0: at epoch e
    √S · min(1, e / (S·E0)) / min(1, e / E0), which is 1/√S at first, less than 1, and √S in the end.

    Source: You et al. 2019, https://arxiv.org/abs/1901.08256.

    Args:
        warmup_epochs: E0, epochs that the user's schedule takes to warm up at M0, at least 0.

    Raises:
        InvalidArgument: if `warmup_epochs` is out of range.

    Example:
        >>> rule = LEGW(warmup_epochs=2)
        >>> [rule.multipliers(BatchScale(512, 128, epoch=epoch)).lr for epoch in (0, 4, 8)]
        [0.5, 1.0, 2.0]
    """

    warmup_epochs: float

    def __post_init__(self) -> None:
        _check(0 <= self.warmup_epochs < math.inf, "warmup_epochs must be at least 0", self.warmup_epochs)

    def multipliers(self, batch: BatchScale) -> Multipliers:
        """Return the ratio of the two warm-ups.

        Raises:
            InvalidArgument: if `batch.epoch` is not known.
        """
        if batch.epoch is None:
            raise InvalidArgument("LEGW needs the epoch of a step, got None; give BatchScale(epoch=…)")
        # e ≤ E0: both warm up, at a ratio of 1/S whatever e is. After it the user's rate stands at 1.
        longer = self.warmup_epochs * batch.scale
        ratio = min(1.0, max(batch.epoch, self.warmup_epochs) / longer) if longer else 1.0
        return Multipliers(lr=math.sqrt(batch.scale) * ratio)


_SGD_LIKE = {"SGD", "FusedSGD", "LARS", "FusedLARS"}
_ADAM_LIKE = {"Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SparseAdam", "FusedAdam", "FusedAdamW"}
_LAMB = {"LAMB", "Lamb", "FusedLAMB"}


def rule_for(optimizer: object) -> NoScaling | AdaScale | Sqrt:
    """Return the rule that theory or its authors give for an optimizer, by the names of its class and its bases.

    Args:
        optimizer: of torch, of `accel.optim`, or derived from or named as one of those.

    Returns:
        `AdaScale` for SGD and LARS, `Sqrt` for Adam, AdamW, NAdam, RAdam, RMSprop and LAMB, else `NoScaling` with the
        reason in one sentence.

    Example:
        >>> import torch
        >>> rule_for(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
        AdaScale()
        >>> rule_for(torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))])).reason
        'No rule is known for Adagrad, so its learning rate stays as it is at any batch size; pass a rule to scale it.'
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _LAMB:
            return Sqrt(moments=False)
        if kind.__name__ in _SGD_LIKE:
            return AdaScale()
        if kind.__name__ in _ADAM_LIKE:
            return Sqrt()
    return NoScaling(
        f"No rule is known for {type(optimizer).__name__}, so its learning rate stays as it is at any batch size; "
        "pass a rule to scale it."
    )


def _check(holds: bool, invariant: str, got: object) -> None:
    if not holds:
        raise InvalidArgument(f"{invariant}, got {got!r}")
