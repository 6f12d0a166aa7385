"""All-reduces of few bytes: right sums, the same bits everywhere, in the messages that the model counts."""

from __future__ import annotations

import pytest
import torch

from accel.comm.ranks import channel
from accel.comm.ranks.channel import SMALL_BYTES, sum_small, sums_directly
from tests.comm.simulated import Counting
from tests.comm.threaded_ranks import together

SIZES = (2, 3, 4, 6, 8, 16, 64)


@pytest.mark.sample(5)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_right_and_the_same_bits_on_every_rank(
    size: int, directly: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "sums_directly", lambda size, nbytes: directly)
    for numel in (1, size, 37):  # fewer elements than ranks: some have no share
        given = torch.randn(size, numel, dtype=torch.float64).to(dtype)

        def work(line, given=given):  # type: ignore[no-untyped-def]
            values = given[line.rank].clone()
            sum_small(line, values)
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
def test_a_rank_sends_everything_in_one_round_or_a_rings_bytes_in_two(size: int) -> None:
    for nbytes in (4, 64, 1000, 4096, 20_000, SMALL_BYTES - 4):
        line = Counting(size - 1, size)
        sum_small(line, torch.zeros(nbytes // 4))  # type: ignore[arg-type]
        if sums_directly(size, nbytes):
            assert (line.messages, line.bytes) == (size - 1, (size - 1) * nbytes)
        else:
            assert line.messages <= 2 * (size - 1)
            assert line.bytes <= 2 * (size - 1) / size * nbytes + 2 * 4 * size  # shares of whole elements


def test_the_size_up_to_which_ranks_hear_each_other_directly_falls_with_their_number() -> None:
    limits = [sum(sums_directly(size, nbytes) for nbytes in range(4, SMALL_BYTES, 64)) for size in SIZES]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == len(range(4, SMALL_BYTES, 64))  # two ranks send the same bytes either way
    assert 64 * limits[SIZES.index(6)] < SMALL_BYTES / 4
