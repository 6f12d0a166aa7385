"""All-reduces of few bytes: right sums, the same bits everywhere, and a growth that 1,000 ranks can bear."""

from __future__ import annotations

import math

import pytest
import torch

from accel.comm.ranks import small_sums
from accel.comm.ranks.small_sums import TINY_BYTES, best_algorithm, seconds
from tests.comm.simulated import Counting
from tests.comm.threaded_ranks import together

SIZES = (2, 3, 4, 6, 8, 16, 64, 250, 1000)
BYTES = (4, 64, 1000, 4096, 20_000, TINY_BYTES - 4)


def sent(size: int, nbytes: int) -> Counting:
    """Return what the busiest rank sends; those at the ends and at a power of two are of each kind there is."""
    power = 1 << (size.bit_length() - 1)
    found = []
    for rank in {0, size - power - 1, size - power, power - 1, power, size - 1}:
        if 0 <= rank < size:
            line = Counting(rank, size)
            small_sums.all_reduce(line, torch.zeros(nbytes // 4))
            found.append(line)
    return max(found, key=lambda line: (line.bytes, line.messages))


def ring_bytes(size: int, nbytes: int) -> float:
    return 2 * (size - 1) / size * nbytes


@pytest.mark.sample(5)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 12, 17])
@pytest.mark.parametrize("way", ["direct", "shares", "doubling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_right_and_the_same_bits_on_every_rank(
    size: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_sums, "best_algorithm", lambda size, nbytes: way)
    for numel in (1, size, 37):  # fewer elements than ranks: some have no share
        given = torch.randn(size, numel, dtype=torch.float64).to(dtype)

        def work(line, given=given):  # type: ignore[no-untyped-def]
            values = given[line.rank].clone()
            small_sums.all_reduce(line, values)
            return values

        found = together(size, work)
        want = given.double().sum(0)
        for one in found:
            assert torch.equal(one, found[0])
        # Of size − 1 roundings in float32 or wider, and one to the dtype.
        wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        bound = (wide * size + torch.finfo(dtype).eps) * given.double().abs().sum(0)
        assert ((found[0].double() - want).abs() <= bound).all()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_sent_is_what_the_model_counts(size: int) -> None:
    power = 1 << (size.bit_length() - 1)
    steps = power.bit_length() - 1 + 2 * (power < size)
    for nbytes in BYTES:
        way = best_algorithm(size, nbytes)
        messages = {"direct": size - 1, "shares": 2 * (size - 1), "doubling": steps}[way]
        counted = {"direct": messages * nbytes, "shares": messages / size * nbytes, "doubling": steps * nbytes}[way]
        line = sent(size, nbytes)
        assert line.messages <= messages
        assert line.bytes <= counted + 2 * 4 * size  # shares of whole elements
        assert line.bytes >= 0.4 * counted or nbytes < 4 * size


def test_bytes_and_messages_grow_with_the_logarithm() -> None:
    for size in SIZES:
        steps = math.ceil(math.log2(size))
        for nbytes in BYTES:
            line = sent(size, nbytes)
            if size >= 64:
                assert line.messages <= steps + 2
                assert len(line.peers) <= steps + 1
                assert line.bytes <= (steps + 1) * nbytes
            if nbytes >= 20_000:  # where bytes count
                assert line.bytes <= max(2, (steps + 1) / 2 * 1.25) * ring_bytes(size, nbytes)


def test_the_size_up_to_which_ranks_hear_each_other_directly_falls_with_their_number() -> None:
    limits = [
        max([nbytes for nbytes in range(4, TINY_BYTES, 64) if best_algorithm(size, nbytes) == "direct"], default=0)
        for size in SIZES
    ]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > TINY_BYTES - 65  # two ranks send the same bytes either way
    assert limits[SIZES.index(6)] < TINY_BYTES / 4
    assert limits[SIZES.index(64) :] == [0] * 3


def test_six_hosts_send_what_a_ring_sends_and_a_thousand_five_times_that() -> None:
    """They sent 3.0 and 500 times as much."""
    nbytes = TINY_BYTES - 4
    assert sent(6, nbytes).bytes <= 1.01 * ring_bytes(6, nbytes)
    assert sent(1000, nbytes).bytes <= 5.51 * ring_bytes(1000, nbytes)


def test_no_other_way_is_shorter() -> None:
    for size in SIZES:
        for nbytes in BYTES:
            best = seconds(best_algorithm(size, nbytes), size, nbytes)
            assert best == min(seconds(way, size, nbytes) for way in ("direct", "shares", "doubling"))
            assert best < 0.02
