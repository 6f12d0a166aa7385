"""Scaling curves: batches of ranks, turns of launches, efficiency, the plot, and real ranks."""

from __future__ import annotations

import pytest

from benchmarks.render import Row
from benchmarks.scaling import HOOKS, RECORD, Launch, batch_of_a_rank, compare, launched, with_efficiency

LAUNCH = Launch("ncf", "tiny", 64, "plain", "reordered", 5, 10.0)


class Launches:
    """Stands in for launches: plain steps take 0.2 s, accelerated ones half of that, and those of a rival a quarter."""

    def __init__(self) -> None:
        self.variants: list[str] = []

    def __call__(self, launch: Launch, hosts: int, ranks: int, rate: str, timeout_s: float) -> Row:
        self.variants.append(launch.variant)
        step_s = 0.2 * (1.0 + 0.25 * (hosts * ranks - 1))
        return {
            "step_s": step_s / {"plain": 1, "accel": 2}.get(launch.variant, 4),
            "kept": ["allocator"] if launch.variant == "accel" else [],
        }


def curve() -> list[Row]:
    rows = [{**compare(LAUNCH, (hosts, 1), "1gbit", 2, [], Launches()), "kind": "weak"} for hosts in (1, 2, 4)]
    return with_efficiency(rows)


def test_strong_scaling_shares_the_batch_out() -> None:
    assert batch_of_a_rank(8, 4, "weak") == 8
    assert batch_of_a_rank(8, 4, "strong") == 2
    with pytest.raises(ValueError, match=r"must be a multiple of the ranks .* Found: 8 on 3 ranks"):
        batch_of_a_rank(8, 3, "strong")


def test_efficiency_is_over_ranks_that_each_train_alone() -> None:
    rows = curve()
    assert [row["plain_efficiency"] for row in rows] == pytest.approx([1.0, 0.8, 0.2 / 0.35])
    assert rows[0]["accel_efficiency"] == pytest.approx(2.0)
    assert {row["plain_efficiency"] for row in with_efficiency(rows[1:])} == {None}
    block = RECORD.block({"command": "c", "date": "d", "machine": "m", "torch": "t", "cores": 2, "rows": rows})
    assert "**ncf, weak, links of 1gbit**" in block
    assert "| 2x1 | 64 | 0.250 | 0.125 | 512.0 | 1024.0 | 2.00x [2.00, 2.00] | 80% | 160% | | allocator |" in block


def test_rivals_take_turns_with_the_others() -> None:
    launches = Launches()
    row = compare(LAUNCH, (2, 1), "1gbit", 2, HOOKS, launches)
    assert launches.variants == ["plain", "accel", *HOOKS, *reversed(HOOKS), "accel", "plain"]
    assert (row["speedup"], row["rivals"]) == (pytest.approx(2.0), pytest.approx(dict.fromkeys(HOOKS, 4.0)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "accel", *HOOKS])
def test_real_ranks(variant: str) -> None:
    launch = Launch("ncf", "tiny", 1024, variant, "reordered", 5, 5.0)
    assert launched(launch, 1, 2, "", 300.0)["step_s"] > 0


@pytest.mark.slow
@pytest.mark.net
def test_real_hosts() -> None:
    assert launched(LAUNCH, 2, 1, "1gbit", 300.0)["step_s"] > 0
