"""The one driver of trials: which blocks it asks for, what ends it early, and what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from accel.profiler.trial import TrialConfig
from accel.profiler.trial_driver import (
    Block,
    Comparing,
    Steps,
    TrialResult,
    before_and_after,
    by_blocks,
    by_epochs,
    drive,
    settling_cost,
)

CONFIG = TrialConfig()
Answer = Callable[[Block], Steps]


def run(comparison: Comparing, answer: Answer) -> tuple[TrialResult, list[Block]]:
    """Answer each block, and return what the comparison has found and the blocks it asked for."""
    blocks: list[Block] = []

    def measured(block: Block) -> Generator[None, None, Steps]:
        yield
        blocks.append(block)
        return answer(block)

    loop = drive(comparison, measured)
    while True:
        try:
            next(loop)
        except StopIteration as ended:
            return ended.value, blocks


def steps(a: float = 0.02, b: float = 0.01) -> Answer:
    return lambda block: Steps(seconds=[(a if block.arm == "A" else b)] * (block.steps or 10))


def test_blocks_take_turns_and_only_a_switch_settles() -> None:
    result, blocks = run(by_blocks(CONFIG, settle=2), steps())
    assert "".join(block.arm for block in blocks[:8]) == "ABBAABBA"
    settled = [block.settle for block in blocks[1:7]]
    assert settled == [3, 0, 3, 0, 3, 0]  # an odd block begins with a step of the same kind each time
    assert result.outcome is not None
    assert (result.outcome.verdict, result.outcome.gain, result.cost_s) == ("keep", pytest.approx(2.0), 0.0)


@pytest.mark.parametrize(("drained", "looks"), [(False, [2]), (True, [5])])
def test_what_is_much_slower_ends_a_trial_at_once(drained: bool, looks: list[int]) -> None:
    def slow(block: Block) -> Steps:
        seconds = [0.02 if block.arm == "A" else 0.04] * block.steps
        return Steps(seconds=seconds, drained=drained)

    result, blocks = run(by_blocks(CONFIG, if_much_slower="drop"), slow)
    assert [block.steps for block in blocks if block.arm == "B"] == looks
    assert result.outcome is not None and result.outcome.verdict == "drop"
    assert result.cost_s == pytest.approx(looks[0] * 0.02)


def test_a_trial_is_cut_short_at_its_limit() -> None:
    result, blocks = run(by_blocks(CONFIG, limit_s=lambda: 0.2), steps(b=0.08))
    assert result.cut_short and result.cost_s == pytest.approx(0.3)
    assert [block.arm for block in blocks] == ["A", "B"]


def test_epochs_end_where_their_phase_takes_next_to_nothing() -> None:
    def epoch(data_s: float) -> Answer:
        return lambda block: Steps(
            seconds=[0.02] * 9 + [0.02 + (data_s if block.arm == "A" else 0.0)], phases={"data": data_s}
        )

    result, blocks = run(by_epochs(CONFIG, phase="data"), epoch(0.001))
    assert result.outcome is None and result.why == "data is 0.5% of an epoch: too little to win"
    assert [block.whole_epoch for block in blocks] == [True]
    result, blocks = run(by_epochs(CONFIG, phase="data"), epoch(0.1))
    assert result.outcome is not None and result.outcome.verdict == "keep"
    assert len(blocks) == 12 and result.outcome.gain == pytest.approx(1.5)


def test_an_epoch_whose_loader_is_gone_is_no_verdict() -> None:
    result, _ = run(by_epochs(CONFIG, phase="data"), lambda block: Steps(seconds=[]))
    assert result.outcome is None and result.why == "the loop makes a new loader for each epoch"


def test_before_and_after_switches_once() -> None:
    comparison = before_and_after(CONFIG, before=[0.02] * 5, steps=15, settle=2)
    result, blocks = run(comparison, steps(b=0.016))
    assert [(block.arm, block.steps) for block in blocks] == [("A", 15), ("B", 2), *[("B", 2)] * 10]
    assert result.outcome is not None
    assert (result.outcome.verdict, result.outcome.gain) == ("keep", pytest.approx(1.25))
    assert result.why == "faster than the steps before it"


@pytest.mark.parametrize("limit_s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("slower", [1.05, 2.0, 40.0])
def test_before_and_after_ends_once_it_has_cost_what_it_may(slower: float, limit_s: float) -> None:
    comparison = before_and_after(CONFIG, before=[0.02] * 50, steps=50, settle=2, limit_s=lambda: limit_s)
    result, blocks = run(comparison, steps(b=0.02 * slower))
    part_s = 10 * 0.02 * (slower - 1)
    assert result.cost_s <= limit_s + part_s + 1e-6
    assert sum(block.steps for block in blocks[2:]) <= 100
    assert result.outcome is not None and result.outcome.verdict == "drop"


def test_a_stall_of_another_process_is_no_cost_of_a_switch() -> None:
    assert settling_cost([0.03, 0.02], 0.02) == pytest.approx(0.01)
    assert settling_cost([60.0], 0.02) == pytest.approx(0.98)
    assert settling_cost([60.0], 0.5) == pytest.approx(4.5)
