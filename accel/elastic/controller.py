"""The batch controller: what batch size the coming steps take, decided between two steps, and why.

The present batch is *settled*: its steps have been timed. A better one that has been timed before is settled at once.
One that has not is *tried*: real steps are trained with it, and it stays only if its measured time still makes it
better. At most twice the largest batch timed so far is tried, so a prediction that is wrong costs a few steps.

    settled ──a larger batch is better, as predicted──▶ tried ──as measured too──▶ settled
       ▲                                                  │ no
       └──────────────────────────────────────────────────┘

It knows numbers only: no model, no clock, no process group. `accel.elastic.batch_run` connects it with a loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from accel.elastic.batch_choice import Better, better, candidates
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
_RETRY = 256
"""Steps until a batch that was tried in vain may be tried again; doubled each time."""

_ASKED_AGAIN = 2048
"""Steps until a batch that did not fit into memory is tried again: others may have used it. Doubled each time."""


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    """What was decided between two steps."""

    step: int
    """Steps that had ended."""
    batch: int
    """Samples of a step from now on, over all ranks."""
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


class BatchController:
    """Decide the batch size by goodput.

    Args:
        base_batch: samples of a step as the user wrote it, over all ranks.
        max_batch_size: the most samples of a step, over all ranks.
        replicas: ranks.
        nodes: hosts.
        micro_batches: batches of a rank in a step, whose gradients the loop accumulates.

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
        self.sizes = candidates(base_batch, max_batch_size, self._shares)
        self.decisions: list[BatchDecision] = []
        self.times = Observations()
        self.model: ThroughputModel | None = None
        self._settled = self._now = self.sizes[0]
        self._largest = math.inf
        """The largest batch that fits into memory."""
        self._asked_again, self._refusals = math.inf, 0
        """The step from which on it is not known any more, and how often one did not fit."""
        self._patience = _PATIENCE[0]
        self._timed: set[int] = set()
        self._failures: dict[int, tuple[int, float]] = {}
        """Batches tried in vain: how often, and at which step last; inf once that is forgotten."""
        self._speed = MachineSpeed()

    @property
    def batch(self) -> int:
        """Samples of a step now, over all ranks."""
        return self._now

    @property
    def _shares(self) -> int:
        """Batches that a step's samples are dealt to."""
        return self.replicas * self.micro_batches

    @property
    def fits(self) -> int | None:
        """The largest batch that is known to be small enough for memory; None while all of them were."""
        return None if math.isinf(self._largest) else max(self._fitting())

    @property
    def is_settled(self) -> bool:
        """True once the noise is known, while nothing is being tried and the last decision changed nothing."""
        return self._settled == self._now and self._patience > _PATIENCE[0]

    def timed(self, batch: int, seconds: float) -> None:
        """Take in the time of one step.

        Args:
            batch: samples of it, over all ranks; others than those decided on, as an epoch's last, are left out.
            seconds: > 0.
        """
        if batch != self._now or not seconds > 0:
            return
        configuration = self._configuration(batch)
        self.times.add(configuration, seconds)
        if self.times.count(configuration) >= self._judged_after(batch):
            self._timed.add(batch)

    def steps_missing(self) -> int:
        """Return how many steps of the present batch have still to be timed before the next decision."""
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
        fitting = self._fitting()
        if self._settled not in fitting:
            self._settled = max((size for size in fitting if size in self._timed), default=fitting[-1])
        self._now, self._patience = self._settled, _PATIENCE[0]
        if noise is not None and noise.is_known and self._timed:
            timed = [size for size in fitting if size in self._timed]
            choice = better(self._settled, timed, self.base_batch, noise, self._seconds)
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
        self._speed.timed(self._now, self._median(self._now))
        self._complete_last(noise)
        self.model = fit(self.times, self.model)
        if noise is None or not noise.is_known:
            return self._decided(step, noise, "the noise scale is not known yet", _PATIENCE[0])
        self._forget_old_failures(step)
        if step >= self._asked_again:
            self._largest = self._asked_again = math.inf
        choice = better(settled, self._reachable(), self.base_batch, noise, self._seconds)
        self._now = settled if choice is None else choice.batch
        if self._now in self._timed:
            self._settled = self._now
        if before > max(self._now, settled):
            count, _ = self._failures.get(before, (0, 0))
            self._failures[before] = (count + 1, step)
        self._patience = _PATIENCE[0] if self._now != before else min(2 * self._patience, _PATIENCE[1])
        return self._decided(step, noise, self._why(before, settled, choice), self._patience)

    def _forget_old_failures(self, step: int) -> None:
        """Let a batch that was tried in vain be tried again later: the machine may have been busy just then."""
        for batch, (count, since) in list(self._failures.items()):
            if batch in self._timed and step - since >= _RETRY * 2**count:
                self._timed.discard(batch)
                self.times.forget(self._configuration(batch))
                self._failures[batch] = (count, math.inf)  # else its new times would be forgotten, too

    def _judged_after(self, batch: int) -> int:
        """Return the steps by which a batch is judged: a gain as small as the margin must not stay by a lucky dozen."""
        count, since = self._failures.get(batch, (0, 0))
        return TIMED * (1 + count) if math.isinf(since) else TIMED

    def _reachable(self) -> list[int]:
        return [size for size in self._fitting() if size <= _GROWTH * max(self._timed)]

    def _fitting(self) -> list[int]:
        return [size for size in self.sizes if size < self._largest] or self.sizes[:1]

    def _configuration(self, batch: int) -> Configuration:
        local = batch // self._shares
        return Configuration(self.nodes, self.replicas, local, self.micro_batches - 1)

    def _seconds(self, batch: int) -> float:
        """Return the time of a step: measured; of a batch that was never timed, predicted.

        While only one batch has been timed nothing says what a larger one takes. It is then hoped to take as long: a
        try shows.
        """
        if batch in self._timed:
            return self._median(batch) * self._speed.since(batch)
        nearest = min(self._timed, key=lambda known: abs(known - batch))
        known_s = self._median(nearest) * self._speed.since(nearest)
        if len(self._timed) == 1:
            return known_s if batch > nearest else known_s * batch / nearest
        assert self.model is not None
        return known_s * self._predicted_s(batch) / self._predicted_s(nearest)

    def _median(self, batch: int) -> float:
        return self.times.median(self._configuration(batch))

    def _predicted_s(self, batch: int) -> float:
        assert self.model is not None
        local = batch / self._shares
        return float(self.model.step_s(self.nodes, self.replicas, local, self.micro_batches - 1))

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
        return (
            f"{choice.ratio:.2f}x the goodput of {settled}: {choice.speed:.2f}x the samples per second, each worth "
            f"{choice.worth:.2f} at {noise}"
        )

    def _decided(self, step: int, noise: NoiseInterval | None, why: str, steps: int) -> BatchDecision:
        """Return the decision, and keep it if it changes the batch."""
        goodput = self._goodput(self._now, noise) if self._timed else 0.0
        is_timed = self._now in self._timed
        decision = BatchDecision(
            step=step,
            batch=self._now,
            tried=not is_timed,
            why=why,
            goodput=goodput,
            measured=goodput if is_timed else 0.0,
            noise=None if noise is None else noise.phi,
            steps=steps,
        )
        if not self.decisions or self.decisions[-1].batch != decision.batch:
            self.decisions.append(decision)
        return decision

    def _complete_last(self, noise: NoiseInterval | None) -> None:
        """Add what the steps since the last decision have shown to it."""
        if self.decisions:
            last = self.decisions[-1]
            scale = last.noise if noise is None else noise.phi
            measured = self._goodput(self._now, noise)
            self.decisions[-1] = replace(last, tried=False, measured=measured, noise=scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learnt and decided, as values that JSON can hold."""
        return {
            "times": self.times.state_dict(),
            "base": self.base_batch,
            "batch": self._settled,
            "largest_local": None if math.isinf(self._largest) else self._largest / self._shares,
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also on another number of ranks: the batch is then the nearest that they can share.

        The user's batch is that of this controller: make it with that of the state.
        """
        self.times.load_state_dict(state["times"])
        self.decisions = [BatchDecision(**each) for each in state["decisions"]]
        largest = state.get("largest_local")
        self._largest = math.inf if largest is None else largest * self._shares
        self._asked_again = math.inf if largest is None else _ASKED_AGAIN  # steps are this process's
        self._timed = {size for size in self.sizes if self.times.count(self._configuration(size)) >= TIMED}
        self._settled = self._now = min(self._fitting(), key=lambda size: abs(size - state["batch"]))
        if len(self._timed) > 1:
            self.model = fit(self.times)  # of a batch that was not timed on so many ranks, the time is predicted
