"""The tables of docs/gpu.md, from played results."""

from __future__ import annotations

from typing import Any

from benchmarks import proof
from benchmarks.gpu import searches, tables

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


def test_sections_without_rows_are_left_out() -> None:
    text = tables.training_block(RESULT)
    assert "| mlp | 0.50 | 5.0x | | |" in text
    assert "BERT-base" not in text


def test_parts_of_a_step_stand_beside_each_other() -> None:
    parts = {"float16": {"autocast": {"products": 2.0, "casts": 1.0}, "O2": {"products": 2.04}}}
    text = tables.training_block({**RESULT, "mixed_precision": {"rows": [], "parts": parts}})
    assert "| products | 2.0 | 2.0 |\n| casts | 1.0 | |" in text


def test_a_job_that_missed_its_target_has_no_ratio() -> None:
    rows = [
        {"variant": "x1", "seconds": (8.0,), "reached": 1, "against_start": (1.0,), "against_best": (0.5,)},
        {"variant": "x32", "seconds": (9.0,), "reached": 0, "against_start": None, "against_best": None},
    ]
    common = {"job": "images", "samples": 64_000, "steps": 4000}
    text = tables.to_target_block({**RESULT, "to_target": {"run": "a day", "comparison": [common | r for r in rows]}})
    assert "| images | x1 | 8.0 | 64,000 | 4,000 | 1.00x | 0.50x |" in text
    assert "| images | x32 | 9.0, target missed | 64,000 | 4,000 | | |" in text


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


SEARCHES: dict[str, Any] = {
    "command": "python -m benchmarks.whole_process",
    "date": "2026-01-01",
    "machine": "NVIDIA T1, 16 cores",
    "torch": "2.11",
    "rows": [
        {"model": "bert", "variant": "plain", "end_s": 20.0, "strategies": []},
        {"model": "bert", "variant": "reduced", "end_s": 50.0, "strategies": [{"name": "a", "status": "not tried"}]},
    ],
    "again": {
        "searches": [
            {
                "model": "resnet",
                "variant": "reduced",
                "end_s": 75.0,
                "strategies": [{"name": "pin_memory", "status": "kept", "gain": 1.111}],
            },
            {"model": "resnet", "variant": "reduced", "end_s": 125.04, "strategies": []},
        ],
        "search_of_125_s": "pin_memory had been kept by a second one (1.12x [1.09, 1.15])",
    },
    "later": {"end_s": 115.0, "verdict": "no verdict", "strategies": [{"name": "a", "status": "undone"}]},
    "day_after": {
        "end_s": 150.0,
        "verdict": "4.86x [4.84, 4.87]: 115 to 558 samples/s",
        "strategies": [{"name": "autocast_bf16", "status": "kept", "gain": 4.7}],
    },
}


def test_searches_say_what_was_kept_and_over_which_plain_loop() -> None:
    table = [line for line in searches.searches_block(SEARCHES).splitlines() if line.startswith("|")][2:]
    assert table == [
        "| BERT-base | reduced | 50 | nothing, nothing was tried | | IEEE float32 (torch's default) |",
        "| ResNet-50 | reduced | 75 | `pin_memory` | 1.11x in its own trial | float32 in TF32 (torch's default) |",
        "| ResNet-50 | reduced | 125 | nothing by the first search, `pin_memory` by a second | 1.12x [1.09, 1.15]"
        " | float32 in TF32 (torch's default) |",
        "| BERT-base | reduced | 115 | nothing | | IEEE float32 (torch's default) |",
        "| BERT-base | reduced | 150 | `autocast_bf16` | 4.86x [4.84, 4.87] | IEEE float32 (torch's default) |",
    ]
    first = [line.figure for line in proof._searches(SEARCHES) if line.headline]
    assert first == ["4.86x [4.84, 4.87]", "1.12x [1.09, 1.15]", "1.11x in its own trial"]
