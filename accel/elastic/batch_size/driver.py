"""The batch policy in a loop: times its steps, hands out its batches, scales its learning rate.

    loader ──batches of the size decided──▶ loop ──update──▶ optimizer, at the learning rate of that batch
       ▲                                      │ time, gradient noise
       └── policy, on rank 0, between two steps ◀──┘

    first steps ──the policy is made──▶ measures ──a decision is due──▶ ranks meet ──the same batch──▶ measures
                                            ▲                               ├──one that was taken before──▶ taken
                                            └──────taken, or refused────────┴──a larger one──▶ rehearsed
    measures, rehearsed ──an error──▶ ended: one rank has its own batch and rates again, several keep theirs

It follows the training loader beside the session that searches for strategies. That begins once a batch stands; from
then on the noise is measured, and the batch changes, only in steps in which no candidate is on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from accel.dataio.elastic_sampler import ElasticSampler, share_among
from accel.dataio.passes.proxy import LoaderProxy
from accel.device_memory import total_memory
from accel.elastic.batch_size.choice import LEAST_STEPS, check_largest, most_tried, resumed_shares
from accel.elastic.batch_size.policy import TIMED, AgreedBatch, BatchDecision, BatchPolicy
from accel.elastic.batch_size.rehearsal import BatchRehearsal
from accel.elastic.batch_size.report import rows_of
from accel.elastic.batch_size.run_noise import RunNoise
from accel.elastic.batch_size.steps import StepBatches, StepEnd, batches_of_a_step
from accel.elastic.learning_rate import StepRates
from accel.elastic.scaling_rules import Rule
from accel.errors import InvalidArgument, InvalidState
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.fit import solver
from accel.goodput.job import JobProfile, LostTime
from accel.goodput.observations import WINDOW
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.host import seconds_since_start
from accel.profiler.interruptions import ours
from accel.profiler.loop import backward
from accel.profiler.loop.observers import LoopObserver
from accel.profiler.loop.optimizers import Optimizers
from accel.profiler.stderr import warn
from accel.report.report import BatchRow
from accel.run.context import Run
from accel.run.ranks import Ranks
from accel.session.session import Session
from accel.session.turns import TURNS

T = TypeVar("T")

_WARM_UP = 4
"""Steps before the first one that is timed."""
_FIRST_STEPS = 300
"""In which the search for strategies waits until the batch stands."""
_JUDGED = 2 * WINDOW  # steps before a decision that are timed: it forgets those before, and some are left out
_HEARD = 2
"""Steps in which a call is recorded before a larger batch is rehearsed: one of them may measure the noise."""
_AHEAD = 8
"""Batches by which a rank's loader may run further ahead than another's between two decisions."""


class BatchRun(LoopObserver):
    """Let a policy decide the batch size of a loop.

    Args:
        session: whose steps they are.
        run: the user's objects.
        sampler: of the training loader.
        max_batch_size: the most samples of a step, over all ranks.
        rule: how the learning rate follows; None for that of each optimizer.
        scaler: of the loop, if it has one and it is known: its scale is divided out of the gradients' noise.
        say: prints one line for the user.
        decided: called after each decision.
        clock: seconds, monotonic.
    """

    name = "the batch size"
    """For the message that the search for strategies waits."""

    def __init__(
        self,
        session: Session,
        run: Run,
        sampler: ElasticSampler,
        max_batch_size: int,
        *,
        rule: Rule | None = None,
        scaler: torch.amp.GradScaler | None = None,
        say: Callable[[str], None] = lambda line: None,
        decided: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        solver()  # what is missing is better known now than at the first decision
        self.controller: BatchPolicy | None = None
        """Made once it is known how many batches a step has."""
        self.end = StepEnd(clock)
        self.max_batch_size, self.memory = max_batch_size, total_memory(run.device)
        """The most samples of a step; and the device's bytes, of the rank that has the least once they have met."""
        self.note = ""
        """Why the batch size is not changed, or no more."""
        self._session, self._run, self._sampler, self._scaler = session, run, sampler, scaler
        self._optimizers = cast("Optimizers", run.optimizers)
        self._say, self._clock, self.decided = say, clock, decided
        self._ranks: Ranks | None = None
        self._called_at = time.time()
        self.local_base = sampler.batch_sizes[sampler.rank]
        self._heard: object = None
        """The step that a backward pass was for last."""
        self._fits = self.local_base
        """The largest batch of this rank that fits into memory, as far as is known."""
        self._step = StepBatches(sampler)
        self._first_steps: list[tuple[int, bool]] = []
        """Batches of each of the first steps, and whether it was an epoch's last."""
        self._exchange: list[str] = []
        """Strategies that are on and treat the exchange of gradients."""
        self._rehearsal = BatchRehearsal(run.model, lambda *args, **kwargs: run.gate.plain(*args, **kwargs), run.device)
        self._planned: BatchDecision | None = None
        """A larger batch than any before, until it has been rehearsed."""
        self._rates = StepRates(rule, say)
        self.noise = RunNoise(session, run, scaler, clock)
        self._restored: dict[str, Any] = {}
        """The state of the run that was saved; empty if none was."""
        self._base: int | None = None
        """Samples of a step as the user wrote it, over the ranks that the training began on; None until known."""
        self._decision_due = _WARM_UP
        self._steps = self._steps_before = 0
        """Steps of this process, and of earlier ones of this training."""
        self._is_settled, self._is_first = False, True
        """As rank 0 has it; the step is the first of an epoch."""
        self._followed = self._followed_at = 0
        """Samples of the step that the learning rate is meant for, and in which hundredth of a pass over the data."""
        self._began = self.start_s = 0.0
        """Of the present step; from the start of the process, or of a change of ranks, to the first step's end."""
        self._most_replicas = sampler.num_replicas
        """The most ranks that the training has run on."""
        self._alive = True
        backward.listen(self)
        TURNS.join(self)
        TURNS.step(self)  # so that the session, whose first step comes before this one's, waits

    # -- the report (journal.BatchHistory) -----------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Steps of the user's batch that the steps so far were worth."""
        return self._rates.progress

    def rows(self) -> list[BatchRow]:
        """Return the changes of the batch size, the user's own first."""
        return [] if self.controller is None else rows_of(self.controller.decisions)

    # -- whose turn it is (turns.Searcher) -----------------------------------------------------------------------------

    @property
    def searching(self) -> bool:
        """True until a batch has stood through a decision, in the first steps only."""
        return self._alive and self._steps <= _FIRST_STEPS and not self._is_settled

    # -- the loader (listeners.Follower) -------------------------------------------------------------------------------

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """The first step of an epoch includes starting the loader: it is not timed."""
        self._is_first = True

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Note that the pass was not left before its end."""
        self._step.has_ended = True

    def batch_requested(self) -> None:
        """End the step, if an optimizer has stepped since the last one."""
        has_stepped = self._session.events.boundaries != self._steps
        self._steps = self._session.events.boundaries
        if self._alive:
            try:
                if has_stepped:
                    self._step_ended()
                if self._rates.adopted != self._optimizers.appended:
                    self._rates.adopt(self._optimizers)
            except ours() as error:
                self._fail(error)
        if has_stepped:
            self._step.begin()
        if not self._step.has_batch:
            self._begin_step()

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Count the batch, and let the learning rate follow the size of the step."""
        underway = proxy._accel_fetching.underway
        one = underway.only
        if one is None and (one := underway.current) is not underway.oldest:
            return  # the loop only looks at it
        if self._step.begin_pass(one):
            self._begin_step()
        self._step.has_batch = True
        if self._base is None:
            return
        samples = self._step.begin_batch()
        self.noise.begin_batch(self._sampler.fresh, self._step.accumulated)
        if not self._sampler.ledger.holds_batches and (
            samples != self._followed or (self._rates.by_epoch and self._step.hundredths != self._followed_at)
        ):
            self._follow(samples)

    def _follow(self, samples: int) -> None:
        """Let the learning rate be that of a step of so many samples, over all ranks, in this part of the epoch."""
        self._followed, self._followed_at = samples, self._step.hundredths
        try:
            if self._base is not None:
                self._rates.follow(samples, self._base, self.noise.known, self._step.hundredths / 100)
        except ours() as error:  # of a rule of the user's, say
            self._fail(error)

    # -- the backward pass (backward.EndListener) ----------------------------------------------------------------------

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

    def _begin_step(self) -> None:
        self.noise.begin_step()
        self._began = self._clock()

    def _step_ended(self) -> None:
        if self._steps <= _FIRST_STEPS:
            TURNS.step(self)
        self.start_s = self.start_s or seconds_since_start()
        is_busy = self._session.is_busy
        is_usual, self._is_first = not (self._is_first or is_busy or self.noise.is_measured), False
        self.noise.end_step(self._step.samples // self._sampler.num_replicas)
        is_judged = self._decision_due - self._steps < _JUDGED or self._sampler.num_replicas > 1
        if self.controller is None:
            self._first_steps.append((self._step.batches, self._sampler.ledger.steps_left == 0))
        elif is_usual and is_judged and not self._exchange_changed(self.controller):
            batches = self._step.batches // self._step.by_loop
            self.controller.timed(self._step.samples, self.end.at - self._began, batches)
        if self._steps >= self._decision_due and not is_busy:
            self._decide() if self._planned is None else self._rehearse(self._planned)

    def _exchange_changed(self, controller: BatchPolicy) -> bool:
        """Notice that gradients are exchanged in another form, the same on all ranks, and time all batches anew."""
        before, active = self._exchange, self._session.switchboard.active  # nearly always none
        treats = Bottleneck.COMMUNICATION
        self._exchange = [name for name in active if treats in self._session.strategies[name].treats] if active else []
        if self._exchange == before:
            return False
        controller.time_anew()
        self._decision_due = min(self._decision_due, self._steps + TIMED + 1)
        return True

    def _decide(self) -> None:
        if self.controller is None:
            self._begin()
        if self._steps > _FIRST_STEPS:
            TURNS.leave(self)  # the session, alone from now on, need not ask whose turn it is
        self.noise.check()
        mine = self._sampler.ledger.dealt_ahead, self._step.refusal
        agreed = self._met("decide on the batch size", mine, self._decision)
        self._is_settled, self.noise.known, self._followed = agreed.is_settled, agreed.noise, 0
        self._decision_due = self._steps + agreed.decision.steps
        self._take(agreed.decision, agreed.most_ahead)
        self.decided()

    def _rehearse(self, planned: BatchDecision) -> None:
        """Take a larger batch if all ranks have the memory for it."""
        self._planned = None
        self._session.events.calls.hear(None)
        self._session.leave_out_step()
        local, agree = self._local(planned), partial(self._met, "compare the memory they have", answer=first_of)
        problem = self._rehearsal.problem(local, keeps_gradients=planned.accumulated > 1, agree=agree)
        mine = problem, self._sampler.ledger.dealt_ahead
        decision, ahead = self._met("rehearse a larger batch", mine, partial(self._rehearsed, planned))
        self._decision_due = self._steps + decision.steps
        if (decision.batch, decision.accumulated) == (planned.batch, planned.accumulated):
            self._fits, self._step.has_room = max(self._fits, local), self._step.has_room or planned.accumulated > 1
        else:
            self._say(f"batch size {decision.batch}: {decision.why}")
        self._take(decision, ahead)
        self.decided()

    def _rehearsed(self, planned: BatchDecision, brought: list[tuple[str, int]]) -> tuple[BatchDecision, int]:
        """Return the batch planned, or another if a rank has brought a problem; and the most batches dealt ahead."""
        assert self.controller is not None
        decision, problem = planned, next((problem for problem, _ in brought if problem), "")
        if problem:
            if planned.accumulated > 1 and self._local(planned) <= self._fits:
                why = f"gradients are not accumulated: {problem}"
                self.controller.batches.accumulates = False
                decision = self.controller.fall_back(self._steps, self.noise.known, why)
            else:
                at_once = planned.batch // planned.accumulated
                why = f"{at_once} samples are too many: {problem}"
                decision = self.controller.refuse(at_once, self._steps, self.noise.known, why)
        return decision, max(ahead for _, ahead in brought)

    def _begin(self) -> None:
        """Make the controller, with the batch that the loop has without it."""
        self._ranks = Ranks()
        self._ranks.join(since=self._called_at)
        self._step.by_loop = batches_of_a_step(self._first_steps, self._restored.get("micro_batches"))
        replicas = self._sampler.num_replicas
        if self._base is None or self._step.by_loop != self._restored["micro_batches"]:
            self._base = self.local_base * replicas * self._step.by_loop
        self.check()  # with the batches of a step
        most = most_tried(self._base, self.max_batch_size, self._sampler.length)
        if most < self.max_batch_size:
            self._say(f"batches above {most} samples are not tried: epochs would have less than {LEAST_STEPS} steps")
        nodes = -(-replicas // int(os.environ.get("LOCAL_WORLD_SIZE", replicas)))
        self.controller = BatchPolicy(
            self._base, most, replicas=replicas, nodes=nodes, micro_batches=self._step.by_loop
        )
        self._step.watch(self._run.model, self._run.optimizers, self._scaler)
        self.controller.batches.accumulates = not self._step.refusal
        gather = partial(self._met, "measure the gradient noise", answer=list) if replicas > 1 else None
        self.noise.begin(replicas, gather, self._restored.get("noise"))
        self.controller.steps_before = self._steps_before
        if self._restored.get("controller") is not None:
            self.controller.load_state_dict(self._restored["controller"])

    def _decision(self, brought: list[tuple[int, str]]) -> AgreedBatch:
        assert self.controller is not None
        noise = self.noise.estimate()
        refusal = first_of([refusal for _, refusal in brought])
        if self.controller.batches.accumulates and refusal:
            why = f"the loop's gradients can't be accumulated: {refusal}"
            self.controller.batches.accumulates = False
            decision = self.controller.fall_back(self._steps, noise, why)
        else:
            decision = self.controller.decide(self._steps, noise)
        return AgreedBatch(decision, max(ahead for ahead, _ in brought), self.controller.is_settled, noise)

    def _met(self, what: str, mine: Any, answer: Callable[[list[Any]], T]) -> T:
        """Return rank 0's answer to what the ranks bring, on all of them.

        Raises:
            InvalidState: on all ranks, if one has come for something else.
        """

        def checked(brought: list[tuple[str, Any]]) -> T:
            if any(other != what for other, _ in brought):
                points = ", ".join(other for other, _ in brought)
                raise InvalidState(f"ranks are not at the same point: {points}")
            return answer([own for _, own in brought])

        assert self._ranks is not None
        return self._ranks.decide((what, mine), checked, f"did not come to {what}")

    def _take(self, decision: BatchDecision, most_ahead: int) -> None:
        """Let the loader make batches of the size decided."""
        local, now = self._local(decision), self._step.local
        if local == now and decision.accumulated == self._step.steps_of(now):
            return
        if local > self._fits or (decision.accumulated > 1 and not self._step.has_room):
            self._planned, self._decision_due = decision, self._steps + _HEARD
            self._rehearsal.prepare(now)
            self._session.events.calls.hear(self._rehearsal.hear)
            return
        self._step.decide(local, decision.accumulated)
        if local != now:
            alone = self._sampler.num_replicas == 1
            self._sampler.set_batch_size(local, delay=None if alone else most_ahead + _AHEAD)
        self._session.begin_again(growth=local / now)
        self._say(f"batch size {decision.batch}: {decision.why}")

    def _local(self, decision: BatchDecision) -> int:
        """Return the samples of one of this rank's batches."""
        return decision.batch // (self._sampler.num_replicas * self._step.by_loop * decision.accumulated)

    # -- what a scheduler needs to know ------------------------------------------------------------------------------

    def profile(self, save_s: float, lost: LostTime) -> JobProfile | None:
        """Return the job's profile; None while times or noise are not known, and on ranks that don't decide.

        Args:
            save_s: what a checkpoint takes, s: a change of the placement costs that beside the start of a process.
            lost: where the job's time went.
        """
        controller, noise = self.controller, self.noise.known
        if controller is None or noise is None or self._ranks is None or not self._ranks.leads:
            return None
        if (model := controller.times.model) is None:
            return None
        base, sampler = controller.base_batch, self._sampler
        epochs, samples = sampler.turns.total, sampler.length
        return JobProfile(
            model=model,
            noise=noise,
            base_batch=base,
            limits=controller.batches.limits(most_tried(base, self.max_batch_size, samples)),
            most_replicas=self._most_replicas,
            restart_s=self.start_s + save_s,
            progress=self.progress,
            total=None if not epochs else float(epochs * -(-samples // base)),
            lost=lost,
        )

    # -- checkpoints (training_state.Stateful) -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learnt, measured and decided, as plain values."""
        return {
            "controller": self._restored.get("controller") if self.controller is None else self.controller.state_dict(),
            "noise": self._restored.get("noise") if self.noise.meter is None else self.noise.meter.noise.state_dict(),
            "known_noise": None if self.noise.known is None else list(astuple(self.noise.known)),
            "progress": self.progress,
            "most_replicas": self._most_replicas,
            "loader_batch": self.local_base,
            "micro_batches": self._step.by_loop,
            "fits": self._fits,
            "memory": self.memory,
            "steps": self._steps_before + self._steps,
            "accumulated": self._step.steps_of(self._step.local),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also on another number of ranks: rates and gain refer to the batch it began with.

        With another batch of the loader's it is another batch of the user's, which rates and gain refer to from now on.
        """
        self._restored = dict(state)
        self._rates.progress_before = float(state["progress"])
        self._most_replicas = max(self._sampler.num_replicas, int(state.get("most_replicas", 1)))
        known, controller = state.get("known_noise"), state.get("controller") or {}
        self.noise.known = None if known is None else NoiseInterval(*known)
        self._base = controller.get("base") if state.get("loader_batch") == self.local_base else None
        self._step.by_loop = int(state.get("micro_batches", 1))
        self._steps_before = int(state.get("steps", 0))
        local = self.local_base
        if self._base is not None:
            shares = self._sampler.num_replicas * self._step.by_loop
            local, steps = resumed_shares(state, self._base, shares, self.max_batch_size, self.memory)
            self._fits = max(self._fits, local)
            if state.get("accumulated", 1) > 1 and steps > 1:
                self._step.decide(local, steps)
        self._sampler.set_batch_size(local)

    def check(self) -> None:
        """Raise InvalidArgument if the largest batch allowed is below the user's, or leaves a rank without a sample."""
        shares = self._sampler.num_replicas * self._step.by_loop
        check_largest(self.max_batch_size, self._sampler.batch_sizes, self._base, shares)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        text = str(error) if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {error}"
        stays = "the loop's own" if self._sampler.num_replicas == 1 else "as it is"
        self.note = f"{stays} from step {self._steps_before + self._steps} on: {text}"
        self._stop()
        warn(f"the batch size is {self.note}", stacklevel=5)

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
            self._rates.follow_no_more()
            self._sampler.set_batch_size(self.local_base)

    def close(self, *, everywhere: bool = False) -> None:
        """Let the loop go on with the user's batch and rates; several ranks that don't do so `everywhere` keep them."""
        self._stop()
        if everywhere or self._sampler.num_replicas == 1:
            self._step.close()
            self._rates.close()
        elif self._base is not None:
            self._step.close()  # with the rates of what a step is from now on: the last one may have been short
            samples = self._step.local * self._sampler.num_replicas * self._step.by_loop
            self._rates.follow(samples, self._base, self.noise.known, self._step.hundredths / 100)
        if everywhere:  # a change that was to come some batches later would outlive this one
            share_among(self._sampler, self._sampler.num_replicas, self._sampler.rank, self.local_base)


def first_of(reasons: list[str]) -> str:
    """Return the first reason that a rank brings; "" if none does."""
    return next((reason for reason in reasons if reason), "")
