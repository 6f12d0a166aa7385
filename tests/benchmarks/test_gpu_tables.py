"""The tables of docs/gpu.md, from played results."""

from __future__ import annotations

from typing import Any

from benchmarks import proof
from benchmarks.gpu import searches, tables
from benchmarks.record import newest

TIME = {"median": 0.1234, "low": 0.12, "high": 0.125}
RESULT: dict[str, Any] = {
    "command": "make gpu",
    "date": "2026-01-01",
    "device": "NVIDIA T1",
    "torch": "2.11",
    "tests": {"green": True, "line": "5 passed, 1 skipped in 3.00s"},
    "window_attention": {
        "failed": "took longer than 1 s",
        "rows": [
            {
                "op": "fused",
                "batch": 8,
                "window": "7x7",
                "roofline_both": 0.5,
                **dict.fromkeys(("forward_device_ms", "both_device_ms", "both_ms"), TIME),
            },
            {"op": "flex", "batch": 8, "window": "7x7", "failed": "no compiler"},
        ],
    },
    "assignment": {
        "fcos": [
            {
                "op": "FCOS",
                "boxes": 10,
                **dict.fromkeys(("ours_device_ms", "ours_ms", "range_ms", "arange_ms"), TIME),
            }
        ],
        "simota": [
            {"images": 8, "device_ms": TIME, "ms": TIME, "rivals": {"loop": TIME, "plain": {"failed": "wrong"}}},
            {"images": 1, "device_ms": TIME, "ms": TIME},
        ],
    },
    "graphs": {"run": "another call", "rows": [{"model": "mlp", "ms": {"captured": 0.5}, "speedup": {"eager": 5.04}}]},
    "targets": [
        {"line": "speed", "asked": ">= 2x", "found": 2.504, "met": True},
        {"line": "|a - b|", "asked": "<= 1", "found": 2.0, "met": False},
        {"line": "memory", "asked": "<= 1", "found": None, "met": None},
    ],
}


def test_targets_say_what_was_met_and_where_the_figures_are_from() -> None:
    text = tables.judged_block(RESULT)
    assert "`make gpu`, 2026-01-01, NVIDIA T1, torch 2.11. Tests: 5 passed, 1 skipped." in text
    assert "| speed | >= 2x | 2.5 | met |" in text
    assert r"| \|a - b\| | <= 1 | 2 | **missed** |" in text
    assert "| memory | <= 1 |  | not measured |" in text
    assert "window_attention: took longer than 1 s." in text
    assert "graphs: another call." in text


def test_rows_that_failed_are_no_rows() -> None:
    text = tables.windows_block(RESULT)
    assert "| 7x7, 8 | fused | 123 [120, 125] | 123 [120, 125] | 50% | 123 [120, 125] |" in text
    assert "flex" not in text


def test_rivals_that_disagree_are_named_so() -> None:
    text = tables.assignment_block(RESULT)
    assert "| FCOS, 10 | 123 [120, 125] | 123 [120, 125] | 0.1 | 0.1 |" in text
    assert "| 8 | 123 [120, 125] | 123 [120, 125] | 0.1 | wrong |" in text
    assert "| 1 | 123 [120, 125] | 123 [120, 125] | | |" in text


def test_the_front_page_claims_nothing_where_a_test_failed() -> None:
    slower = {"median": 1.234, "low": 1.2, "high": 1.25}
    rows = [
        {"op": op, "batch": 128, "window": "7x7", "both_device_ms": ms}
        for op, ms in (("fused", TIME), ("timm fused", slower))
    ]
    result = {
        **RESULT,
        "window_attention": {"rows": [*rows, {"op": "compile", "batch": 128, "window": "7x7", "failed": ""}]},
    }
    lines = [(line.what, line.against, line.figure, line.headline) for line in proof._gpu(result)]
    assert lines == [
        (
            "Swin window attention on T1, 128 images, forward and backward",
            "timm's fused path, the best rival",
            "10.0x [9.6, 10.4]",
            True,
        ),
        ("SimOTA on T1, 8 images of 640x640, 100 boxes", "the published loop", "1.00x [0.96, 1.04]", False),
    ]
    assert list(proof._gpu({**result, "tests": {"green": False}})) == []


def test_a_figure_stands_beside_the_best_rivals_and_the_whole_steps() -> None:
    ops = {"fused": 1.0, "timm fused": 17.0, "compile": 7.0, "sdpa": 12.0}
    rows = [
        {"op": op, "batch": 128, "window": "7x7", "both_device_ms": dict.fromkeys(("median", "low", "high"), ms)}
        for op, ms in ops.items()
    ]
    training = {"speedup": {"fused over compile": [0.9, 0.8, 1.0], "both over compile": [1.2, 1.1, 1.3]}}
    op, both, *_ = proof._gpu({**RESULT, "window_attention": {"rows": rows}, "training": training})
    assert op.against == "`torch.compile`, the best rival; timm's fused path; the step: `torch.compile` alone"
    assert op.figure == "7.00x [7.00, 7.00]; 17.0x [17.0, 17.0]; 0.90x [0.80, 1.00]"
    assert (both.what.endswith(", and compiled"), both.figure) == (True, "1.20x [1.10, 1.30]")


def test_a_search_has_the_command_that_was_recorded_and_no_other() -> None:
    record = newest("searches")
    assert record is not None
    commands = [row["command"] for row in searches.rows(record)]
    assert commands[0] == "python -m benchmarks.whole_process bert reduced --size full --seconds 45 to 55"
    assert commands[-1] == record["day_after"]["command"]
    assert searches.rows({**record, "later": {**record["later"], "command": "its own"}})[-2]["command"] == "its own"
    assert None in commands and searches.searches_block(record).count("`python -m") == sum(map(bool, commands))
