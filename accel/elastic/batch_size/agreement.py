"""How the ranks of a run agree on the batch of the coming steps, between two steps.

first steps ──the policy is made──▶ measures ──a decision is due──▶ ranks meet ──the same batch──▶ measures
                                        ▲                               ├──one that was taken before──▶ taken
                                        └──────taken, or refused────────┴──a larger one──▶ rehearsed
measures, rehearsed ──an error──▶ ended: one rank has its own batch and rates again, several keep theirs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from accel.elastic.batch_size.policy import JUDGED, TIMED, BatchDecision, BatchPolicy
from accel.elastic.batch_size.record import LEAST_STEPS, BatchRecord
from accel.elastic.batch_size.rehearsal import BatchRehearsal
from accel.errors import InvalidState
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.fit import solver
from accel.profiler.bottleneck import Bottleneck
from accel.run.ranks import Ranks
from accel.session.session import Session

T = TypeVar("T")

_WARM_UP = 4
_HEARD = 2
"""Steps in which a call is recorded before a larger batch is rehearsed: one of them may measure the noise."""
_AHEAD = 8
"""Batches by which a rank's loader may run further ahead than another's between two decisions."""


class BatchAgreement:
    """Have rank 0 decide for all, and the loader make batches of the size decided."""

    def __init__(self, session: Session, record: BatchRecord, say: Callable[[str], None]) -> None:
        solver()  # what is missing is better known now than at the first decision
        self.is_settled = False
        self._session, self._record, self._say, run = session, record, say, session.run
        self._sampler, self._step, self._noise = record.sampler, record.step, record.noise
        self._ranks: Ranks | None = None
        self._called_at = time.time()
        self._first_steps: list[tuple[int, bool]] = []
        """Batches of each of the first steps, and whether it was an epoch's last."""
        self._exchange: list[str] = []
        """Strategies that are on and treat the exchange of gradients."""
        self._rehearsal = BatchRehearsal(run.model, lambda *args, **kwargs: run.gate.plain(*args, **kwargs), run.device)
        self._planned: BatchDecision | None = None
        """A larger batch than any before, until it has been rehearsed."""
        self._due = _WARM_UP

    def step_ended(self, seconds: float | None, *, may_decide: bool) -> bool:
        """Take in the time of a step, and decide if that is due; return whether something was decided.

        Args:
            seconds: None of a step that is not like those to come.
            may_decide: no candidate is on.
        """
        step, policy = self._step, self._record.policy
        is_judged = self._due - step.ended < JUDGED or self._sampler.num_replicas > 1
        if policy is None:
            self._first_steps.append((step.batches, self._sampler.ledger.steps_left == 0))
        elif seconds is not None and is_judged and not self._exchange_changed(policy):
            policy.timed(step.samples, seconds, step.batches // step.by_loop)
        if step.ended < self._due or not may_decide:
            return False
        self._decide() if self._planned is None else self._rehearse(self._planned)
        return True

    def _exchange_changed(self, policy: BatchPolicy) -> bool:
        """Notice that gradients are exchanged in another form, the same on all ranks, and time all batches anew."""
        before, active = self._exchange, self._session.switchboard.active  # nearly always none
        treats = Bottleneck.COMMUNICATION
        self._exchange = [name for name in active if treats in self._session.strategies[name].treats] if active else []
        if self._exchange == before:
            return False
        policy.time_anew()
        self._due = min(self._due, self._step.ended + TIMED + 1)
        return True

    def _decide(self) -> None:
        if self._record.policy is None:
            self._begin()
        self._noise.check()
        mine = self._sampler.ledger.dealt_ahead, self._step.refusal
        decision, ahead, self.is_settled, self._noise.known = self._met("decide on the batch size", mine, self._decided)
        self._take(decision, ahead)

    def _begin(self) -> None:
        """Make the policy, with the batch that the loop has without it."""
        record, replicas = self._record, self._sampler.num_replicas
        self._ranks = Ranks()
        self._ranks.join(since=self._called_at)
        record.leads = self._ranks.leads
        gather = partial(self._met, "measure the gradient noise", answer=list) if replicas > 1 else None
        record.begin(self._first_steps, gather)
        if (most := record.most_tried) < record.max_batch_size:
            self._say(f"batches above {most} samples are not tried: epochs would have less than {LEAST_STEPS} steps")

    def _decided(self, brought: list[tuple[int, str]]) -> tuple[BatchDecision, int, bool, NoiseInterval | None]:
        """Return rank 0's decision, the most batches dealt ahead, whether the batch is settled, and the known noise."""
        policy, step, noise = self._record.policy, self._step.ended, self._noise.estimate()
        assert policy is not None
        refusal = next((refusal for _, refusal in brought if refusal), "")
        if policy.batches.accumulates and refusal:
            policy.batches.accumulates = False
            decision = policy.fall_back(step, noise, f"the loop's gradients can't be accumulated: {refusal}")
        else:
            decision = policy.decide(step, noise)
        return decision, max(ahead for ahead, _ in brought), policy.is_settled, noise

    def _rehearse(self, planned: BatchDecision) -> None:
        """Take a larger batch if all ranks have the memory for it."""
        self._planned = None
        self._session.events.calls.hear(None)
        self._session.leave_out_step()
        local = self._local(planned)
        agree = partial(self._met, "compare the memory they have", answer=lambda texts: next(filter(None, texts), ""))
        problem = self._rehearsal.problem(local, keeps_gradients=planned.accumulated > 1, agree=agree)
        mine = problem, self._sampler.ledger.dealt_ahead
        decision, ahead = self._met("rehearse a larger batch", mine, partial(self._rehearsed, planned))
        if (decision.batch, decision.accumulated) == (planned.batch, planned.accumulated):
            self._record.fits = max(self._record.fits, local)
            self._step.has_room = self._step.has_room or planned.accumulated > 1
        else:
            self._say(f"batch size {decision.batch}: {decision.why}")
        self._take(decision, ahead)

    def _rehearsed(self, planned: BatchDecision, brought: list[tuple[str, int]]) -> tuple[BatchDecision, int]:
        """Return the batch planned, or another if a rank has brought a problem; and the most batches dealt ahead."""
        policy, step, noise = self._record.policy, self._step.ended, self._noise.known
        assert policy is not None
        decision, problem = planned, next((problem for problem, _ in brought if problem), "")
        if problem:
            if planned.accumulated > 1 and self._local(planned) <= self._record.fits:
                policy.batches.accumulates = False
                decision = policy.fall_back(step, noise, f"gradients are not accumulated: {problem}")
            else:
                at_once = planned.batch // planned.accumulated
                decision = policy.refuse(at_once, step, noise, f"{at_once} samples are too many: {problem}")
        return decision, max(ahead for _, ahead in brought)

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
        self._due = self._step.ended + decision.steps
        local, now = self._local(decision), self._step.local
        if local == now and decision.accumulated == self._step.steps_of(now):
            return
        if local > self._record.fits or (decision.accumulated > 1 and not self._step.has_room):
            self._planned, self._due = decision, self._step.ended + _HEARD
            self._rehearsal.prepare(now)
            self._session.events.calls.hear(self._rehearsal.hear)
            return
        self._step.decide(local, decision.accumulated)
        if local != now:
            alone = self._sampler.num_replicas == 1
            self._sampler.set_batch_size(local, delay=None if alone else most_ahead + _AHEAD)
        self._session.begin_again(is_resized=local != now)
        self._say(f"batch size {decision.batch}: {decision.why}")

    def _local(self, decision: BatchDecision) -> int:
        return decision.batch // (self._record.shares * decision.accumulated)
