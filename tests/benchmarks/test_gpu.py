"""The runner of the GPU suite: what fails or runs out of time costs itself alone, and figures are always on disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import sections as gpu_sections
from benchmarks.gpu import suite as gpu


class Clock:
    """Stands still but where a part takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def played(clock: Clock, takes_s: float, **found: Any) -> Any:
    def part(limit_s: float) -> dict[str, Any]:
        clock.now += min(takes_s, limit_s)
        return {**found, "limit_s": limit_s}

    return part


def broken(limit_s: float) -> dict[str, Any]:
    raise OSError("no device")


def test_each_part_is_written_before_the_next_begins() -> None:
    clock, seen = Clock(), []
    figures: dict[str, Any] = {}
    parts = {"tests": played(clock, 5, green=True), "training": broken, "copy_overlap": played(clock, 5, ways={})}
    complete = gpu.suite(parts, figures, lambda now: seen.append(sorted(now)), 100, clock)

    assert not complete
    assert figures["training"]["failed"] == "OSError: no device"
    assert figures["copy_overlap"]["ways"] == {}
    assert [name in seen[0] for name in ("tests", "targets", "training")] == [True, True, False]
    assert len(seen) == 3


def test_a_part_has_its_budget_and_no_more_than_is_left() -> None:
    clock, figures = Clock(), {}
    parts = {name: played(clock, 1000) for name in ("tests", "window_attention", "assignment")}
    complete = gpu.suite(parts, figures, lambda now: None, 300, clock)

    assert figures["tests"]["limit_s"] == gpu.BUDGETS_S["tests"]
    assert figures["window_attention"]["limit_s"] == 100
    assert figures["assignment"]["failed"] == "not begun: 0 of 300 s were left"
    assert not complete


def test_all_ran() -> None:
    clock = Clock()
    assert gpu.suite({"search": played(clock, 1)}, {}, lambda now: None, 100, clock)


def test_a_command_is_ended_with_all_it_started() -> None:
    starts = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    for limit_s in (0.5, 2, 8, 32):  # a busy machine takes long to start what is to be ended
        code, output = gpu.run([sys.executable, "-c", f"{starts}; print(p.pid, flush=True); p.wait()"], limit_s)
        assert code is None
        if output:
            break
    deadline = time.monotonic() + 30
    while _runs(int(output)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(output))


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_a_command_tells_its_status_and_output() -> None:
    assert gpu.run([sys.executable, "-c", "print('words'); raise SystemExit(3)"], 60) == (3, "words\n")


def test_a_section_keeps_what_it_found_before_it_failed(tmp_path: Path) -> None:
    def section() -> Iterator[tuple[str, Any]]:
        yield "rows", [1, 2]
        raise ValueError("at the third")

    assert not gpu_sections.written(section, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": [1, 2], "failed": "ValueError: at the third"}
    assert gpu_sections.written(lambda: iter([("rows", [3])]), tmp_path / "found.json")


@pytest.mark.parametrize(
    ("ends", "failed"), [((None, ""), "took longer than 9 s"), ((1, "a\nb"), "exit status 1: a | b"), ((0, ""), None)]
)
def test_a_section_in_a_process(ends: tuple[Any, str], failed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], limit_s: float) -> tuple[int | None, str]:
        Path(command[-1]).write_text('{"rows": [1]}')
        return ends

    monkeypatch.setattr(gpu, "run", run)
    found = gpu.section("assignment", 9)
    assert found.get("failed") == failed
    assert found["rows"] == [1]


def test_red_tests_name_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run", lambda *_: (1, "..F\nFAILED tests/a.py::b\n1 failed"))
    found = gpu.tests(9)
    assert found == {
        "green": False, "line": "1 failed", "failed": "exit status 1", "lines": ["FAILED tests/a.py::b"]
    }  # fmt: skip


def test_every_section_has_a_budget_in_the_same_order() -> None:
    assert list(gpu.BUDGETS_S) == ["tests", *gpu_sections.SECTIONS]
