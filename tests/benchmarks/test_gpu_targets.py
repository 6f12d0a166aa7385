"""The judging of the GPU suite's figures, on played ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.gpu import targets as bench

FAST, SLOW, BOTH = {"median": 0.008}, {"median": 0.012}, 0.05


def row(op: str, batch: int, both: float, **more: Any) -> dict[str, Any]:
    return {"op": op, "batch": batch, "both_device_ms": {"median": both}, "forward_device_ms": FAST, **more}


GOOD: dict[str, Any] = {
    "tests": {"green": True},
    "window_attention": {
        "rows": [
            row("fused", 1, 0.02, roofline_both=0.1),
            *(row("fused", batch, BOTH, roofline_both=0.75) for batch in (32, 128)),
            *(row("timm fused", batch, 2 * BOTH) for batch in (1, 32, 128)),
            *(row(op, batch, 1.6 * BOTH) for op in ("sdpa", "flex") for batch in (32, 128)),
            {"op": "compile", "batch": 32, "failed": "no compiler"},
            row("compile", 128, 3 * BOTH),
        ]
    },
    "assignment": {
        "simota": [{"images": 64, "boxes": 100, "device_ms": {"median": 1.5}}, {"images": 8, "boxes": 100}],
        "fcos": [{"ours_device_ms": SLOW}, {"ours_device_ms": FAST}],
    },
    "optimizers": {
        "rows": [
            {"op": "adamw", "roofline": 0.9, "speedup": {"torch fused": 1.0}},
            {"op": "unscale, clip, adamw", "roofline": 0.9, "speedup": {"torch in three": 1.5}},
            {"op": "lamb", "speedup_called": {"loop": 6.0}},
            {"op": "lars", "speedup_called": {"loop": 8.0}},
        ]
    },
    "graphs": {
        "rows": [
            {"model": "mlp", "speedup": {"eager": 3.0, "reduce-overhead": 1.1}},
            {"model": "transformer", "speedup": {"eager": 2.5}},
        ]
    },
    "mixed_precision": {
        "rows": [
            {"dtype": "float16", "speedup": 1.2, "memory": 0.8},
            {"dtype": "bfloat16", "speedup": 1.3, "memory": 0.7},
        ]
    },
    "training": {
        "speedup": {"fused over eager": [1.3, 1.2, 1.4], "fused over compile": [1.1, 1, 2], "both over compile": [1.2]},
        "last_loss": {"eager": 3.0, "eager again": 3.01, "fused": 2.985},
    },
    "copy_overlap": {"ways": {"continuous, one ahead": {"ratio": 1.01}}},
}


def found(figures: dict[str, Any]) -> dict[str, tuple[float | None, bool | None]]:
    return {row["line"]: (row["found"], row["met"]) for row in bench.judged(figures, figures["tests"]["green"])}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the good figures with one changed; numbers in the path are indices."""
    figures = copy.deepcopy(GOOD)
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place: Any = figures
    for part in way:
        place = place[part]
    place[last] = value
    return figures


def test_good_figures_meet_every_line() -> None:
    rows = bench.judged(GOOD, green=True)
    assert len(rows) == 19
    assert all(row["met"] for row in rows), rows
    assert set(rows[0]) == {"line", "asked", "found", "met"}


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("window_attention/rows/2/roofline_both", 0.69, "share of roofline"),
        ("window_attention/rows/0/forward_device_ms", SLOW, "forward, B = 1"),
        ("window_attention/rows/5/both_device_ms", {"median": 1.7 * BOTH}, "over timm fused"),
        ("window_attention/rows/6/both_device_ms", {"median": 1.4 * BOTH}, "over the best rival"),
        ("assignment/simota/0/device_ms", {"median": 2.1}, "SimOTA"),
        ("assignment/fcos/1/ours_device_ms", {"median": 0.021}, "targets, 8 images"),
        ("optimizers/rows/0/roofline", 0.84, "share of bandwidth"),
        ("optimizers/rows/0/speedup", {"torch fused": 0.95}, "over torch fused"),
        ("optimizers/rows/1/speedup", {"torch in three": 1.39}, "torch's three"),
        ("optimizers/rows/3/speedup_called", {"loop": 4.9}, "over loops"),
        ("graphs/rows/1/speedup/eager", 1.9, "captured steps over eager"),
        ("graphs/rows/0/speedup/reduce-overhead", 1.04, "compile's own graphs"),
        ("training/speedup/fused over eager", [1.19, 1, 2], "fused over eager"),
        ("training/speedup/fused over compile", [1.0, 1, 2], "fused over compile alone"),
        ("training/speedup/both over compile", [0.99], "fused and compiled"),
        ("training/last_loss/fused", 2.97, "loss after 200 steps"),
        ("copy_overlap/ways/continuous, one ahead/ratio", 1.03, "copied one ahead"),
    ],
)
def test_a_figure_that_is_too_bad_misses_its_line_alone(path: str, value: Any, line: str) -> None:
    missed = [name for name, (_, met) in found(changed(path, value)).items() if met is False]
    assert len(missed) == 1
    assert line in missed[0]


def test_an_assignment_that_is_wrong_is_not_judged() -> None:
    assert found(changed("assignment/fcos/1", {"failed": "wrong"}))["FCOS and FCOS3D targets, 8 images"] == (None, None)


@pytest.mark.parametrize("section", ["window_attention", "assignment", "graphs", "mixed_precision"])
def test_the_worst_of_rows_is_not_judged_where_some_are_missing(section: str) -> None:
    whole, part = found(GOOD), found(changed(f"{section}/failed", "took too long"))
    lost = [line for line, outcome in part.items() if outcome != whole[line]]
    assert lost and {part[line] for line in lost} == {(None, None)}


def test_red_tests_claim_nothing() -> None:
    assert {met for _, met in found(changed("tests/green", False)).values()} == {None}


def test_equal_losses_without_noise() -> None:
    same = changed("training/last_loss", {"eager": 3.0, "eager again": 3.0, "fused": 3.0})
    line = "loss after 200 steps: |fused - eager| / |eager - eager again|"
    assert found(same)[line] == (0.0, True)
    same["training"]["last_loss"]["fused"] = 3.1
    assert found(same)[line] == (float("inf"), False)
