"""What reports show, whole: on a terminal and on a page, word for word.

`python -m tests.accel.test_shown` writes the files anew; read the difference before you commit it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.profiler.report import ProfileReport
from accel.report import Event, Machine, Report
from accel.report.rendering import as_page, as_text
from accel.report.report import BatchRow
from tests.accel import profile_reports, run_reports
from tests.accel.pages import Page

FOLDER = Path(__file__).parent / "shown"


def run() -> Report:
    """Make the report of a run with something in each of its sections."""
    names = [("tf32", "no CUDA"), ("channels_last", "no convolution"), ("pin_memory", "no CUDA"), ("odd", "")]
    return run_reports.full(
        model="Net",
        parameters=1_234_567,
        fingerprint="0123abcd",
        budget="3%",
        machine=Machine(device="cpu (EPYC)", cores=2, threads=1, torch="2.9"),
        command="python train.py",
        started="2026-11-29T12:00:00+00:00",
        rows=[
            run_reports.row(tolerance=1e-4, steps=24, setting="dims=4"),
            run_reports.row(name="compile", status="undone", after_ms=29.6, gain=0.9, gain_low=0.85, gain_high=0.95),
            run_reports.row(name="fast", status="inconclusive", output_error=0.0, gradient_error=0.0, why="too noisy"),
            run_reports.untried(),
            *(run_reports.row(name=name, status="not applicable", why=why) for name, why in names),
        ],
        events=[Event(step=step, text="validation began") for step in (120, 240)],
        unseen=["time in workers"],
        cache="plans/Net-0123.json",
        remembered="an earlier run kept channels_last; it was kept again",
        max_batch_size=256,
        batch_rows=[
            BatchRow(step=16, batch=32, why="as the loop has it", measured=1234.5, noise=310.0),
            BatchRow(step=400, batch=64, tried=True, goodput=1800.0),
        ],
        progress=612.3,
    )


REPORTS: dict[str, Callable[[], Any]] = {
    "run": run,
    "run of nothing": Report,
    "profile": profile_reports.full,
    "refused profile": profile_reports.refused,
    "profile of nothing": ProfileReport,
}


def shown(name: str) -> dict[str, str]:
    """Return the files of a report, each with what it holds."""
    report = REPORTS[name]()
    words = [f"{tag}: {word}" for tag, word in Page(as_page(report)).words if tag != "style"]
    texts = {f"{name}, {width} columns": as_text(report, width=width, color=False) for width in (100, 60)}
    return {f"{title}.txt": f"{text}\n" for title, text in {**texts, f"{name}, page": "\n".join(words)}.items()}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_shows_what_it_showed(name: str) -> None:
    for file, text in shown(name).items():
        assert text == (FOLDER / file).read_text(encoding="utf-8"), f"{file}: see the module's docstring"


if __name__ == "__main__":
    for title in REPORTS:
        for path, content in shown(title).items():
            (FOLDER / path).write_text(content, encoding="utf-8")
