"""The batch policy in a loop: times its steps, hands out its batches, scales its learning rate.

    loader ──batches of the size decided──▶ loop ──update──▶ optimizer, at the learning rate of that batch
       ▲                                      │ time, gradient noise
       └── policy, on rank 0, between two steps ◀──┘

It follows the training loader beside the session that searches for strategies. That begins once a batch stands; from
then on the noise is measured, and the batch changes, only in steps in which no candidate is on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.elastic.batch_size.agreement import BatchAgreement
from accel.elastic.batch_size.record import BatchRecord
from accel.elastic.batch_size.report import BatchReport
from accel.elastic.batch_size.run_noise import RunNoise
from accel.elastic.batch_size.steps import StepBatches, StepTimer
from accel.elastic.learning_rate import StepRates
from accel.elastic.scaling_rules import Rule
from accel.profiler.interruptions import ours
from accel.profiler.loop import backward
from accel.profiler.loop.observers import LoopObserver
from accel.session.session import Session
from accel.session.turns import TURNS

_FIRST_STEPS = 300
"""In which the search for strategies waits until the batch stands."""


class BatchRun(LoopObserver):
    """Count the steps and batches of a loop whose batch size a policy decides; noise and rates follow them.

    `decided` is called after each decision.
    """

    name = "the batch size"

    def __init__(
        self,
        session: Session,
        max_batch_size: int,
        *,
        rule: Rule | None = None,
        scaler: torch.amp.GradScaler | None = None,
        say: Callable[[str], None] = lambda line: None,
        decided: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        run = session.run
        self._session, self._decided = session, decided
        self.timer, self.noise = StepTimer(clock), RunNoise(session, scaler, clock)
        self._step, self.rates = StepBatches(run.loader.batch_sampler, scaler), StepRates(rule, run.optimizers, say)
        self.record = BatchRecord(run, self._step, self.noise, self.rates, max_batch_size)
        self.agreement, self.report = BatchAgreement(session, self.record, say), BatchReport(self.record)
        self._sampler = self.record.sampler
        self._heard: object = None
        """The step that a backward pass was for last."""
        self._is_first = self._alive = True
        """The step is the first of an epoch; and whether the batch may still change."""
        self._followed = self._followed_at = 0
        """Samples of the step that the learning rate is meant for, and in which hundredth of a pass over the data."""
        backward.listen(self)
        self.last_turn = 0
        """See `Turns`."""
        TURNS.join(self)
        TURNS.step(self)  # so that the session, whose first step comes before this one's, waits

    # -- whose turn it is (turns.Searcher) -----------------------------------------------------------------------------

    @property
    def searching(self) -> bool:
        """True until a batch has stood through a decision, in the first steps only."""
        return self._alive and self._step.ended <= _FIRST_STEPS and not self.agreement.is_settled

    # -- the loader (observers.LoopObserver) ---------------------------------------------------------------------------

    def epoch_begins(self, proxy: Any) -> None:
        """The first step of an epoch includes starting the loader: it is not timed."""
        self._is_first = True

    def epoch_ended(self, proxy: Any) -> None:
        self._step.has_ended = True

    def batch_requested(self) -> None:
        """End the step, if an optimizer has stepped since the last one."""
        boundaries = self._session.events.boundaries
        has_stepped, self._step.ended = boundaries != self._step.ended, boundaries
        if self._alive:
            try:
                if has_stepped:
                    self._step_ended()
                if self.rates.adopted != self.rates.optimizers.appended:
                    self.rates.adopt()
            except ours() as error:
                self._fail(error)
        if has_stepped:
            self._step.begin()
        if not self._step.has_batch:
            self.noise.begin_step()
            self.timer.begin()

    def batch_delivered(self, batch: Any, proxy: Any) -> None:
        """Count the batch, and let the learning rate follow the size of the step."""
        underway = proxy._accel_fetching.underway
        one = underway.only
        if one is None and (one := underway.current) is not underway.oldest:
            return  # the loop only looks at it
        if self._step.begin_pass(one):
            self.noise.begin_step()
            self.timer.begin()
        self._step.has_batch = True
        if self.record.base is None:
            return
        samples = self._step.begin_batch()
        if self.noise.is_metered:
            self.noise.begin_batch(self._sampler.fresh, self._step.accumulated)
        if not self._sampler.ledger.holds_batches and (
            samples != self._followed or (self.rates.by_epoch and self._step.hundredths != self._followed_at)
        ):
            self._follow(samples)

    def _follow(self, samples: int) -> None:
        """Let the learning rate be that of a step of so many samples, over all ranks, in this part of the epoch."""
        self._followed, self._followed_at = samples, self._step.hundredths
        try:
            if self.record.base is not None:
                self.rates.follow(samples, self.record.base, self.noise.known, self._step.hundredths / 100)
        except ours() as error:  # of a rule of the user's, say
            self._fail(error)

    # -- the backward pass (a listener of profiler.loop.backward) ------------------------------------------------------

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Take the loss, and count the batch."""
        try:
            trained = self._sampler.ledger.trained
            if trained is None or trained is self._heard:
                return  # of another model, before the loop begins, or a further pass of a batch
            self._heard = trained
            self._step.batches += 1
            self._step.samples += trained.fresh_of_all
            if trained.fresh:
                self.noise.take_loss(roots)
            samples = trained.fresh_of_all * self._step.by_loop
            if samples not in (0, self._followed) and self._step.accumulated == 1:  # the loop fetches ahead
                self._follow(samples)
        except ours() as error:
            self._fail(error)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step_ended(self) -> None:
        if self._step.ended <= _FIRST_STEPS:
            TURNS.step(self)
        if not self.timer.start_s:
            self.timer.end_first()
        is_busy = self._session.is_busy
        is_usual, self._is_first = not (self._is_first or is_busy or self.noise.is_measured), False
        self.noise.end_step(self._step.samples // self._sampler.num_replicas)
        if self.agreement.step_ended(self.timer.seconds if is_usual else None, may_decide=not is_busy):
            self._followed = 0
            if self._step.ended > _FIRST_STEPS:
                TURNS.leave(self)  # the session, alone from now on, need not ask whose turn it is
            self._decided()

    # -- ending --------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._stop()
        self.report.fail(error)

    def _stop(self) -> None:
        if not self._alive:
            return
        self._alive = False
        TURNS.leave(self)
        backward.forget(self)
        self.noise.close()
        # Ranks may end at different steps: with batches or learning rates of their own they would be no replicas.
        if self._sampler.num_replicas == 1:
            self._step.close()
            self.rates.follow_no_more()
            self._sampler.set_batch_size(self.record.local_base)

    def close(self, *, everywhere: bool = False) -> None:
        """Let the loop go on with the user's batch and rates; several ranks that don't do so `everywhere` keep them."""
        self._stop()
        self._step.close()
        if everywhere:
            self.record.deal_plainly()
        if everywhere or self._sampler.num_replicas == 1:
            self.rates.close()
        elif self.record.base is not None:  # by what a step is from now on: the last one may have been short
            samples = self._step.local * self.record.shares
            self.rates.follow(samples, self.record.base, self.noise.known, self._step.hundredths / 100)
