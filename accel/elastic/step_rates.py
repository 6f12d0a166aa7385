"""The learning rates of a run's optimizers follow the batch of each step."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from accel.elastic.learning_rate import LearningRateScaler
from accel.elastic.left_alone import StepCount
from accel.elastic.scaling_rules import AdaScale, BatchScale, Linear, NoScaling, Rule, Sqrt
from accel.goodput.efficiency import NoiseInterval
from accel.profiler.loop.optimizers import Optimizers


class StepRates:
    """Scale the learning rate of each optimizer by the batch of the step.

    Args:
        rule: for all of them; None for that of each.
        say: prints one line for the user.

    Attributes:
        by_epoch: the rule may depend on the epoch.
        adopted: optimizers that were known when they were adopted last, those that are gone too.
    """

    def __init__(self, rule: Rule | None, say: Callable[[str], None]) -> None:
        self._rule, self._say = rule, say
        self.by_epoch = rule is not None and type(rule) not in (AdaScale, Linear, NoScaling, Sqrt)
        self.adopted = 0
        self._scalers: list[tuple[Optimizer, LearningRateScaler]] = []
        self._counts: list[StepCount] | None = None
        """Of the optimizers' steps, once they are scaled no more."""
        self._scale: BatchScale | None = None
        self._followed: tuple[int, int, NoiseInterval | None, float] | None = None
        """What that is of."""
        self.progress_before = 0.0
        """Of the runs that this one goes on from."""

    @property
    def progress(self) -> float:
        """Steps of the user's batch that the steps so far were worth."""
        counts = [scaler for _, scaler in self._scalers] if self._counts is None else self._counts
        return self.progress_before + max((count.progress for count in counts), default=0.0)

    def adopt(self, optimizers: Optimizers) -> None:
        """Scale these too, from their next step on.

        Raises:
            InvalidArgument: if the step of one can't be scaled.
        """
        adopted = optimizers.appended
        known = {id(optimizer) for optimizer, _ in self._scalers}
        for optimizer in list(optimizers):  # which the run does not keep alive
            if id(optimizer) in known:
                continue
            scaler = LearningRateScaler(optimizer, self._rule)
            if isinstance(scaler.rule, NoScaling) and scaler.rule.reason:
                self._say(scaler.rule.reason)
            if self._scale is not None:
                scaler.update(self._scale)
            self._scalers.append((optimizer, scaler))
        self.adopted = adopted  # not before: Ctrl-C may come in between

    def follow(self, samples: int, base: int, noise: NoiseInterval | None, epoch: float) -> None:
        """Take the batch of the step in hand; a smaller one than the user's, as an epoch's last, counts as that.

        Args:
            samples: of the step, over all ranks.
            base: the user's batch.
            noise: the noise scale; None while it is not known.
            epoch: passes over the data so far, in steps of 0.01: a rule is asked at each.
        """
        followed = samples, base, noise, epoch  # a rule is asked again only when something changes
        if followed == self._followed:
            return
        self._followed = followed
        size = max(samples, base)
        if size == base and (self._scale is None or self._scale.batch_size == base):
            return  # as the optimizers' own
        scale = BatchScale(
            batch_size=size,
            base_batch_size=base,
            noise=None if noise is None else noise.at(size),
            noise_bounds=None if noise is None else (noise.at(size, "low"), noise.at(size, "high")),
            epoch=epoch,
        )
        if scale == self._scale:
            return
        self._scale = scale
        for _, scaler in self._scalers:
            scaler.update(scale)

    def follow_no_more(self) -> None:
        """Let steps be the optimizers' own from now on; each counts as one of the user's."""
        if self._scale is not None:
            base = self._scale.base_batch_size
            for _, scaler in self._scalers:
                scaler.update(BatchScale(base, base, epoch=self._scale.epoch))  # which a rule may need

    def close(self) -> None:
        """Leave the optimizers as they were; their steps are counted on, each as one of the user's."""
        if self._counts is None:
            self.progress_before = self.progress
            self._counts = [StepCount(optimizer) for optimizer, _ in self._scalers]
        for _, scaler in self._scalers:
            scaler.close()
        self._scalers = []
