"""Step times of the suite in turns: who is slower, what is measured twice, and that a slowed strategy is noticed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from accel.strategies.allocator import Allocator
from benchmarks.step_times import Options, Slowed, Steps, against_plain, judge, measure, slower
from benchmarks.suite.conftest import Field
from tests.test_layout import ROOT


class Played:
    """A variant whose steps take what its list says: each turn the next entry, the last one for ever."""

    def __init__(self, *step_s: float, settles_after: int = 1, failed: str = "") -> None:
        self.step_s, self.settles_after, self.failed = list(step_s), settles_after, failed
        self.steps: list[int] = []
        self.left = 0

    @property
    def info(self) -> Any:
        if self.failed:
            return {"failed": self.failed}
        return {"over": len(self.steps) >= self.settles_after, "loss": 0.5, "kept": ["allocator"]}

    def run(self, steps: int) -> list[float]:
        self.steps.append(steps)
        seconds = self.step_s.pop(0) if len(self.step_s) > 1 else self.step_s[0]
        return [seconds * (1.0 + 0.001 * (len(self.steps) % 3))] * steps

    def leave(self) -> None:
        self.left += 1


OPTIONS = Options(turns=6, seconds=2.4, settle_s=10.0)


def test_all_variants_take_turns_of_about_as_many_seconds() -> None:
    players = {"plain": Played(0.02), "planned": Played(0.01, settles_after=3)}
    results = measure(players, OPTIONS)
    assert players["plain"].steps == [4, *[10] * 6]
    assert players["planned"].steps == [4, 5, 5, *[20] * 6]
    assert [player.left for player in players.values()] == [1, 1]
    assert results["planned"].facts == {"loss": 0.5, "kept": ["allocator"]}
    assert against_plain(results, "planned").value == pytest.approx(0.5, rel=0.01)
    assert not slower(results, "planned")
    assert len(results["planned"].times_s) == 6 * 18


def in_processes(*ratios: float) -> list[dict[str, Steps]]:
    """Return measurements of as many pairs of processes, each with its own ratio of planned to plain."""
    return [{"plain": Steps([[1.0]] * 4), "planned": Steps([[ratio]] * 4)} for ratio in ratios]


def test_a_variant_is_slower_that_is_so_in_four_pairs_of_processes() -> None:
    first, *anew = in_processes(1.6, 1.5, 1.4, 1.3)
    lengths: list[int] = []

    def measured_anew(times: int) -> dict[str, Steps]:
        lengths.append(times)
        return anew.pop(0)

    results = judge(first, measured_anew, ["planned"])
    assert slower(results, "planned")
    assert str(against_plain(results, "planned")).startswith("1.30x")
    assert lengths == [2, 4, 8]


@pytest.mark.parametrize("ratios", [(1.0,), (1.5, 1.0), (1.5, 1.4, 1.3, 1.0)])
def test_a_process_with_bad_luck_condemns_nothing(ratios: tuple[float, ...]) -> None:
    first, *anew = in_processes(*ratios)
    results = judge(first, lambda times: anew.pop(0), ["planned"])
    assert not slower(results, "planned")
    assert not anew


def test_a_model_that_seems_slower_is_measured_in_new_processes() -> None:
    started: list[list[str]] = []
    again = Played(0.01)

    @contextlib.contextmanager
    def start(models: list[str]) -> Iterator[Any]:
        started.append(models)
        yield {"plain": Played(0.02), "planned": again}

    # First the settling and six turns of "vgg", then those of "vit".
    players: Any = {"plain": Played(0.02), "planned": Played(*[0.03] * 7, 0.02)}
    field = Field(start, ["vgg", "vit"], players, OPTIONS)
    assert against_plain(field["vit"], "planned").value == pytest.approx(1.0, rel=0.01)
    assert against_plain(field["vgg"], "planned").value == pytest.approx(0.5, rel=0.01)
    assert started == [["vgg"]]
    assert again.steps == [4, *[20] * 12]


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ([1.015, 1.015, 1.014, 1.016], False),  # within the limit
        ([1.30, 0.85, 1.25, 0.95], False),  # nothing is certain
        ([1.06, 1.05, 1.07, 1.06], True),
        ([0.90, 0.91, 0.90, 0.89], False),
    ],
    ids=["limit", "noise", "slower", "faster"],
)
def test_slower_is_beyond_the_limit_and_the_interval(own: list[float], verdict: bool) -> None:
    results = {"plain": Steps([[1.0]] * 4), "planned": Steps([[value] for value in own])}
    assert slower(results, "planned") is verdict


def test_a_strategy_is_slow_on_purpose_only_while_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for name in ("enable", "disable"):  # both are put back after the test
        monkeypatch.setattr(Allocator, name, lambda *_: None)
    slow, strategy = Slowed("allocator", 0.5), Allocator()
    run: Any = None
    slow.wait()
    strategy.enable(run, None)
    slow.wait()
    strategy.disable(run)
    slow.wait()
    assert waited == [0.5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status"), [([], 0), (["--slow=allocator=0.1", "--turns=4"], 1)], ids=["as it is", "slowed"]
)
def test_a_strategy_slowed_on_purpose_makes_the_comparison_fail(options: list[str], status: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmark", "benchmarks/suite", "-k", "ncf"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("planned takes" in done.stdout) == bool(status)
