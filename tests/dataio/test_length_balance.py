"""Every sample once, as many batches on every rank, of equal cost, and the same again for the same seed and epoch."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel.dataio.length_balance import LengthBalancedBatchSampler, attention_cost, balance_of
from accel.dataio.packing import PackCollate

LENGTHS = st.lists(st.integers(0, 60), max_size=70)
LIMITS = st.one_of(
    st.builds(lambda n: {"max_tokens": n}, st.integers(60, 200)),
    st.builds(lambda n: {"batch_size": n}, st.integers(1, 9)),
)
BOTH = pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
EACH = pytest.mark.parametrize("limit", [{"max_tokens": 4096}, {"batch_size": 16}], ids=["tokens", "samples"])


@functools.cache
def made(mu: float, sigma: float, number: int, longest: int) -> tuple[int, ...]:
    drawn = np.random.default_rng(0).lognormal(mu, sigma, number)
    return tuple(np.clip(np.rint(drawn), 1, longest).astype(int).tolist())


# Log-normal with the number, mean, 99th percentile and longest of Shakespeare's speeches (31, 224, 752 tokens) and of
# the standard library's functions (102, 723, 3,232); benchmarks/length_balance.py measures the real ones.
SETS = {"speeches": ((2.807, 1.12, 37_776, 752), 2048), "functions": ((4.016, 1.104, 17_617, 3232), 1024)}


def all_ranks(lengths: Any, ranks: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    found = []
    for rank in range(ranks):
        sampler = LengthBalancedBatchSampler(lengths, num_replicas=ranks, rank=rank, **options)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


def check_limits(batches: list[list[list[int]]], lengths: list[int], padded: bool, limit: dict[str, int]) -> None:
    for batch in (batch for rank in batches for batch in rank):
        assert batch
        longest, total = max(lengths[i] for i in batch), sum(lengths[i] for i in batch)
        assert len(batch) <= limit.get("batch_size", len(batch))
        assert (len(batch) * longest if padded else total) <= limit.get("max_tokens", 10**9)


@given(
    LENGTHS,
    LIMITS,
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.floats(0, 0.9),
    st.integers(0, 3),
)
def test_exactly_once_and_as_many_batches_on_every_rank(
    lengths: list[int],
    limit: dict[str, int],
    ranks: int,
    padded: bool,
    shuffle: bool,
    drop_last: bool,
    jitter: float,
    epoch: int,
) -> None:
    options = {"padded": padded, "shuffle": shuffle, "drop_last": drop_last, "jitter": jitter, **limit}
    batches = all_ranks(lengths, ranks, epoch, **options)
    assert len({len(rank) for rank in batches}) == 1
    check_limits(batches, lengths, padded, limit)
    seen = Counter(i for rank in batches for batch in rank for i in batch)
    if drop_last:
        assert all(count == 1 for count in seen.values())
        if "batch_size" in limit:
            assert len(lengths) - len(seen) < ranks * limit["batch_size"]
            assert {len(batch) for rank in batches for batch in rank} <= {limit["batch_size"]}
    else:
        assert set(seen) == set(range(len(lengths)))
        repeated = seen.total() - len(lengths)
        if repeated:  # only as many as it takes to give each rank of the last step one
            assert all(len(batch) == 1 for rank in batches for batch in rank)
            assert repeated < ranks
        if "batch_size" in limit and lengths:
            sizes = [len(batch) for rank in batches for batch in rank]
            assert max(sizes) - min(sizes) <= 1


@given(LENGTHS, LIMITS, st.booleans(), st.data())
def test_resume_at_every_position(lengths: list[int], limit: dict[str, int], padded: bool, data: Any) -> None:
    def make() -> LengthBalancedBatchSampler:
        return LengthBalancedBatchSampler(lengths, num_replicas=2, rank=1, padded=padded, seed=5, **limit)

    first = make()
    first.set_epoch(3)
    whole = list(first)
    for taken in range(len(whole) + 1):
        running = make()
        running.set_epoch(3)
        batches = iter(running)
        assert [next(batches) for _ in range(taken)] == whole[:taken]
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
        resumed.set_epoch(3)  # a loop sets it again, to no effect
        assert list(resumed) == whole[taken:]
        assert list(resumed) == whole  # the next time round it is a whole epoch


@BOTH
@EACH
def test_same_seed_and_epoch_same_batches_and_others_differ(padded: bool, limit: dict[str, int]) -> None:
    lengths = made(4.0, 1.0, 1000, 4000)
    kept = all_ranks(lengths, 2, 1, padded=padded, seed=7, **limit)
    assert kept == all_ranks(lengths, 2, 1, padded=padded, seed=7, **limit)
    assert kept != all_ranks(lengths, 2, 2, padded=padded, seed=7, **limit)
    assert kept != all_ranks(lengths, 2, 1, padded=padded, seed=8, **limit)


@BOTH
@EACH
def test_length_is_that_of_every_epoch(padded: bool, limit: dict[str, int]) -> None:
    lengths = made(4.0, 1.0, 3000, 4000)
    sampler = LengthBalancedBatchSampler(lengths, num_replicas=4, rank=0, padded=padded, **limit)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        assert len(sampler.plan().sizes) == 4 * len(sampler)


@BOTH
@EACH
def test_company_changes_where_no_two_lengths_are_equal(padded: bool, limit: dict[str, int]) -> None:
    """Neither sorted batches nor the same ones each epoch: a sample meets others, at another time."""
    lengths = np.random.default_rng(1).permutation(np.arange(1, 4001))
    limit = {"max_tokens": 16384} if "max_tokens" in limit else limit
    sampler = LengthBalancedBatchSampler(lengths, num_replicas=4, rank=0, padded=padded, **limit)
    company, firsts = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        packs = sampler.plan()
        groups = np.split(packs.order, packs.sizes.cumsum()[:-1])
        pairs = ((int(a), int(b)) for group in groups for a in group for b in group if a < b)
        company.append(set(pairs))
        firsts.append([lengths[group].max() for group in groups[::4]])
    assert len(company[0] & company[1]) < 0.75 * len(company[0])
    assert abs(np.corrcoef(np.arange(len(firsts[0])), firsts[0])[0, 1]) < 0.3


# Efficiency


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "attention"])
@pytest.mark.parametrize(
    ("padded", "limit", "least"),
    [
        (False, {"max_tokens": 4096}, 0.98),
        (False, {"batch_size": 16}, 0.98),
        (True, {"max_tokens": 4096}, 0.90),
    ],
    ids=["tokens", "samples", "padded"],
)
def test_eight_ranks_are_used(name: str, quadratic: bool, padded: bool, limit: dict[str, int], least: float) -> None:
    lengths, crossover = SETS[name]
    cost = attention_cost(crossover) if quadratic else None
    sampler = LengthBalancedBatchSampler(
        made(*lengths),
        num_replicas=8,
        rank=0,
        padded=padded,
        cost=cost,
        **limit,  # type: ignore[arg-type]
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found = sampler.balance()
        assert found.efficiency >= least
        assert found.efficiency <= min(found.evenness, found.filling) <= 1 + 1e-12
        assert found.efficiency == pytest.approx(found.evenness * found.filling)


def test_random_batches_are_far_worse() -> None:
    """The oracle: the same measure on batches that nobody balanced, which the published figures put at 51 %."""
    lengths = np.array(made(*SETS["functions"][0]))
    costs = attention_cost(1024)(lengths.astype(float))
    order = np.random.default_rng(0).permutation(len(lengths))[: len(lengths) // 128 * 128]
    packs = costs[order].reshape(-1, 8, 16).sum(axis=2)
    assert 0.4 < balance_of(packs, costs[order].sum()).efficiency < 0.65


@BOTH
@EACH
def test_planning_takes_at_most_a_second_for_100_000(padded: bool, limit: dict[str, int]) -> None:
    lengths = made(4.016, 1.104, 100_000, 3232)
    sampler = LengthBalancedBatchSampler(lengths, num_replicas=8, rank=0, padded=padded, **limit)
    times = []
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        began = time.thread_time()
        sampler.plan()
        times.append(time.thread_time() - began)
    assert min(times) < 1


@BOTH
@EACH
@pytest.mark.parametrize(
    "lengths",
    [[], [5], [5, 5, 5], [7] * 100, [0] * 20, [0, 9], [4000, *[1] * 50], [1] * 9],
    ids=["none", "one", "fewer than ranks", "equal", "zero", "zero and one", "one huge", "one more than a step"],
)
def test_odd_lengths(lengths: list[int], padded: bool, limit: dict[str, int]) -> None:
    batches = all_ranks(lengths, 8, padded=padded, **limit)
    seen = Counter(i for rank in batches for batch in rank for i in batch)
    assert set(seen) == set(range(len(lengths)))
    assert seen.total() == (max(len(lengths), 8) if lengths else 0)
    sampler = LengthBalancedBatchSampler(lengths, num_replicas=8, rank=0, padded=padded, **limit)
    assert 0 < sampler.balance().efficiency <= 1 + 1e-12


# In a loop


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader_the_step_is_given_to_the_state(workers: int) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    samples: Any = [[i] * n for i, n in enumerate(lengths)]
    sampler = LengthBalancedBatchSampler(lengths, max_tokens=12)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PackCollate(), num_workers=workers)
    assert len(loader) == len(sampler)
    rows = [row.tokens.tolist() for row in loader]
    assert sorted(token for row in rows for token in row) == sorted(token for sample in samples for token in sample)
    batches = iter(loader)
    next(batches)
    state = sampler.state_dict(step=1)  # workers have drawn more
    del batches
    sampler.load_state_dict(state)
    assert [row.tokens.tolist() for row in loader] == rows[1:]


def test_another_epoch_begins_at_its_beginning() -> None:
    sampler = LengthBalancedBatchSampler([1] * 10, batch_size=2)
    batches = iter(sampler)
    next(batches)
    sampler.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5


def test_state_of_another_run_is_refused() -> None:
    state = LengthBalancedBatchSampler([1, 2, 3], batch_size=1).state_dict()
    with pytest.raises(ValueError, match=r"same lengths, costs, ranks and settings, got plan .*set_epoch\(1\)"):
        LengthBalancedBatchSampler([1, 2, 4], batch_size=1).load_state_dict(state)
    with pytest.raises(ValueError, match="step must be 0 to 3, got 4"):
        LengthBalancedBatchSampler([1, 2, 3], batch_size=1).load_state_dict({**state, "step": 4})


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1], {}, "either max_tokens or batch_size, got None and None"),
        ([1], {"max_tokens": 1, "batch_size": 1}, "either max_tokens or batch_size, got 1 and 1"),
        ([1], {"batch_size": 0}, "at least 1, got 0"),
        ([1, 9, 3], {"max_tokens": 8}, "max_tokens = 8, got 9 tokens at index 1, 1 of 3"),
        ([1], {"batch_size": 1, "jitter": 1.0}, "less than 1, got 1.0"),
        ([1], {"batch_size": 1, "num_replicas": 2, "rank": 2}, "less than num_replicas=2, got 2"),
        ([-1], {"batch_size": 1}, "at least 0, got -1 at index 0"),
        ([[1]], {"batch_size": 1}, r"flat list of whole numbers, got int64 of shape \(1, 1\)"),
        ([1], {"batch_size": 1, "cost": lambda lengths: -lengths}, "one finite number ≥ 0 per length"),
        ([1, 2], {"batch_size": 1, "cost": lambda lengths: lengths.sum()}, r"shape \(2,\), got shape \(\)"),
    ],
    ids=["neither", "both", "zero", "long", "jitter", "rank", "negative", "matrix", "cost", "cost shape"],
)
def test_refuses(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthBalancedBatchSampler(lengths, **options)
