"""The batch controller: what batch size the coming steps take, decided between two steps, and why.

The present batch is *settled*: its steps have been timed. A better one that has been timed before is settled at once.
One that has not is *tried*: real steps are trained with it, and it stays only if its measured time still makes it
better. At most twice the largest batch timed so far is tried, so a prediction that is wrong costs a few steps.

A batch whose share does not fit into a rank's memory, or was tried in vain on several ranks, may still be one whose
gradients are accumulated over several of the loop's steps: it competes with the others by its goodput, and is tried as
they are.

    settled ──a larger batch is better, as predicted──▶ tried ──as measured too──▶ settled
       ▲                                                  │ no
       └──────────────────────────────────────────────────┘

It knows numbers only: no model, no clock, no process group. `accel.elastic.batch_run` connects it with a loop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from accel.elastic.batch_choice import Better, better, candidates
from accel.elastic.batch_decision import BatchDecision, Shares
from accel.elastic.failed_tries import FailedTries
from accel.elastic.machine_speed import MachineSpeed
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval, efficiency
from accel.goodput.fit import fit
from accel.goodput.observations import Configuration, Observations
from accel.goodput.throughput import ThroughputModel

TIMED = 12
"""Steps of a batch by whose median it is judged; as many again for each time that it was tried in vain."""
_GROWTH = 2
"""Times the largest batch timed so far, which a batch that is tried may have at most."""
_PATIENCE = 16, 256
"""Steps until the next decision: after a change, and once nothing has changed for long; doubled each time."""
_UNKNOWN = 8
"""While the noise scale is not known, it is asked for again after so much of the run so far."""
_ASKED_AGAIN = 2048
"""Steps until a batch that did not fit into memory is tried again: others may have used it. Doubled each time."""


class BatchController:
    """Decide the batch size by goodput.

    Args:
        base_batch: samples of a step as the user wrote it, over all ranks.
        max_batch_size: the most samples of a step, over all ranks.
        replicas: ranks.
        nodes: hosts.
        micro_batches: batches of a rank in a step, whose gradients the loop accumulates.

    Attributes:
        accumulates: steps of the loop may be accumulated to one of its optimizer; set by whoever does it.

    Raises:
        InvalidArgument: if `max_batch_size` is below the user's batch.

    Example:
        >>> controller = BatchController(base_batch=32, max_batch_size=128)
        >>> for _ in range(12):
        ...     controller.timed(32, 0.010)
        >>> noise = NoiseInterval(2000.0, 1500.0, 2600.0)
        >>> controller.decide(12, noise).batch  # tried: nothing is known yet of larger ones
        64
    """

    def __init__(
        self, base_batch: int, max_batch_size: int, *, replicas: int = 1, nodes: int = 1, micro_batches: int = 1
    ) -> None:
        if max_batch_size < base_batch:
            raise InvalidArgument(
                f"max_batch_size must be at least the loader's batch, {base_batch} samples over {replicas} "
                f"rank{'s'[: replicas > 1]}, got {max_batch_size}; raise it, or leave it out to keep the batch"
            )
        self.base_batch, self.replicas, self.nodes, self.micro_batches = base_batch, replicas, nodes, micro_batches
        self.accumulates = False
        self._most = max_batch_size
        self.sizes = candidates(base_batch, max_batch_size, self._shares)
        """Those that every rank takes at once; more are accumulated."""
        self.decisions: list[BatchDecision] = []
        self.steps_before = 0
        """Of the training, in the processes that this one goes on from: decisions are told by all of its steps."""
        self.times = Observations()
        self._model: ThroughputModel | None = None
        self._has_news = False  # for that: a fit takes a millisecond, and is seldom asked for
        self._settled = self._now = self.sizes[0]
        self._largest = math.inf
        """The largest batch that fits into memory."""
        self.sums = False
        """The loss is a sum over the batch: no larger one than the user's is taken at once."""
        self._asked_again, self._refusals = math.inf, 0
        """The step from which on it is not known any more, and how often one did not fit."""
        self._patience = _PATIENCE[0]
        self._timed: set[Configuration] = set()
        self._earlier: set[Configuration] = set()
        """Timed in an earlier process only, perhaps on another machine."""
        self._present: tuple[int, Configuration] | None = None
        """How the present batch is dealt: in how many steps of the loop, and the configuration; None until needed."""
        self._failures = FailedTries()
        self._speed = MachineSpeed()
        self._exchange = ""
        self._scales = {"": 1.0}
        """Time of the gradients' exchange, in those of the plain one, by what shortens it."""
        self._is_assumed = False
        """The present scale is none that was measured: the plain exchange is not known."""
        self._unscaled: list[float] = []
        """Times of steps since the exchange has become another one whose scale is not known yet, s."""

    @property
    def batch(self) -> int:
        """Samples of a step now, over all ranks."""
        return self._now

    @property
    def model(self) -> ThroughputModel | None:
        """Fitted to the step times; None until the first decision with a known noise scale."""
        if self._has_news:
            self._model, self._has_news = fit(self.times, self._model), False
        return self._model

    @property
    def _shares(self) -> int:
        """Batches that a step's samples are dealt to."""
        return self.replicas * self.micro_batches

    @property
    def fits(self) -> int | None:
        """The largest batch that is known to be small enough for memory; None while all of them were."""
        return None if math.isinf(self._largest) else max(self._whole(self._largest))

    def shares(self, batch: int) -> Shares:
        """Return how a batch is dealt: at once, or what doesn't go so in as few equal pieces as possible."""
        whole = self._whole()
        steps = 1 if batch <= whole[-1] else -(-batch // whole[-1])
        return Shares(batch // (self._shares * steps), steps)

    @property
    def is_settled(self) -> bool:
        """True once the noise is known, while nothing is being tried and the last decision changed nothing."""
        return self._settled == self._now and self._patience > _PATIENCE[0]

    def timed(self, batch: int, seconds: float, accumulated: int = 1) -> None:
        """Take in the time of one step.

        Args:
            batch: samples of it, over all ranks; others than those decided on, as an epoch's last, are left out.
            seconds: > 0.
            accumulated: steps of the loop that it was; others than decided on are left out, too.
        """
        # It is dealt in the same way until something else is decided: to see how takes 2 µs, which each step would pay.
        self._present = self._present or (self.shares(self._now).steps, self._configuration(self._now))
        steps, configuration = self._present
        if batch != self._now or accumulated != steps or not seconds > 0:
            return
        if self._exchange not in self._scales:
            self._unscaled.append(seconds)
            return
        if configuration in self._earlier:
            self._earlier.remove(configuration)
            self.times.forget(configuration)
        self.times.add(configuration, seconds)
        if configuration not in self._timed and self.times.count(configuration) >= self._judged_after(batch):
            self._timed.add(configuration)

    def exchanged_by(self, name: str) -> None:
        """Take in that gradients are exchanged in another way from now on.

        How much shorter it makes the exchange is seen by the present batch, and then reckoned with at all others.

        Args:
            name: of what shortens the exchange; "" for the plain one.
        """
        if name == self._exchange:
            return
        if self._is_assumed:  # times under it can't be told from plain ones
            del self._scales[self._exchange]
            self.times, self._timed, self._failures, self._is_assumed = Observations(), set(), FailedTries(), False
        self._exchange, self._unscaled, self._patience, self._present = name, [], _PATIENCE[0], None

    def steps_missing(self) -> int:
        """Return how many steps of the present batch have still to be timed before the next decision."""
        if self._exchange not in self._scales:
            return max(0, TIMED - len(self._unscaled))
        return max(0, self._judged_after(self._now) - self.times.count(self._configuration(self._now)))

    def refuse(self, batch: int, step: int, noise: NoiseInterval | None, why: str) -> BatchDecision:
        """Take no batch of so many samples or more for long, and return what to do instead.

        Args:
            batch: samples over all ranks that don't fit into memory.
            step: steps that have ended.
            noise: the noise scale; None while it is not known.
            why: said in the report.
        """
        self._largest = min(self._largest, batch)
        if math.isinf(self._asked_again):
            self._asked_again, self._refusals = step + _ASKED_AGAIN * 2**self._refusals, self._refusals + 1
        return self._fall_back(step, noise, why)

    def take_no_larger(self, step: int, noise: NoiseInterval | None, why: str) -> BatchDecision:
        """Take batches larger than the user's by accumulation only from now on, and return what to do instead.

        Args:
            step: steps that have ended.
            noise: the noise scale; None while it is not known.
            why: said in the report.
        """
        self.sums = True
        return self._fall_back(step, noise, why)

    def accumulate_no_more(self, step: int, noise: NoiseInterval | None, why: str) -> BatchDecision:
        """Take only batches that every rank takes at once from now on, and return what to do instead.

        Args:
            step: steps that have ended.
            noise: the noise scale; None while it is not known.
            why: said in the report.
        """
        self.accumulates = False
        return self._fall_back(step, noise, why)

    def _fall_back(self, step: int, noise: NoiseInterval | None, why: str) -> BatchDecision:
        self._timed = {each for each in self._timed if self.times.count(each)}
        fitting = self._fitting()
        if self._settled not in fitting:
            self._settled = max(self._known(fitting), default=self._whole()[-1])
        self._now, self._patience = self._settled, _PATIENCE[0]
        if noise is not None and noise.is_known and self._timed:
            choice = better(self._settled, self._known(fitting), self.base_batch, noise, self._seconds)
            self._now = self._settled = self._settled if choice is None else choice.batch
        return self._decided(step, noise, why, self.steps_missing() or self._patience)

    def decide(self, step: int, noise: NoiseInterval | None) -> BatchDecision:
        """Return what to do from here, and do it.

        Args:
            step: steps that have ended.
            noise: the noise scale; None while it is not known, and then nothing grows.
        """
        before, settled = self._now, self._settled
        if missing := self.steps_missing():
            return self._decided(step, noise, "the steps of this batch are still being timed", missing)
        if self._exchange not in self._scales:
            self._learn_scale()
            if missing := self.steps_missing():
                return self._decided(step, noise, "the steps of this batch are still being timed", missing)
        self._timed = {each for each in self._timed if self.times.count(each)}  # it forgets what was long ago
        own = self._configuration(self._now)
        self._speed.timed(own, self.times.median(own))
        self._complete_last(noise)
        if noise is None or not noise.is_known:
            patience = min(max(_PATIENCE[0], step // _UNKNOWN), _PATIENCE[1])
            return self._decided(step, noise, "the noise scale is not known yet", patience)
        self._has_news = True
        self._forget_old_failures(step)
        if step >= self._asked_again and self.shares(settled).steps == 1:  # else it would be taken at once from now on
            self._largest = self._asked_again = math.inf
        choice = better(settled, self._reachable(), self.base_batch, noise, self._seconds)
        self._now = settled if choice is None else choice.batch
        if self._is_timed(self._now):
            self._settled = self._now
            self._forgive_smaller()
        if before > max(self._now, settled):
            self._failures.add(self._configuration(before), step)
        self._patience = _PATIENCE[0] if self._now != before else min(2 * self._patience, _PATIENCE[1])
        return self._decided(step, noise, self._why(before, settled, choice), self._patience)

    def _learn_scale(self) -> None:
        """Find the scale of the present exchange by the time of the present batch with it and without."""
        plainly = self._configuration(self._now)._replace(communication_scale=1.0)
        known = [each for each in self._timed if each.communication_scale == 1.0]
        scale, self._is_assumed = 1.0, not known
        if known:
            model = self.model or fit(self.times)
            nearest = min(known, key=lambda each: abs(self._samples(each) - self._now))
            plain_s = self._now_s(nearest) * float(model.step_s(*plainly)) / float(model.step_s(*nearest))
            scale = model.communication_scale(*plainly[:4], statistics.median(self._unscaled) / plain_s)
        self._scales[self._exchange], self._present = round(scale, 3), None
        for seconds in self._unscaled:
            self.timed(self._now, seconds, self.shares(self._now).steps)

    def _forget_old_failures(self, step: int) -> None:
        """Let a batch that was tried in vain be tried again later."""
        accumulates = self.shares(self._settled).steps > 1
        for tried in self._failures.may_be_tried_again(step):
            if accumulates and self._is_whole(tried):
                continue  # without that limit the batch that stands would be taken at once
            if tried in self._timed:
                self._timed.discard(tried)
                self.times.forget(tried)
                self._failures.forgive(tried)  # else its new times would be forgotten, too

    def _forgive_smaller(self) -> None:
        """Let what was tried in vain limit no batch that stands."""
        if self.accumulates and self.shares(self._settled).steps == 1:
            for tried in self._failures.all():
                if self._samples(tried) <= self._settled:
                    self._failures.forgive(tried)

    def _judged_after(self, batch: int) -> int:
        """Return the steps by which a batch is judged: a gain as small as the margin must not stay by a lucky dozen."""
        return TIMED * (1 + self._failures.forgiven(self._configuration(batch)))

    def _reachable(self) -> list[int]:
        fitting = self._fitting()
        # What was timed once may be dealt in another way now, as after a refusal.
        largest = max(self._known(fitting), default=self._settled)
        return [size for size in fitting if size <= _GROWTH * largest]

    def _fitting(self) -> list[int]:
        """Return the batches that may be chosen, ascending."""
        whole = self._whole()
        if not self.accumulates or whole[-1] == self.sizes[-1]:
            return whole
        return [*whole, *(whole[-1] * steps for steps in candidates(1, self._most // whole[-1])[1:])]

    def _whole(self, limit: float | None = None) -> list[int]:
        """Return those that every rank takes at once, below what does not fit or was in vain; at least the smallest."""
        below = self._limit() if limit is None else limit
        return [size for size in self.sizes if size < below] or self.sizes[:1]

    def _limit(self) -> float:
        if self.sums:
            return self.sizes[0] + 1
        if not self.accumulates or self.replicas == 1:
            return self._largest  # one rank gains nothing by taking in several pieces what fits
        vain = [each for each in self._failures.standing() if self._is_whole(each) and each.replicas == self.replicas]
        return min([self._largest, *map(self._samples, vain)])

    def _is_whole(self, configuration: Configuration) -> bool:
        """Return whether every rank takes its share at once."""
        return configuration.accumulation == self.micro_batches - 1

    @staticmethod
    def _samples(configuration: Configuration) -> int:
        return configuration.replicas * configuration.local_batch * (configuration.accumulation + 1)

    def _known(self, sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if self._is_timed(size)]

    def _is_timed(self, batch: int) -> bool:
        return self._configuration(batch) in self._timed

    def _configuration(self, batch: int) -> Configuration:
        local, steps = self.shares(batch)
        scale = self._scales.get(self._exchange, 1.0)
        return Configuration(self.nodes, self.replicas, local, self.micro_batches * steps - 1, scale)

    def _seconds(self, batch: int) -> float:
        """Return the time of a step: measured; of a batch that was never timed, predicted.

        While only one batch has been timed nothing says what a larger one takes. It is then hoped to take as long: a
        try shows.
        """
        own = self._configuration(batch)
        if own in self._timed:
            return self._now_s(own)
        if not self._is_whole(own) and self.replicas > 1 and all(map(self._is_whole, self._timed)):
            return self._hoped_s(batch)
        scale = own.communication_scale
        nearest = min(self._timed, key=lambda t: (t.communication_scale != scale, abs(self._samples(t) - batch)))
        known_s, known = self._now_s(nearest), self._samples(nearest)
        if len(self._timed) == 1:
            steps = (own.accumulation + 1) / (nearest.accumulation + 1)
            return known_s * max(1.0, steps) if batch > known else known_s * batch / known
        model = self.model
        assert model is not None
        return known_s * float(model.step_s(*own)) / float(model.step_s(*nearest))

    def _hoped_s(self, batch: int) -> float:
        """Return the least time of a step that is accumulated, while none has been timed.

        On one number of ranks nothing tells the exchange of gradients, which is saved, from other work that does not
        depend on the batch. It is hoped to be all of that: a try shows.
        """
        steps = self.shares(batch).steps
        piece = batch // steps
        alike = [each for each in self._timed if each.communication_scale == self._scales.get(self._exchange, 1.0)]
        times = {self._samples(each): self._now_s(each) for each in alike or self._timed}
        least, most = min(times), max(times)
        sample_s = max(0.0, (times[most] - times[least]) / (most - least)) if most > least else 0.0
        return self._seconds(piece) + (steps - 1) * piece * sample_s

    def _now_s(self, configuration: Configuration) -> float:
        """Return the time of what was timed, as the machine is now."""
        return self.times.median(configuration) * self._speed.since(configuration)

    def _goodput(self, batch: int, noise: NoiseInterval | None) -> float:
        # Without a known noise scale a larger batch counts for no more than the user's.
        scale = 0.0 if noise is None else noise.at(batch)
        return batch / self._seconds(batch) * float(efficiency(batch, self.base_batch, scale))

    def _why(self, before: int, settled: int, choice: Better | None) -> str:
        if choice is None and self._now == before:
            return "no other batch is clearly better"
        if choice is None:
            return f"a step of {before} samples takes too long for what it is worth"
        noise = "pure noise" if choice.noise == float("inf") else f"a noise scale of {choice.noise:.3g}"
        local, steps = self.shares(self._now)
        how = f", accumulated over {steps} steps of {local} samples a rank" if steps > 1 else ""
        if self._exchange:
            how += f"; by {self._exchange} the exchange takes {self._scales[self._exchange]:.2f} of the plain one"
        return (
            f"{choice.ratio:.2f}x the goodput of {settled}: {choice.speed:.2f}x the samples per second, each worth "
            f"{choice.worth:.2f} at {noise}{how}"
        )

    def _decided(self, step: int, noise: NoiseInterval | None, why: str, steps: int) -> BatchDecision:
        """Return the decision, and keep it if it changes the batch."""
        self._present = None
        goodput = self._goodput(self._now, noise) if self._timed else 0.0
        is_timed = self._is_timed(self._now)
        decision = BatchDecision(
            step=self.steps_before + step,
            batch=self._now,
            accumulated=self.shares(self._now).steps,
            tried=not is_timed,
            why=why,
            goodput=goodput,
            measured=goodput if is_timed else 0.0,
            noise=None if noise is None else noise.phi,
            steps=steps,
        )
        last = self.decisions[-1] if self.decisions else None
        if last is None or (last.batch, last.accumulated) != (decision.batch, decision.accumulated):
            self.decisions.append(decision)
        return decision

    def _complete_last(self, noise: NoiseInterval | None) -> None:
        """Add what the steps since the last decision have shown to it."""
        if self.decisions:
            last = self.decisions[-1]
            scale = last.noise if noise is None else noise.phi
            self.decisions[-1] = replace(last, tried=False, measured=self._goodput(self._now, noise), noise=scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learnt and decided, as values that JSON can hold."""
        is_assumed = self._is_assumed  # times of an exchange whose scale is not known would pass for plain ones
        return {
            "times": (Observations() if is_assumed else self.times).state_dict(),
            "base": self.base_batch,
            "batch": self._settled,
            "scales": {"": 1.0} if self._is_assumed else dict(self._scales),
            "in_vain": [] if is_assumed else self._failures.state(),
            "largest_local": None if math.isinf(self._largest) else self._largest / self._shares,
            "sums": self.sums,
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also on another number of ranks: the batch is then the nearest that they can share.

        The user's batch is that of this controller: make it with that of the state.
        """
        self.times.load_state_dict(state["times"])
        self.decisions = [BatchDecision(**each) for each in state["decisions"]]
        self._scales |= state.get("scales", {})
        in_vain = ((Configuration(*tried), count) for *tried, count in state.get("in_vain", []))
        self._failures = FailedTries((tried, count) for tried, count in in_vain if self.times.count(tried))
        self.sums = state.get("sums", False)
        largest = state.get("largest_local")
        self._largest = math.inf if largest is None else largest * self._shares
        self._asked_again = math.inf if largest is None else _ASKED_AGAIN  # steps are this process's
        likely = *map(self._configuration, (*self.sizes, *self._fitting())), *self._failures.all()
        self._timed = {each for each in likely if self.times.count(each) >= TIMED}
        self._settled = self._now = min(self._fitting(), key=lambda size: abs(size - state["batch"]))
        self._present = None
        self._earlier = set(self._timed)
        self._speed.resume({each: self.times.median(each) for each in self._timed})
        if len(self._timed) > 1:
            self._has_news = True  # of a batch that was not timed on so many ranks, the time is predicted
