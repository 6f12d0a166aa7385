"""What a run knows of its batch: what the user wrote, what fits into memory, what was measured and decided.

It is saved with the training, and a run that goes on from there may have another number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, cast

from accel.dataio.elastic_sampler import ElasticSampler, share_among
from accel.device_memory import total_memory
from accel.elastic.batch_size.choice import Shares
from accel.elastic.batch_size.policy import BatchPolicy
from accel.elastic.batch_size.run_noise import RunNoise
from accel.elastic.batch_size.steps import StepBatches, batches_of_a_step
from accel.elastic.learning_rate import StepRates
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.noise_gradients import Gather
from accel.run.context import Run

LEAST_STEPS = 4
"""Of an epoch: the first of them is not timed, and the last one may be smaller, so that two are left to judge by."""

_ALIKE = 0.95
"""Share of the memory that there was: what the system keeps to itself differs between devices of one kind."""


class BatchRecord:
    """The record of a run's batch.

    Attributes:
        policy: made once it is known how many batches a step has.
        leads: this rank decides.
        most_tried: the largest batch that is tried beside the user's: an epoch of it has some steps to judge it by.
        base: samples of a step as the user wrote it, over the ranks that the training began on; None until known.
        local_base: the same of one of this rank's batches.
        fits: the largest batch of this rank that fits into memory, as far as is known.
        memory: the device's bytes, of the rank that has the least once they have met; 0 if that is not known.
        most_replicas: the most ranks that the training has run on.
    """

    def __init__(self, run: Run, step: StepBatches, noise: RunNoise, rates: StepRates, max_batch_size: int) -> None:
        self._run, self.sampler = run, cast("ElasticSampler", run.loader.batch_sampler)
        self.step, self.noise, self.rates = step, noise, rates
        self.max_batch_size = self.most_tried = max_batch_size
        self.policy: BatchPolicy | None = None
        self.leads = False
        self.base: int | None = None
        self.local_base = self.fits = step.local
        self.memory, self.most_replicas = total_memory(run.device), self.sampler.num_replicas
        self._restored: dict[str, Any] = {}
        """The state of the run that was saved; empty if none was."""

    @property
    def shares(self) -> int:
        """The batches of a step of the loop, over all ranks."""
        return self.sampler.num_replicas * self.step.by_loop

    def begin(self, first: Sequence[tuple[int, bool]], gather: Gather | None) -> None:
        """Make the policy by the loop's first steps, see `batches_of_a_step`."""
        step, replicas, before = self.step, self.sampler.num_replicas, self._restored.get("micro_batches")
        step.by_loop = batches_of_a_step(first, before)
        if self.base is None or step.by_loop != before:
            self.base = self.local_base * self.shares
        self.check()  # with the batches of a step
        most = self.most_tried = min(self.max_batch_size, max(self.base, self.sampler.length // LEAST_STEPS))
        nodes = -(-replicas // int(os.environ.get("LOCAL_WORLD_SIZE", replicas)))
        policy = BatchPolicy(self.base, most, replicas=replicas, nodes=nodes, micro_batches=step.by_loop)
        self.policy = policy
        step.watch(self._run.model, self._run.optimizers)
        policy.batches.accumulates = not step.refusal
        self.noise.begin(replicas, gather, self._restored.get("noise"))
        policy.steps_before = step.ended_before
        if self._restored.get("controller") is not None:
            policy.load_state_dict(self._restored["controller"])

    def check(self) -> None:
        """Raise InvalidArgument if the largest batch allowed is below the user's, or leaves a rank without a sample."""
        sizes, shares = self.sampler.batch_sizes, self.shares
        if len(set(sizes)) > 1:
            raise InvalidArgument(
                f"max_batch_size needs batches of one size on all ranks, got {list(sizes)} samples; give each rank as "
                "many, or leave it out to keep the batch"
            )
        least = sum(sizes) if self.base is None else -(-self.base // shares) * shares
        if self.max_batch_size < least:
            raise InvalidArgument(
                f"max_batch_size must be at least the loader's batch over all ranks, {least} samples, got "
                f"{self.max_batch_size}; raise it, or leave it out to keep the batch"
            )

    def state_dict(self) -> dict[str, Any]:
        step, policy, meter, known = self.step, self.policy, self.noise.meter, self.noise.known
        return {
            "controller": self._restored.get("controller") if policy is None else policy.state_dict(),
            "noise": self._restored.get("noise") if meter is None else meter.noise.state_dict(),
            "known_noise": None if known is None else list(astuple(known)),
            "progress": self.rates.progress,
            "most_replicas": self.most_replicas,
            "loader_batch": self.local_base,
            "micro_batches": step.by_loop,
            "fits": self.fits,
            "memory": self.memory,
            "steps": step.ended_before + step.ended,
            "accumulated": step.steps_of(step.local),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also on another number of ranks: rates and gain refer to the batch it began with.

        With another batch of the loader's it is another batch of the user's, which rates and gain refer to from now on.
        """
        step, self._restored = self.step, dict(state)
        self.rates.progress_before = float(state["progress"])
        self.most_replicas = max(self.sampler.num_replicas, int(state.get("most_replicas", 1)))
        known, controller = state.get("known_noise"), state.get("controller") or {}
        self.noise.known = None if known is None else NoiseInterval(*known)
        self.base = controller.get("base") if state.get("loader_batch") == self.local_base else None
        step.by_loop = int(state.get("micro_batches", 1))
        step.ended_before = int(state.get("steps", 0))
        local = self.local_base
        if self.base is not None:
            local, steps = self._resumed(state, self.base)
            self.fits = max(self.fits, local)
            if state.get("accumulated", 1) > 1 and steps > 1:
                step.decide(local, steps)
        self.sampler.set_batch_size(local)

    def deal_plainly(self) -> None:
        """Deal the user's own batch at once; a change that was to come some batches later would outlive this one."""
        share_among(self.sampler, self.sampler.num_replicas, self.sampler.rank, self.local_base)

    def _resumed(self, state: Mapping[str, Any], base: int) -> Shares:
        """Return how the first steps are dealt; more may be taken at once when that has been rehearsed."""
        batch, is_alike = int(state["controller"]["batch"]), self.memory >= _ALIKE * state.get("memory", 0)
        shares, most = self.shares, self.max_batch_size
        # On fewer ranks the user's batch is more for each.
        known = max(int(state.get("fits", 1)) if is_alike else 1, -(-base // shares))
        local = max(1, min(round(batch / shares), most // shares, known))
        # Gradients that are kept take memory, too.
        return Shares(local, max(1, min(batch, most) // (shares * local)) if is_alike else 1)
