"""The steps of a loop: which of the loader's batches make one, and when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

import torch
from torch import nn
from torch.optim import Optimizer

from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.batch_size.accumulation import GradientAccumulation
from accel.profiler.host import seconds_since_start
from accel.profiler.loop.observers import LoopObserver

_CERTAIN = 3
"""Of the first steps, that have another number of batches than the run before, from which on the loop has changed."""


def batches_of_a_step(first: Sequence[tuple[int, bool]], before: int | None) -> int:
    """Return how many batches a loop accumulates by itself: as many as most of its first steps had.

    Args:
        first: batches of each of them, and whether no batch of the epoch was left: such a step may have fewer.
        before: what the loop accumulated in the run that this one goes on from, if there was one.
    """
    counts = [batches for batches, ends_epoch in first if not ends_epoch] or [batches for batches, _ in first] or [1]
    most = max(map(counts.count, counts))
    if before is not None and most < _CERTAIN:
        return before
    return max(1, min(number for number in counts if counts.count(number) == most))


class StepTimer(LoopObserver):
    """Stops the clock of a step before anything else that follows the loader hears that it has ended.

    `seconds` are those from the step's begin to the latest request of a batch, `start_s` those from the start of the
    process, or of a change of ranks, to the first step's end; 0 before that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.seconds = self.start_s = self._began = 0.0
        self._clock = clock

    def batch_requested(self) -> None:
        self.seconds = self._clock() - self._began

    def begin(self) -> None:
        """A step begins."""
        self._began = self._clock()

    def end_first(self) -> None:
        self.start_s = seconds_since_start()


class StepBatches:
    """Group the batches of a training loader into steps.

    Attributes:
        ended, ended_before: steps of this process, and of earlier ones of this training.
        by_loop: batches of a step whose gradients the loop accumulates itself; nothing is accumulated beyond them.
        has_room: memory for accumulated gradients has been rehearsed.
        batches, samples: of the present step that were trained on.
        has_batch: a batch was delivered for the present step.
        has_ended: the pass over the data has no more batches.
    """

    def __init__(self, sampler: ElasticSampler, scaler: torch.amp.GradScaler | None) -> None:
        self.ended = self.ended_before = 0
        self.by_loop = 1
        self.has_room = False
        self.batches = self.samples = 0
        self.has_batch = False
        self._sampler, self._scaler = sampler, scaler
        self._accumulation: GradientAccumulation | None = None
        self._pass: weakref.ref[object] | None = None
        self.has_ended = False
        self._steps_of: dict[int, int] = {}
        """Steps of the loop that are one of the optimizer, by the rank's batch; one where none are named."""

    def begin(self) -> None:
        """A step begins."""
        self.batches = self.samples = 0
        self.has_batch = False

    def watch(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """See from now on whether gradients can be accumulated; the loop has taken its first steps."""
        if self.by_loop == 1 and self._sampler.num_replicas > 1 and self._accumulation is None and optimizers:
            self._accumulation = GradientAccumulation(model, optimizers, self._scaler)

    @property
    def refusal(self) -> str:
        """Why nothing can be accumulated here; "" while nothing speaks against it."""
        if self._accumulation is None:
            return "it does so itself, or one rank trains alone"
        return self._accumulation.refusal

    @property
    def local(self) -> int:
        return self._sampler.batch_sizes[self._sampler.rank]

    def steps_of(self, local: int) -> int:
        """Return how many steps of the loop, with so many samples a rank, are one of the optimizer."""
        return self._steps_of.get(local, 1)

    def decide(self, local: int, steps: int) -> None:
        """Take so many steps of the loop for one, from its next step with so many samples a rank on."""
        self._steps_of[local] = steps

    @property
    def hundredths(self) -> int:
        sampler = self._sampler
        return 100 * sampler.epoch + 100 * sampler.position // max(1, sampler.length)

    @property
    def accumulated(self) -> int:
        """Steps of the loop that are the present one of the optimizer."""
        return 1 if self._accumulation is None else self._accumulation.present.batches

    def begin_batch(self) -> int:
        """Return the samples, over all ranks, of the step that is trained on next; the batch in hand may begin it.

        By one batch: steps that a suspended session does not hear of would add up.
        """
        in_hand, accumulation = self._sampler.ledger.in_hand, self._accumulation
        samples = in_hand.fresh_of_all if in_hand else 0
        if accumulation is None:
            return samples * self.by_loop
        accumulation.begin_batch(self._sizes(samples))
        step = accumulation.present
        return step.samples if step.batches > 1 else samples

    def _sizes(self, in_hand: int) -> list[int]:
        """Return the samples of each batch of a step that begins; all have one size, but for an epoch's last."""
        # Batches that were dealt before the last decision are as many to a step as they were.
        steps = self.steps_of(in_hand // self._sampler.num_replicas)
        ahead = islice(self._sampler.ledger.samples_ahead(), steps - 1)
        return [in_hand, *takewhile(lambda samples: samples <= in_hand, ahead)]

    def begin_pass(self, one: object) -> bool:
        """A batch of a pass over the data has come: where the one before was left, so is the step that it was in.

        Args:
            one: the loop's iterator; None where it is not known.

        Returns:
            Whether the step begins anew, since batches of it were delivered in a pass that was left.
        """
        if one is None or (self._pass is not None and self._pass() is one):
            return False
        begins_anew = self.has_batch
        self.begin()
        if self._pass is not None and not self.has_ended and self._accumulation is not None:
            self._accumulation.drop()
        self.has_ended = False
        self._pass = weakref.ref(one)
        return begins_anew

    def close(self) -> None:
        if self._accumulation is not None:
            self._accumulation.close()
