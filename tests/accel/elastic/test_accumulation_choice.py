"""The batch controller where a larger share does not fit, or is slow: accumulated batches compete with the others."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from accel.elastic.batch_size.choice import MARGIN
from accel.elastic.batch_size.policy import BatchDecision, BatchPolicy
from accel.goodput.efficiency import efficiency
from tests.accel.elastic.test_policy import Job, interval
from tests.sampling import examples


class Exchanging(Job):
    """Ranks that exchange gradients for `sync_s` once a step, each with memory for so many samples at once."""

    sync_s, memory = 0.0, math.inf

    def step_s(self, local: int, steps: int) -> float:
        return steps * (self.fixed + self.sample * local) + self.sync_s

    def train(self, controller: BatchPolicy, steps: int) -> list[BatchDecision]:
        """Run, and refuse what does not fit before it is taken, as a rehearsal does."""
        decisions = []
        for _ in range(steps):
            self.step += 1
            local, pieces = controller.batches.shares(controller.batch)
            noise = self.random.lognormvariate(0, self.spread)
            controller.timed(controller.batch, self.step_s(local, pieces) * noise, pieces)
            if self.step >= self.due:
                decision = controller.decide(self.step, self.noise)
                if controller.batches.shares(decision.batch).local > self.memory:
                    decision = controller.refuse(decision.batch, self.step, self.noise, "too large")
                decisions.append(decision)
                self.due = self.step + decision.steps
            self.batches.append(controller.batch)
        return decisions

    def goodput_of(self, local: int, steps: int, replicas: int, base: int) -> float:
        batch = local * steps * replicas
        assert self.noise is not None
        return batch / self.step_s(local, steps) * efficiency(batch, base, self.noise.phi)


def exchanging(memory: float = math.inf, sync_s: float = 0.2, noise: float = 1e5) -> Exchanging:
    job = Exchanging(0.002, 1e-4, interval(noise), seed=3, spread=0.02)
    job.memory, job.sync_s = memory, sync_s
    return job


def controller_of(replicas: int = 4, most: int = 8192, accumulates: bool = True) -> BatchPolicy:
    controller = BatchPolicy(32 * replicas, most, replicas=replicas)
    controller.batches.accumulates = accumulates
    return controller


def test_what_does_not_fit_at_once_is_accumulated_where_the_exchange_takes_long() -> None:
    job, controller = exchanging(memory=100), controller_of()
    decisions = job.train(controller, 1500)

    local, steps = controller.batches.shares(controller.batch)
    assert steps > 1 and local <= 100
    at_once = max(job.goodput_of(size // 4, 1, 4, 128) for size in controller.batches.sizes if size // 4 <= 100)
    assert job.goodput_of(local, steps, 4, 128) > 1.5 * at_once
    best = max(job.goodput_of(local, k, 4, 128) for k in range(1, 8192 // (4 * local) + 1))
    assert job.goodput_of(local, steps, 4, 128) > best / (MARGIN * 1.3 * 1.1)
    last = next(each for each in reversed(controller.decisions) if each.accumulated == steps)
    assert f"accumulated over {steps} steps of {local} samples a rank" in last.why
    assert max(each.batch for each in decisions) <= 8192


def test_without_accumulation_the_batch_stays_below_what_does_not_fit() -> None:
    job, controller = exchanging(memory=100), controller_of(accumulates=False)
    job.train(controller, 1500)
    assert set(map(controller.batches.shares, job.batches)) == {(size // 4, 1) for size in set(job.batches)}
    assert controller.batch // 4 <= 100


def test_one_rank_accumulates_nothing_since_that_is_no_faster() -> None:
    job = exchanging(memory=100, sync_s=0.0)
    controller = controller_of(replicas=1, most=4096)
    job.train(controller, 1500)
    assert {controller.batches.shares(size).steps for size in set(job.batches)} == {1}


def test_a_cheap_exchange_is_worth_no_accumulation() -> None:
    job, controller = exchanging(memory=100, sync_s=1e-4, noise=2000.0), controller_of()
    job.train(controller, 1500)
    assert controller.batches.shares(controller.batch).steps == 1


def test_a_loop_that_turns_out_to_be_none_to_accumulate_goes_back() -> None:
    job, controller = exchanging(memory=100), controller_of()
    job.train(controller, 1500)
    assert controller.batches.shares(controller.batch).steps > 1
    controller.batches.accumulates = False
    decision = controller.fall_back(job.step, job.noise, "it takes a closure")
    assert decision.accumulated == 1 and decision.batch // 4 <= 100 and decision.why == "it takes a closure"
    job.train(controller, 600)
    assert controller.batches.shares(controller.batch).steps == 1
    assert controller.batch // 4 <= 100


def test_a_time_of_another_dealing_is_left_out() -> None:
    controller = controller_of()
    for _ in range(50):
        controller.timed(128, 0.1, 2)
    assert controller.steps_missing() == 12


def test_it_goes_on_from_its_state() -> None:
    job, controller = exchanging(memory=100), controller_of()
    job.train(controller, 1500)
    state = json.loads(json.dumps(controller.state_dict()))
    again = controller_of()
    again.load_state_dict(state)
    assert again.batch == controller.batch
    assert again.batches.shares(again.batch) == controller.batches.shares(controller.batch)
    assert not again.steps_missing()
    assert [each.accumulated for each in again.decisions] == [each.accumulated for each in controller.decisions]


def test_steps_that_take_another_time_from_now_on_are_timed_anew() -> None:
    """As where gradients are compressed, and no longer."""
    job, controller = exchanging(sync_s=0.4), controller_of(most=4096)
    for sync_s in (0.4, 0.01, 0.4):
        job.sync_s = sync_s
        controller.time_anew()
        assert controller.steps_missing() == 12
        job.due = job.step + 13
        job.train(controller, 3000)
        best = max(job.goodput_of(size // 4, 1, 4, 128) for size in controller.batches.sizes)
        assert job.goodput_of(*controller.batches.shares(controller.batch), 4, 128) > best / (MARGIN * 1.3 * 1.1)


@settings(max_examples=examples(40))  # each is some ten fits
@given(
    fixed=st.floats(1e-4, 0.1),
    sample=st.floats(1e-6, 1e-3),
    sync_s=st.floats(0.0, 0.5),
    noise=st.floats(10.0, 1e6),
    memory=st.integers(32, 400),
    replicas=st.integers(1, 8),
    growth=st.floats(1.0, 100.0),
    seed=st.integers(0, 2**16),
)
def test_it_stays_within_bounds_and_memory_and_comes_to_rest(
    fixed: float,
    sample: float,
    sync_s: float,
    noise: float,
    memory: int,
    replicas: int,
    growth: float,
    seed: int,
) -> None:
    job = Exchanging(fixed, sample, interval(noise), seed=seed, spread=0.03)
    job.sync_s, job.memory = sync_s, memory
    base = 32 * replicas
    most = int(base * growth)
    controller = controller_of(replicas, most)
    job.train(controller, 800)

    for batch in set(job.batches):
        assert base <= batch <= most and batch % replicas == 0
        local, steps = controller.batches.shares(batch)
        assert local * steps * replicas == batch or batch > controller.batch
    before = len(job.batches)
    job.train(controller, 2000)
    changes = sum(a != b for a, b in zip(job.batches[before:], job.batches[before + 1 :], strict=False))
    assert changes <= 16  # tries in vain, ever less often; each is two changes
    assert controller.batches.shares(controller.batch).local <= memory
