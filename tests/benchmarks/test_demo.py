"""The demo promises what its machine can give, and waiting for a turn is none of a run's time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import demo, demo_promise, pairs
from benchmarks.demo_promise import Processor, elsewhere, kept, processor, promise, record_name, wanted_text
from benchmarks.pairs import Racer, Turn

ZEN4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
SKYLAKE = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd svebf16 bf16\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ZEN4, Processor.BF16),
        (SAPPHIRE_RAPIDS, Processor.AMX),
        (SKYLAKE, Processor.FLOAT32),
        (GRAVITON, Processor.BF16),
        ("processor\t: 0\n", Processor.UNKNOWN),
        (None, Processor.UNKNOWN),
    ],
)
def test_what_a_processor_has_for_half_precision_is_told(tmp_path: Path, text: str | None, kind: Processor) -> None:
    info = tmp_path / "cpuinfo"
    if text is not None:
        info.write_text(text)
    assert processor(info) is kind


@pytest.mark.parametrize(
    ("cores", "kind", "speedups"),
    [
        (2, Processor.BF16, {"default": (1.25, 1.5), "reduced": (1.7, 2.2)}),
        (64, Processor.BF16, {"default": (1.25, 1.5), "reduced": (1.7, 2.2)}),
        (2, Processor.AMX, {"default": (1.05, 1.25), "reduced": (1.7, 2.1)}),
        (2, Processor.FLOAT32, {"default": (1.2, 1.5), "reduced": (1.2, 1.5)}),
        (1, Processor.BF16, {"default": None, "reduced": None}),
        (8, Processor.UNKNOWN, {"default": None, "reduced": None}),
    ],
)
def test_the_promise_depends_on_the_machine(
    cores: int, kind: Processor, speedups: dict[str, demo_promise.Interval | None]
) -> None:
    assert promise(cores, kind).speedups == speedups


@pytest.mark.parametrize(
    ("gave", "kind"),
    [
        # Both were called a broken promise once, as that of another kind of processor was asked of them.
        ({"default": 1.37, "reduced": 1.31}, Processor.FLOAT32),
        ({"default": 1.18, "reduced": 1.92}, Processor.AMX),
    ],
)
def test_what_a_kind_of_processor_gave_is_as_promised_there_and_not_elsewhere(
    gave: dict[str, float], kind: Processor
) -> None:
    for other in (kind, Processor.BF16):
        wanted = promise(2, other).speedups
        assert all(kept({"speedup": gave[n], "high": gave[n], "wanted": wanted[n]}) for n in gave) is (other is kind)


def test_a_record_replaces_none_of_another_kind_of_processor() -> None:
    names = {record_name(kind) for kind in Processor}
    assert len(names) == len(Processor)
    assert record_name(Processor.BF16) == "demo"
    assert record_name(Processor.AMX) == "demo-amx"


@pytest.mark.parametrize(("high", "held"), [(1.02, True), (0.97, False)])
def test_where_no_figure_is_promised_slower_is_not_as_promised(high: float, held: bool) -> None:
    assert kept({"speedup": 0.95, "high": high, "wanted": None}) is held
    assert wanted_text(None) == "not slower"


@pytest.mark.parametrize(("high", "held"), [(1.86, True), (1.79, False)])
def test_an_interval_that_reaches_what_is_promised_is_as_promised(high: float, held: bool) -> None:
    """1.80 [1.73, 1.86] stood beside "as promised: NO", since it was just below 1.8."""
    assert kept({"speedup": 1.7996, "high": high, "wanted": (1.8, 2.1)}) is held


@pytest.mark.parametrize(
    ("wanted", "text"),
    [(None, "not slower"), ((1.25, 1.5), "1.25x to 1.5x"), ([1.7, 2.2], "1.7x to 2.2x"), (1.3, "1.3x")],
)
def test_what_is_promised_is_said_of_old_records_too(wanted: Any, text: str) -> None:
    assert wanted_text(wanted) == text


@pytest.mark.parametrize(
    ("speedup", "accuracy", "status", "answer"),
    [(1.4, 90.0, 0, "yes"), (1.0, 90.0, 1, "NO"), (1.4, 88.0, 1, "NO")],
)
def test_the_last_line_and_the_exit_status_say_whether_the_promise_was_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speedup: float, accuracy: float, status: int, answer: str
) -> None:
    report = {"machine": {"cores": 2}, "search_s": 1.0, "break_even_step": 9, "rows": [], "speedup": None}

    def race(seed: int, data: str | None, out: str, console: Any) -> dict[str, Racer]:
        turns = [[0.02 * noise] * 8 for noise in (1.0, 1.01, 0.99, 1.0)]
        fast = [[t / speedup for t in turn] for turn in turns]
        found = {"plain": finished(turns), "default": finished(fast, report), "reduced": finished(fast, report)}
        found["reduced"].result["accuracy"] = accuracy
        return found

    monkeypatch.setattr(demo, "_race", race)
    monkeypatch.setattr(demo, "processor", lambda: Processor.FLOAT32)
    monkeypatch.setattr(demo, "usable_cores", lambda: 2)
    done = CliRunner().invoke(demo.main, ["--out", str(tmp_path)])
    assert done.exit_code == status
    assert done.output.splitlines()[-1] == f"as promised for a CPU without bfloat16 instructions, 2 cores: {answer}"
    assert "none, none" in done.output  # what its own reports say


def test_recorded_runs_are_told_from_the_committed_results(tmp_path: Path) -> None:
    committed = elsewhere()
    assert committed
    assert all("default" in line and "reduced" in line for line in committed)
    assert committed == sorted(committed, key=lambda line: line[:10], reverse=True)  # by their dates
    assert elsewhere(tmp_path) == []


def finished(turns: list[list[float]], report: dict[str, Any] | None = None) -> Racer:
    result = {"accuracy": 90.0, "report": json.dumps(report or {})}
    return Racer("x", None, None, turns=turns, result=result, done=True)  # type: ignore[arg-type]


def test_times_and_speed_up_of_the_summary_are_one_estimate() -> None:
    """A machine that drifts: the medians over the run would give another ratio."""
    drift = [1.0, 1.1, 1.3, 2.0, 3.0]
    report = {"machine": {"cores": 2}, "search_s": 1.0, "break_even_step": 9, "rows": [], "speedup": 1.2}
    runs = [
        {
            "plain": finished([[0.020 * d] * 8 for d in drift]),
            "default": finished([[0.016 * d] * 8 for d in drift[:3]], report),
            "reduced": finished([[0.010 * d] * 8 for d in drift], report),
        }
    ]
    promised = promise(2, Processor.FLOAT32)

    summary = demo._summarise(runs, "digits", promised)

    for name in ("default", "reduced"):
        found = summary["variants"][name]
        assert found["plain_ms"] / found["ms"] == pytest.approx(found["speedup"])
        assert found["wanted"] == promised.speedups[name]
    assert summary["passed"]
    assert summary["promised_for"] == "a CPU without bfloat16 instructions, 2 cores"


def test_the_tables_of_the_committed_results_can_still_be_made() -> None:
    for recorded in demo_promise.RESULTS.glob("demo-*.json"):
        assert "promised" in demo.table_block(json.loads(recorded.read_text()))


class Pipe:
    """Hands out two turns, each after ten seconds of others' turns."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.sent: list[Any] = []

    def recv(self) -> int:
        self.clock[0] += 10.0
        return 2

    def send(self, told: Any) -> None:
        self.sent.append(told)


def test_the_clock_of_a_run_stands_while_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    pipe: Any = Pipe(seconds)
    turn = Turn(pipe, clock=lambda: seconds[0])
    monkeypatch.setattr(pairs, "Turn", lambda given: turn)

    def train(on_step: Any) -> float:
        began = time.perf_counter()
        for step in range(4):
            seconds[0] += 1.0
            on_step(step)
        return time.perf_counter() - began

    pairs._child(pipe, train, {})

    assert [told[:2] for told in pipe.sent] == [("turn", [1.0, 1.0]), ("turn", [1.0, 1.0]), ("done", 4.0)]
    assert seconds[0] == 34.0
