"""The runner of the GPU suite: what fails or runs out of time costs itself alone, and figures are always on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_a_section_keeps_what_it_found_before_it_failed(tmp_path: Path) -> None:
    def section() -> Iterator[tuple[str, Any]]:
        yield "rows", [1, 2]
        raise ValueError("at the third")

    assert not gpu_sections.written(section, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": [1, 2], "failed": "ValueError: at the third"}
    assert gpu_sections.written(lambda: iter([("rows", [3])]), tmp_path / "found.json")


def test_every_section_has_a_budget_in_the_same_order() -> None:
    assert list(gpu.BUDGETS_S) == ["tests", *gpu_sections.SECTIONS]
