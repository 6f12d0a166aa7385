"""The front page's plot shows what is recorded."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speedups import CPU, GPU, Bar, bars, draw

PLOT = Path(__file__).resolve().parents[2] / "docs" / "speedups.svg"


def played(name: str) -> dict[str, Any] | None:
    rows = [
        {"model": "cnn", "variant": "second", "ratio": 1.2, "low": 1.1, "high": 1.3},
        {"model": "cnn", "variant": "first", "ratio": 9.0, "low": 8.0, "high": 10.0},
        {"model": "ncf", "variant": "second", "ratio": 4.0, "low": 3.0, "high": 5.0},
    ]
    return {"rows": rows} if name == "end-to-end" else None


def test_bars_are_the_second_runs_the_largest_first() -> None:
    assert bars(played) == [Bar(CPU, "ncf", 4.0, 3.0, 5.0), Bar(CPU, "cnn", 1.2, 1.1, 1.3)]


def test_the_committed_plot_has_each_recorded_bar() -> None:
    shown = bars()
    assert {bar.panel for bar in shown} == {GPU, CPU}
    described = ElementTree.parse(PLOT).getroot().find("{http://www.w3.org/2000/svg}desc")
    assert described is not None and described.text == "; ".join(map(str, shown))


def test_text_follows_the_readers_colours() -> None:
    pytest.importorskip("matplotlib")
    drawn = draw([Bar(GPU, "bert", 2.0, 1.9, 2.1), Bar(CPU, "cnn", 1.5, 1.4, 1.6)])
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn
    assert "fill: var(--ink)" in drawn
    assert "#123456" not in drawn
