"""The batch controller on simulated jobs: it finds a good batch, stays there, and never leaves the bounds."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.elastic.batch_size.choice import MARGIN, better, candidates
from accel.elastic.batch_size.policy import BatchDecision, BatchPolicy
from accel.goodput.efficiency import NoiseInterval, efficiency
from tests.sampling import examples

PURE_NOISE = NoiseInterval(math.inf, 0.0, math.inf)


class Job:
    """A job with steps of `fixed + sample · batch` seconds, give or take a spread, and a gradient noise scale."""

    def __init__(self, fixed: float, sample: float, noise: NoiseInterval | None, seed: int = 0, spread: float = 0.05):
        self.fixed, self.sample, self.noise, self.spread = fixed, sample, noise, spread
        self.random = random.Random(seed)
        self.due = self.step = 0
        self.batches: list[int] = []

    def seconds(self, batch: int) -> float:
        return self.fixed + self.sample * batch

    def run(self, controller: BatchPolicy, steps: int) -> list[BatchDecision]:
        decisions = []
        for _ in range(steps):
            self.step += 1
            controller.timed(
                controller.batch, self.seconds(controller.batch) * self.random.lognormvariate(0, self.spread)
            )
            if self.step >= self.due:
                decisions.append(controller.decide(self.step, self.noise))
                self.due = self.step + decisions[-1].steps
            self.batches.append(controller.batch)
        return decisions

    def goodput(self, batch: int, base: int) -> float:
        assert self.noise is not None
        return batch / self.seconds(batch) * efficiency(batch, base, self.noise.phi)


def interval(phi: float, width: float = 1.3) -> NoiseInterval:
    return NoiseInterval(phi, phi / width, phi * width)


jobs = st.builds(
    Job,
    fixed=st.floats(1e-4, 0.1),
    sample=st.floats(1e-6, 1e-3),
    noise=st.builds(interval, st.floats(1.0, 1e6)),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=examples(40))  # each is some ten fits
@given(
    job=jobs,
    base=st.integers(1, 300),
    growth=st.floats(1.0, 300.0),
    replicas=st.integers(1, 8),
    micro_batches=st.integers(1, 4),
)
def test_it_stays_within_bounds_and_gets_near_the_best(
    job: Job, base: int, growth: float, replicas: int, micro_batches: int
) -> None:
    multiple = replicas * micro_batches
    base *= multiple
    most = int(base * growth)
    controller = BatchPolicy(base, most, replicas=replicas, micro_batches=micro_batches)
    job.run(controller, 600)

    assert all(base <= batch <= most and batch % multiple == 0 for batch in job.batches)
    best = max(job.goodput(size, base) for size in controller.batches.sizes)
    # A larger batch must be better by the margin at the lower end of the noise scale: at most its width is left.
    assert job.goodput(controller.batch, base) > best / (MARGIN * 1.3 * 1.1)


@settings(max_examples=examples(40))  # each is some ten fits
@given(job=jobs)
@example(job=Job(0.0004, 0.0004, interval(10999.0), seed=4651))  # a gain near the margin: a lucky dozen let it stay
def test_it_does_not_oscillate_on_constant_noise(job: Job) -> None:
    controller = BatchPolicy(32, 4096)
    job.run(controller, 600)
    before = len(job.batches)
    job.run(controller, 2000)

    later = job.batches[before:]
    entered = [batch for batch, _ in itertools.groupby(later)][1:]
    # What was tried in vain is tried again, ever less often; a better batch that was missed may be found late.
    home = max(set(later), key=later.count)
    tries = Counter(batch for batch in entered if batch != home)
    assert all(number <= 3 for number in tries.values())
    assert len(entered) <= 10


@settings(max_examples=examples(40))  # each is some ten fits
@given(job=jobs)
def test_pure_noise_and_unknown_noise_keep_the_batch(job: Job) -> None:
    for noise in (PURE_NOISE, None):
        job.noise = noise
        controller = BatchPolicy(32, 4096)
        job.run(controller, 300)
        assert set(job.batches) == {32}


def test_an_unknown_noise_scale_is_asked_for_ever_more_seldom_and_soon_enough_all_the_same() -> None:
    job = Job(0.01, 1e-5, None)
    controller = BatchPolicy(32, 1024)
    early, late = job.run(controller, 200), job.run(controller, 3800)
    assert len(early) <= 200 / 16 + 3 and len(late) <= 30
    unknown = job.step
    job.noise = interval(1e4)
    while controller.batch == 32:
        job.run(controller, 1)
    assert job.step - unknown <= 256


def test_a_growing_noise_scale_lets_the_batch_grow_and_a_falling_one_shrink() -> None:
    job = Job(0.01, 1e-4, interval(300.0))
    controller = BatchPolicy(32, 4096)
    batches = []
    for phi in (300.0, 3e4, 300.0):
        job.noise = interval(phi)
        job.run(controller, 1500)
        batches.append(controller.batch)

    assert batches[0] < batches[1] > batches[2]


@pytest.mark.parametrize("noise", [300.0, 3000.0])
def test_a_batch_that_is_tried_again_in_vain_is_undone_again(noise: float) -> None:
    """Its new times count: it was once forgotten at each decision, and then kept on hope."""
    job = Job(1e-4, 1e-3, interval(noise))  # twice the samples take twice the time
    controller = BatchPolicy(32, 4096)
    job.run(controller, 5000)

    runs = itertools.groupby(job.batches, lambda batch: batch > 32)
    tries = [len(list(steps)) for is_larger, steps in runs if is_larger]
    assert 2 <= len(tries) <= 6
    assert all(steps <= 16 + 12 * before for before, steps in enumerate(tries))  # more steps each time, ever less often
    assert sum(tries) <= 0.03 * len(job.batches)
    assert controller.batch == 32


def test_a_try_that_takes_longer_than_hoped_is_undone_and_said_so() -> None:
    job = Job(1e-4, 1e-3, interval(3000.0))  # twice the samples take twice the time
    controller = BatchPolicy(32, 4096)
    decisions = job.run(controller, 120)

    assert [d.batch for d in controller.decisions] == [32, 64, 32]
    assert not any(d.tried for d in controller.decisions)  # all have been timed by now
    assert controller.decisions[1].goodput > 1.5 * controller.decisions[1].measured > 0
    assert "2.00x the samples per second" in controller.decisions[1].why
    assert controller.decisions[2].why == "a step of 64 samples takes too long for what it is worth"
    assert decisions[-1].why == "no other batch is clearly better"
    assert controller.is_settled


def test_a_try_that_met_a_busy_moment_is_made_again_later() -> None:
    job = Job(0.01, 1e-5, interval(3e4))
    controller = BatchPolicy(32, 64)
    job.run(controller, 16)
    assert controller.batch == 64
    job.fixed = 0.1  # another process has the machine
    job.run(controller, 16)
    job.fixed = 0.01
    assert controller.batch == 32
    job.run(controller, 120)  # it was 512, while all that was known were a dozen cold steps

    assert controller.batch == 64


def test_what_was_tried_in_vain_is_no_sooner_tried_again_by_the_next_process() -> None:
    job = Job(1e-4, 1e-3, interval(3000.0))  # twice the samples take twice the time
    controller = BatchPolicy(32, 4096)
    job.run(controller, 60)
    resumed, again = BatchPolicy(32, 4096), Job(1e-4, 1e-3, interval(3000.0))
    resumed.steps_before = 60
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    again.run(resumed, 20)
    assert set(again.batches) == {32}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("slower", [0.4, 3.0])
def test_what_was_timed_on_a_machine_of_another_speed_is_tried_anew(slower: float, resumes: bool) -> None:
    """A batch of old times once looked better, or worse, than it was: another process had come since, or gone."""
    job = Job(0.01, 1e-4, interval(3000.0))
    controller = BatchPolicy(32, 1024)
    job.run(controller, 1200)
    best = max(job.goodput(size, 32) for size in controller.batches.sizes)
    if resumes:
        state, controller = json.loads(json.dumps(controller.state_dict())), BatchPolicy(32, 1024)
        controller.load_state_dict(state)
        job.due = job.step = 0
    before, job.batches = job.goodput(controller.batch, 32), []
    job.fixed, job.sample = job.fixed * slower, job.sample * slower
    job.run(controller, 600)
    reached = [job.goodput(batch, 32) * slower for batch in job.batches]
    assert reached[-1] > best / (MARGIN * 1.3 * 1.1)
    assert sum(each < 0.99 * before for each in reached) < 110  # a dozen steps for each batch that was timed before


def test_what_does_not_fit_into_memory_is_not_taken_again() -> None:
    job = Job(0.01, 1e-6, interval(1e6))
    controller = BatchPolicy(32, 4096)
    while controller.batch < 512:
        job.run(controller, 1)
    before = controller.decisions[-2].batch
    decision = controller.refuse(512, job.step, job.noise, "512 samples are too many")
    assert (decision.batch, controller.batch) == (before, before)
    assert controller.decisions[-1] is decision
    job.run(controller, 1000)

    assert max(job.batches[-1000:]) < 512


def test_a_state_goes_on_with_its_batch_and_on_another_number_of_ranks_with_the_nearest() -> None:
    job = Job(0.01, 1e-4, interval(3000.0))
    controller = BatchPolicy(32, 4096, replicas=2)
    job.run(controller, 600)
    state = json.loads(json.dumps(controller.state_dict()))

    same, other = BatchPolicy(32, 4096, replicas=2), BatchPolicy(33, 4096, replicas=3)
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert same.batch == controller.batch
    assert same.state_dict() == controller.state_dict()
    assert other.batch % 3 == 0
    assert abs(math.log2(other.batch / controller.batch)) < 0.3
    assert same.steps_missing() == 0 < other.steps_missing()


def test_decisions_are_told_by_all_steps_of_the_training() -> None:
    job = Job(0.01, 1e-4, interval(3000.0))
    controller = BatchPolicy(32, 1024)
    controller.steps_before = 5000
    job.run(controller, 100)
    steps = [decision.step for decision in controller.decisions]
    assert steps == sorted(steps) and 5000 < steps[0] <= steps[-1] <= 5100


@pytest.mark.parametrize("limit", [None, 512])
def test_a_state_keeps_what_memory_has_shown_and_the_user_s_batch(limit: int | None) -> None:
    controller = BatchPolicy(48, 4096, replicas=2)
    if limit is not None:
        controller.refuse(limit, 0, None, "too many")
    state = json.loads(json.dumps(controller.state_dict()))
    assert state["base"] == 48
    other = BatchPolicy(state["base"], 4096, replicas=5)  # of which 48 is no multiple
    other.load_state_dict(state)
    job = Job(0.01, 1e-6, interval(1e6))
    job.run(other, 1000)
    assert job.batches[0] == 50
    assert all(batch % 5 == 0 for batch in job.batches)
    # Memory is each rank's own: five of them have that of two, two and a half times.
    assert 1000 < max(job.batches) < 1280 if limit else max(job.batches) > 2000


def test_what_did_not_fit_is_tried_again_ever_less_often() -> None:
    """Others may have used the memory; where it never fits, asking costs a step each time."""
    job = Job(0.01, 1e-6, interval(1e6))
    controller = BatchPolicy(32, 4096)
    asked: list[int] = []
    for _ in range(20_000):
        job.run(controller, 1)
        if controller.batch >= 512:
            asked.append(job.step)
            job.due = job.step + controller.refuse(controller.batch, job.step, job.noise, "too many").steps
    rounds = [step for earlier, step in itertools.pairwise([-1000, *asked]) if step - earlier > 500]
    apart = [later - earlier for earlier, later in itertools.pairwise(rounds)]
    assert len(asked) <= 2 * len(rounds) <= 12  # a round begins with up to twice what fits
    assert all(2 * earlier <= later + 600 for earlier, later in itertools.pairwise(apart))
    assert controller.batches.fits is not None and controller.batches.fits < 512

    for _ in range(300_000 // 256):  # there is memory now
        job.run(controller, 256)
        if controller.batch > 512:
            break
    assert controller.batch > 512


def test_the_batch_goes_back_to_one_that_fits_also_from_a_settled_one() -> None:
    """As on fewer ranks than the state was saved on."""
    job = Job(0.01, 1e-6, interval(1e6))
    controller = BatchPolicy(32, 4096)
    job.run(controller, 600)
    assert controller.batch == 4096
    assert controller.refuse(300, job.step, job.noise, "too many").batch == 256
    job.run(controller, 300)
    assert max(job.batches[-300:]) == 256


@given(base=st.integers(1, 1000), growth=st.floats(1, 1e4), multiple=st.integers(1, 16))
@example(base=8, growth=91 / 32, multiple=4)  # 90.5 was rounded to 92
def test_candidates_span_the_range(base: int, growth: float, multiple: int) -> None:
    base *= multiple
    most = int(base * growth)
    sizes = candidates(base, most, multiple)

    assert sizes[0] == base
    first, *_ = candidates(base + 1, 2 * most + multiple, multiple)
    assert base < first <= base + multiple
    assert base <= sizes[-1] <= most
    assert most - sizes[-1] < multiple
    assert all(size % multiple == 0 for size in sizes)
    assert sizes == sorted(set(sizes))


@given(phi=st.floats(0, 1e6), low=st.floats(0, 1), high=st.floats(1, 10), now=st.sampled_from([32, 128, 512]))
def test_a_change_is_for_the_better_at_each_noise_scale_of_the_interval(
    phi: float, low: float, high: float, now: int
) -> None:
    noise = NoiseInterval(phi, low * phi, high * phi)

    def seconds(batch: int) -> float:
        return 0.01 + 1e-4 * batch

    choice = better(now, candidates(32, 2048), 32, noise, seconds)
    for scale in () if choice is None else (noise.low, noise.phi, noise.high):
        ratio = choice.batch / seconds(choice.batch) * efficiency(choice.batch, 32, scale)
        ratio /= now / seconds(now) * efficiency(now, 32, scale)
        assert ratio > MARGIN * 0.999


def test_a_state_goes_on_where_the_batch_was_not_timed() -> None:
    """With another cap, or on other ranks, the nearest batch is one that only the model knows."""
    noise, controller, step = NoiseInterval(1e6, 9e5, 1.1e6), BatchPolicy(32, 500), 0
    for _ in range(20):
        for _ in range(12):
            controller.timed(controller.batch, 0.01)
            step += 1
        controller.decide(step, noise)
    assert controller.batch == 500
    other = BatchPolicy(32, 1000)
    other.load_state_dict(controller.state_dict())
    decision = other.decide(4, noise)
    assert decision.tried and decision.goodput > 0
    again = BatchPolicy(32, 1000)
    again.load_state_dict(controller.state_dict())
    assert again.refuse(1000, 4, noise, "too much").batch < 1000
