"""What batch size the coming steps take, decided between two of them, and why.

    goodput(M) = M / step time(M) · efficiency(M)

The present batch is *settled*: its steps have been timed. A batch that promises a higher goodput is *tried*: real steps
are trained with it, and it stays only if the time that they took makes it better than the settled batch, whose steps
before them were timed, too. At most twice the largest batch timed so far is tried, so a prediction that is wrong costs
a few steps.

    settled ──another batch is better, as predicted──▶ tried ──as measured too──▶ settled
       ▲                                                 │ no
       └─────────────────────────────────────────────────┘

A batch whose share does not fit into a rank's
memory may still be one whose gradients are accumulated over several of the loop's steps: it competes with the others by
its goodput, and is tried as they are.

It knows numbers only: no model, no clock, no process group. `accel.elastic.batch_size.driver` connects it with a loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from accel.elastic.batch_size.choice import MARGIN, Better, Shares, better, candidates
from accel.goodput.efficiency import NoiseInterval, efficiency
from accel.goodput.fit import fit_throughput
from accel.goodput.goodput import BatchLimits
from accel.goodput.observations import WINDOW, Configuration, Observations
from accel.goodput.throughput import ThroughputModel

TIMED = 12
"""Steps of a batch by whose median it is judged."""
JUDGED = 2 * WINDOW  # steps before a decision that are timed: it forgets those before, and some are left out
_GROWTH = 2
"""Times the largest batch timed so far, which a batch that is tried may have at most."""
_PATIENCE = 16, 256
"""Steps until the next decision: after a change, and once nothing has changed for long; doubled each time."""
_UNKNOWN = 8
"""While the noise scale is not known, it is asked for again after 1/8 of the steps so far."""
_FITS_AGAIN = 2048
"""Steps until a batch that did not fit into memory is tried again: others may have used it. Doubled each time."""
_TRIED_AGAIN = 64, 3
"""A batch that failed is tried again after so many steps at least, and when the run is so many times as old: it may
have met a busy moment of the machine, and a dozen cold steps at step 54 are no verdict for long."""


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    step: int
    batch: int
    accumulated: int = 1
    tried: bool
    """The batch has not been timed before: it is settled or undone at the next decision."""
    why: str
    goodput: float
    """Predicted, samples per second as if of the user's batch; 0 before any step was timed."""
    measured: float
    """The same by the time of its steps, as of the latest decision since; 0 until they were timed."""
    noise: float | None
    """The noise scale, samples; None while it is not known."""
    steps: int
    """Until the next decision, at least."""


