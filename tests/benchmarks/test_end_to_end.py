"""Whole processes against each other: what a shorter one would have done, turns, and what the rows say together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import whole_process
from benchmarks.end_to_end import Job, compare, ratio
from benchmarks.end_to_end_table import grouped, summary, table_block
from benchmarks.whole_process import Course, Process, ProcessFailed, Stop


def course(start_s: float, step_s: float, steps: int, held_s: float = 0.0, **more: Any) -> Course:
    """Return the course of a process whose first step ends at `start_s`; its loss falls by one a step."""
    ends_s = [start_s + step_s * number for number in range(steps)]
    return Course(ends_s, [float(steps - number) for number in range(steps)], held_s, **more)


# One process


def test_a_process_that_ended_early_goes_on_at_its_rate() -> None:
    ended = course(5.0, 0.5, 41, held_s=10.0)  # until 25 s
    assert ended.rate() == pytest.approx(2.0)
    assert ended.steps_in(25.0) == 41
    assert ended.steps_in(180.0) == pytest.approx(41 + 155 * 2)
    assert ended.steps_in(10.0) == 11  # none of those that came later


def test_the_rate_is_that_after_the_search_not_in_it() -> None:
    slow, fast = [2.0 * number for number in range(1, 11)], [20 + 0.1 * number for number in range(1, 101)]
    assert Course([*slow, *fast], [0.0] * 110, held_s=9.9).rate() == pytest.approx(10.0)
    # A search that never ended: the second half stands for it.
    assert Course(slow, [0.0] * 10).rate() == pytest.approx(0.5)
    assert Course([1.0, 3.0], [0.0] * 2, held_s=0.1).rate() == pytest.approx(0.5)


def test_a_loss_is_reached_by_the_mean_of_some_steps() -> None:
    falling = course(1.0, 1.0, 40)  # 40, 39, …: the mean of 20 falls from 30.5
    assert falling.loss() == pytest.approx(10.5)
    assert falling.reached_s(30.5) == 20.0
    assert falling.reached_s(29.0) == 22.0
    assert falling.reached_s(1.0) is None


@pytest.mark.parametrize(("hold_s", "ended"), [(5.0, (8, 7.0)), (0.0, (101, 100.0))])
def test_a_process_ends_in_time_or_after_its_third_step(hold_s: float, ended: tuple[int, float]) -> None:
    stop = Stop(100.0, hold_s)
    assert next((steps, now) for steps in range(1, 500) if stop(steps, now := float(steps - 1))) == ended


def test_a_rate_needs_two_steps() -> None:
    stop = Stop(1.0, 0.0)
    assert not stop(1, 30.0)
    assert stop(2, 60.0)


# Turns


class Processes:
    """Stands in for processes: each variant has a step time; notes what was asked for."""

    def __init__(self, step_s: dict[str, float], failing: Sequence[str] = ()) -> None:
        self.step_s, self.failing = step_s, failing
        self.ran: list[list[str]] = []
        self.accel_folders: list[str] = []
        self.holds: list[list[str]] = []

    def __call__(self, processes: Sequence[Process]) -> list[Course | ProcessFailed]:
        self.ran.append([each.variant for each in processes])
        self.accel_folders += [each.environ["ACCEL_CACHE"] for each in processes if each.variant == "reordered"]
        self.holds.append([each.arguments[-1] for each in processes])
        return [self._course(each) for each in processes]

    def _course(self, process: Process) -> Course | ProcessFailed:
        if process.variant in self.failing:
            return ProcessFailed(f"{process.model}, {process.variant}, ended with 1:\nRuntimeError: no")
        gains = {"gain": 1.5, "gain_low": 1.4, "gain_high": 1.6}
        rows = [{"name": "allocator", "status": "kept", "setting": "", "why": "faster", **gains}]
        accelerated = process.variant == "reordered"
        return course(4.0, self.step_s[process.variant], 100, held_s=1.0, rows=rows if accelerated else [])


JOB = Job("ncf", "tiny", "synthetic", 180.0, 20.0, "reordered")


def test_an_interval_is_as_wide_as_the_scatter() -> None:
    steady = course(1.0, 0.1, 600)
    ends, now = [], 1.0
    for number in range(600):
        now += 0.05 if number // 40 % 2 else 0.15
        ends.append(now)
    same = ratio([(steady, steady)], 60.0)
    assert same == pytest.approx((1.0, 1.0, 1.0), rel=0.01)
    scattered = ratio([(Course(ends, steady.losses), steady)], 60.0)
    assert scattered.low < 0.9 < 1.1 < scattered.high
    assert scattered.median == pytest.approx(1.0, rel=0.05)


def test_an_interval_holds_the_ratio_where_a_search_goes_on_for_long() -> None:
    """Some parts of the second half are then far off the others, and pulled in."""
    steady = course(1.0, 0.1, 600)
    ends, now = [], 1.0
    while now < 61.0:
        now += 0.1 if now < 36.0 else 0.02
        ends.append(now)
    long = ratio([(Course(ends, [1.0] * len(ends)), steady)], 60.0)
    assert long.low <= long.median <= long.high


@pytest.mark.parametrize("failing", ["reordered", "plain"])
def test_accel_and_the_plain_one_must_not_fail(failing: str) -> None:
    with pytest.raises(ProcessFailed, match=f"ncf, {failing}"):
        list(compare(JOB, ["first"], 1, Processes({"plain": 0.2, "reordered": 0.2}, failing=[failing])))


# Rows


def row(model: str, variant: str, ratio: float) -> dict[str, Any]:
    (measured, _) = next(
        iter(compare(JOB._replace(model=model), ["fabric"], 1, Processes({"plain": 0.2, "fabric": 0.2})))
    )
    return {**measured, "variant": variant, "ratio": ratio, "low": ratio, "high": ratio}


ROWS = [
    row("ncf", "first", 2.0),
    row("ncf", "second", 4.0),
    row("ncf", "by hand: allocator", 1.0),
    row("ncf", "by hand: fused", 5.0),
    row("ncf", "fabric", 0.9),
    row("cnn", "first", 0.5),
    row("cnn", "second", 1.0),
    row("cnn", "compile", 1.25),
]


def test_the_rows_say_together_what_accel_is_held_to() -> None:
    first, second, hand, against_hand, against_rival = summary(ROWS)
    assert first == "first run: geometric mean 1.00x over 2 models, least cnn 0.50x, below 0.98: cnn"
    assert second == "second run: geometric mean 2.00x over 2 models, least cnn 1.00x, below 0.98: none"
    assert hand == "tuned by hand: geometric mean 5.00x over 1 models, least ncf 5.00x, below 0.98: none"
    assert "geometric mean 0.80" in against_hand
    assert "behind: ncf 0.80" in against_hand
    assert "at least as fast on 50% of 2 models" in against_rival
    assert "behind: cnn 0.80" in against_rival


def test_the_best_recipe_and_the_best_rival_stand_beside_accel() -> None:
    ncf, cnn = grouped(ROWS)
    assert ncf["hand"]["variant"] == "by hand: fused"
    assert cnn["rival"]["variant"] == "compile"
    assert "hand" not in cnn
    result = {"command": "c", "date": "d", "machine": "m", "torch": "t", "rows": ROWS}
    block = table_block(result)
    assert "5.00x [5.00, 5.00], fused" in block
    assert "÷ those of a plain one that took turns with it [95 %]." in block
    assert "ended 20 s after their third step" in block
    old = {"model": "lstm", "seconds": 30.0, "plain_steps": 169, "ratio": 1.0, "low": 0.9, "high": 1.1, "kept": []}
    assert "| lstm | 30 | 169 | 1.00x [0.90, 1.10] | | |" in table_block({**result, "rows": [old]})
    assert "÷ those of the plain ones before and after it [least, most]." in table_block({**result, "rows": [old]})
    assert "or, in rows of another day," in table_block({**result, "rows": [*ROWS, old]})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "reordered", "by hand: allocator, fused", "accelerate", "fabric"])
def test_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    environ = {"ACCEL_CACHE": str(tmp_path)}
    plain, ran = whole_process.run(
        [Process("ncf", each, ["--seconds=15", "--hold=1"], environ) for each in ("plain", name)]
    )
    assert isinstance(plain, Course) and isinstance(ran, Course)
    assert len(ran.ends_s) == len(ran.losses) > 5
    assert ran.steps_in(1000) > len(ran.ends_s)
    assert ran.peak_mb > 50
    assert bool(ran.rows) == (name == "reordered")