class FittingBatches:
    """The batches that may be chosen: what memory allows, and how each is dealt.

    Attributes:
        accumulates: steps of the loop may be accumulated to one of its optimizer; set by whoever does it.
        sizes: those that every rank takes at once; more are accumulated.
        pieces: batches that a step's samples are dealt to.
    """

    def __init__(self, base: int, most: int, *, replicas: int, nodes: int, micro_batches: int) -> None:
        self.accumulates = False
        self.replicas, self.micro_batches, self.pieces = replicas, micro_batches, replicas * micro_batches
        self.sizes = candidates(base, most, self.pieces)
        self._nodes, self._most = nodes, most
        self._largest = math.inf
        self._again_at, self._refusals = math.inf, 0
        """The step from which on what did not fit may be tried again, and how often one did not fit."""

    @property
    def fits(self) -> int | None:
        """The largest batch that is known to be small enough for memory; None while all of them were."""
        return None if math.isinf(self._largest) else self.whole()[-1]

    def whole(self) -> list[int]:
        """Return those that every rank takes at once, ascending; at least the smallest."""
        return [size for size in self.sizes if size < self._largest] or self.sizes[:1]

    def all(self) -> list[int]:
        whole = self.whole()
        if not self.accumulates or whole[-1] == self.sizes[-1]:
            return whole
        return [*whole, *(whole[-1] * steps for steps in candidates(1, self._most // whole[-1])[1:])]

    def shares(self, batch: int) -> Shares:
        """Return how a batch is dealt: at once, or what doesn't go so in as few equal pieces as possible."""
        largest = self.whole()[-1]
        steps = 1 if batch <= largest else -(-batch // largest)
        return Shares(batch // (self.pieces * steps), steps)

    def configuration(self, batch: int) -> Configuration:
        local, steps = self.shares(batch)
        return Configuration(self._nodes, self.replicas, local, self.micro_batches * steps - 1)

    def limits(self, most: int) -> BatchLimits:
        """Return between which batches a scheduler may choose, up to so many samples of a step."""
        fits = self.fits
        steps = -(-most // fits) if self.accumulates and fits is not None else 1
        return BatchLimits(
            max_batch_size=most,
            local_max=None if fits is None else max(1, fits // self.pieces),
            max_accumulation=self.micro_batches * steps - 1,
        )

    def is_whole(self, configuration: Configuration) -> bool:
        return configuration.accumulation == self.micro_batches - 1

    def refuse(self, batch: float, step: int) -> None:
        """Take no batch of so many samples or more for long from a step on; ever longer."""
        self._largest = min(self._largest, batch)
        if math.isinf(self._again_at):
            self._again_at, self._refusals = step + _FITS_AGAIN * 2**self._refusals, self._refusals + 1

    def try_again(self, step: int) -> None:
        """Take larger ones again if it is long enough that one did not fit."""
        if step >= self._again_at:
            self._largest = self._again_at = math.inf

    @property
    def largest_local(self) -> float | None:
        """What no longer fits, samples of one of a rank's batches; None while all did."""
        return None if math.isinf(self._largest) else self._largest / self.pieces


class BatchTimes:
    """How long a step of a batch takes: as measured, or predicted from the others."""

    def __init__(self, batches: FittingBatches) -> None:
        self._batches = batches
        self.observations = Observations()
        self.has_news = False
        """For the model: a fit takes a millisecond, and is seldom asked for."""
        self._model: ThroughputModel | None = None
        self._earlier: set[Configuration] = set()
        """Timed in an earlier process only, perhaps on another machine."""

    @property
    def model(self) -> ThroughputModel | None:
        """Fitted to the step times; None until the first decision with a known noise scale."""
        if self.has_news:
            self._model, self.has_news = fit_throughput(self.observations.step_times(), self._model), False
        return self._model

    def add(self, configuration: Configuration, seconds: float) -> None:
        """Take in the time of one step."""
        if configuration in self._earlier:
            self._earlier.remove(configuration)
            self.observations.forget(configuration)
        self.observations.add(configuration, seconds)

    def clear(self) -> None:
        self.observations, self._earlier, self.has_news = Observations(), set(), False

    def missing(self, batch: int) -> int:
        return max(0, TIMED - self.observations.count(self._batches.configuration(batch)))

    def timed(self) -> list[Configuration]:
        return [each for each in self.observations.configurations() if self.observations.count(each) >= TIMED]

    def known(self, sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if not self.missing(size)]

    def seconds(self, batch: int, recent: Sequence[int]) -> float:
        """Return the time of a step: measured; of a batch that was never timed, predicted.

        While only one batch has been timed nothing says what a larger one takes. It is then hoped to take as long: a
        try shows.

        Args:
            batch: samples of it, over all ranks.
            recent: batches whose times are of now.
        """
        own, timed = self._batches.configuration(batch), self.timed()
        if own in timed:
            # Of long ago: the machine may be another one now, so that it must promise more.
            return self.observations.median(own) * (1.0 if batch in recent else MARGIN)
        is_whole = self._batches.is_whole
        if not is_whole(own) and self._batches.replicas > 1 and all(map(is_whole, timed)):
            return self._hoped_s(batch, recent)
        nearest = min(timed, key=lambda each: abs(_samples(each) - batch))
        known_s, known = self.observations.median(nearest), _samples(nearest)
        if len(timed) == 1:
            steps = (own.accumulation + 1) / (nearest.accumulation + 1)
            return known_s * max(1.0, steps) if batch > known else known_s * batch / known
        model = self.model
        assert model is not None
        return known_s * float(model.step_s(*own)) / float(model.step_s(*nearest))

    def _hoped_s(self, batch: int, recent: Sequence[int]) -> float:
        """Return the least time of a step that is accumulated, while none has been timed.

        On one number of ranks nothing tells the exchange of gradients, which is saved, from other work that does not
        depend on the batch. It is hoped to be all of that: a try shows.
        """
        steps = self._batches.shares(batch).steps
        piece = batch // steps
        times = {_samples(each): self.observations.median(each) for each in self.timed()}
        least, most = min(times), max(times)
        sample_s = max(0.0, (times[most] - times[least]) / (most - least)) if most > least else 0.0
        return self.seconds(piece, recent) + (steps - 1) * piece * sample_s

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.observations.load_state_dict(state)
        self._earlier = set(self.observations.configurations())
        self.has_news = len(self.timed()) > 1  # of a batch that was not timed on so many ranks, it is predicted


def _samples(configuration: Configuration) -> int:
    return configuration.replicas * configuration.local_batch * (configuration.accumulation + 1)


class BatchPolicy:
    """Decide the batch size by goodput.

    It is made after `step` steps of this process, by the noise scale, None while it is not known.
    The report says `why`.

    Args:
        base_batch: samples of a step as the user wrote it, over all ranks.
        max_batch_size: the most samples of a step, over all ranks; at least `base_batch`.
        replicas: ranks.
        nodes: hosts.
        micro_batches: batches of a rank in a step, whose gradients the loop accumulates.

    Example:
        >>> policy = BatchPolicy(base_batch=32, max_batch_size=128)
        >>> for _ in range(12):
        ...     policy.timed(32, 0.010)
        >>> noise = NoiseInterval(2000.0, 1500.0, 2600.0)
        >>> policy.decide(12, noise).batch  # tried: nothing is known yet of larger ones
        64
    """

    def __init__(
        self, base_batch: int, max_batch_size: int, *, replicas: int = 1, nodes: int = 1, micro_batches: int = 1
    ) -> None:
        self.base_batch = base_batch
        self.batches = FittingBatches(
            base_batch, max_batch_size, replicas=replicas, nodes=nodes, micro_batches=micro_batches
        )
        self.times = BatchTimes(self.batches)
        self.decisions: list[BatchDecision] = []
        self.steps_before = 0
        """Steps trained by earlier processes of this run. Decisions are numbered globally."""
        self._settled = self._now = self.batches.sizes[0]
        self._patience = _PATIENCE[0]
        self._failed: dict[Configuration, int] = {}
        """Tried, and not better than the settled batch: the step of the whole training at which that was known."""
        self._present: tuple[int, Configuration] | None = None
        """How the present batch is dealt: in how many steps of the loop, and the configuration; None until needed."""

    @property
    def batch(self) -> int:
        return self._now

    @property
    def is_settled(self) -> bool:
        """True once the noise is known, while nothing is being tried and the last decision changed nothing."""
        return self._settled == self._now and self._patience > _PATIENCE[0]

    def timed(self, batch: int, seconds: float, accumulated: int = 1) -> None:
        """Take in the time of one step, unless it is of another batch, such as an epoch's last."""
        # It is dealt in the same way until something else is decided: to see how takes 2 µs, which each step would pay.
        batches, now = self.batches, self._now
        self._present = self._present or (batches.shares(now).steps, batches.configuration(now))
        steps, configuration = self._present
        if batch == now and accumulated == steps and seconds > 0:
            self.times.add(configuration, seconds)

    def time_anew(self) -> None:
        """Forget all times: steps take others from now on, as where gradients are exchanged in another form."""
        self.times.clear()
        self._failed, self._patience, self._present = {}, _PATIENCE[0], None

    def steps_missing(self) -> int:
        """Return how many steps of the present batch are still to be timed."""
        return self.times.missing(self._now)

    def refuse(self, batch: int, step: int, noise: NoiseInterval | None, why: str) -> BatchDecision:
        """Take no batch of so many samples or more for long: they don't fit. Return what to do instead."""
        self.batches.refuse(batch, step)
        return self.fall_back(step, noise, why)

    def fall_back(self, step: int, noise: NoiseInterval | None, why: str) -> BatchDecision:
        """Return what to do where `batches` have changed, as where nothing can be accumulated."""
        fitting = self.batches.all()
        known = self.times.known(fitting)
        if self._settled not in fitting:
            self._settled = max(known, default=self.batches.whole()[-1])
        self._now, self._patience = self._settled, _PATIENCE[0]
        if noise is not None and noise.is_known and self.times.timed():
            choice = better(self._settled, known, self.base_batch, noise, self._seconds)
            self._now = self._settled = self._settled if choice is None else choice.batch
        return self._decided(step, noise, why, self.steps_missing() or self._patience)

    def decide(self, step: int, noise: NoiseInterval | None) -> BatchDecision:
        """Return what to do, and do it; while the noise scale is not known nothing grows."""
        if missing := self.steps_missing():
            return self._decided(step, noise, "the steps of this batch are still being timed", missing)
        if self.decisions:  # add what the steps since then have shown
            last = self.decisions[-1]
            scale = last.noise if noise is None else noise.phi
            self.decisions[-1] = replace(last, tried=False, measured=self._goodput(self._now, noise), noise=scale)
        if noise is None or not noise.is_known:
            patience = min(max(_PATIENCE[0], step // _UNKNOWN), _PATIENCE[1])
            return self._decided(step, noise, "the noise scale is not known yet", patience)
        self.times.has_news = True
        before = self._now
        self._end_trial(step, noise)
        least, times = _TRIED_AGAIN
        now = self.steps_before + step
        for failed in [each for each, at in self._failed.items() if now >= max(at + least, times * at)]:
            self.times.observations.forget(failed)
            del self._failed[failed]
        if self.batches.shares(self._settled).steps == 1:  # else it would be taken at once now
            self.batches.try_again(step)
        fitting = self.batches.all()
        # What was timed once may be dealt in another way now, as after a refusal.
        largest = max(self.times.known(fitting), default=self._settled)
        others = [size for size in fitting if size <= _GROWTH * largest and size != before]
        choice = better(self._settled, others, self.base_batch, noise, self._seconds)
        if choice is not None:  # a trial, by new times
            self.times.observations.forget(self.batches.configuration(choice.batch))
        self._now = self._settled if choice is None else choice.batch
        self._patience = _PATIENCE[0] if self._now != before else min(2 * self._patience, _PATIENCE[1])
        why = _why(before, self._now, self._settled, choice, self.batches.shares(self._now))
        return self._decided(step, noise, why, self._patience)

    def _end_trial(self, step: int, noise: NoiseInterval) -> None:
        """Settle on the batch that is being tried if its steps have shown that it is better."""
        tried = self._now
        if tried != self._settled and better(self._settled, [tried], self.base_batch, noise, self._seconds) is None:
            if tried > self._settled:
                self._failed[self.batches.configuration(tried)] = self.steps_before + step
            return
        self._settled = tried

    def _seconds(self, batch: int) -> float:
        return self.times.seconds(batch, (self._now, self._settled))

    def _goodput(self, batch: int, noise: NoiseInterval | None) -> float:
        # Without a known noise scale a larger batch counts for no more than the user's.
        scale = 0.0 if noise is None else noise.at(batch)
        return batch / self._seconds(batch) * float(efficiency(batch, self.base_batch, scale))

    def _decided(self, step: int, noise: NoiseInterval | None, why: str, steps: int) -> BatchDecision:
        """Keep the decision if it changes the batch."""
        self._present = None
        goodput = self._goodput(self._now, noise) if self.times.timed() else 0.0
        is_timed = not self.steps_missing()
        decision = BatchDecision(
            step=self.steps_before + step,
            batch=self._now,
            accumulated=self.batches.shares(self._now).steps,
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

    def state_dict(self) -> dict[str, Any]:
        return {
            "times": self.times.observations.state_dict(),
            "base": self.base_batch,
            "batch": self._settled,
            "in_vain": [[*failed, at] for failed, at in self._failed.items()],
            "largest_local": self.batches.largest_local,
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also on another number of ranks: the batch is then the nearest that they can share.

        The user's batch is that of this policy: make it with that of the state.
        """
        self.times.load_state_dict(state["times"])
        self.decisions = [BatchDecision(**each) for each in state["decisions"]]
        in_vain = {Configuration(*failed): at for *failed, at in state.get("in_vain", [])}
        self._failed = {failed: at for failed, at in in_vain.items() if self.times.observations.count(failed)}
        if (largest := state.get("largest_local")) is not None:
            self.batches.refuse(largest * self.batches.pieces, 0)  # by this process's steps
        self._settled = self._now = min(self.batches.all(), key=lambda size: abs(size - state["batch"]))
        self._present = None


def _why(before: int, now: int, settled: int, choice: Better | None, shares: Shares) -> str:
    if choice is None and now == before:
        return "no other batch is clearly better"
    if choice is None:
        return f"a step of {before} samples takes too long for what it is worth"
    noise = "pure noise" if choice.noise == float("inf") else f"a noise scale of {choice.noise:.3g}"
    local, steps = shares
    how = f", accumulated over {steps} steps of {local} samples a rank" if steps > 1 else ""
    return (
        f"{choice.ratio:.2f}x the goodput of {settled}: {choice.speed:.2f}x the samples per second, "
        f"each worth {choice.worth:.2f} at {noise}{how}"
    )
