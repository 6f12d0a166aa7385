"""The rows of the benchmark of automatic choices, from played steps, and the models whose gradients it replays."""

from __future__ import annotations

import pytest
import torch

from benchmarks.comm.gradient_profiles import PROFILES
from benchmarks.comm_choice import SETTINGS, Setting, in_a_line, rows_of

SETTING = Setting(2, 1, "1gbit", "mlp", 24)


def result() -> dict[str, object]:
    seconds = {name: [10.0] * 5 for name in ("half", "int8", "1-bit", "powersgd 16", "dgc 1%", "powersgd 4")}
    seconds |= {"ddp": [8.0] * 5, "auto lossy": [2.0, 2.1, 2.2, 2.3, 2.4], "auto reduced": [8.1] * 5, "int8": [2.0] * 5}
    searched = {
        "auto lossy": {"chosen": "int8", "predicted": {"int8": 2.42, "plain": 8.0, "half": 5.0}, "search_s": 3.0},
        "auto reduced": {"chosen": "plain", "predicted": {"plain": 8.0, "half": 5.0}, "search_s": 1.0},
    }
    return {"seconds": seconds, "searched": searched, "replicas_equal": True}


def test_a_choice_is_compared_with_the_best_that_its_level_allows() -> None:
    rows = {row["method"]: row for row in rows_of(SETTING, result())}
    lossy, reduced = rows["auto lossy"], rows["auto reduced"]
    assert (lossy["best"], lossy["of_best"], lossy["speedup"]) == ("int8", pytest.approx(1.1), pytest.approx(8 / 2.2))
    assert lossy["of_best_low"] == pytest.approx(1.04)
    assert (reduced["best"], reduced["of_best"]) == ("ddp", pytest.approx(8.1 / 8))
    assert [rows[name]["predicted_s"] for name in ("auto lossy", "auto reduced", "ddp")] == [2.42, 8.0, 8.0]
    assert rows["half"]["predicted_s"] == 5.0
    assert rows["half"]["of_best"] is None
    assert "predicted +10%" in in_a_line(lossy)
    assert "DIFFER" not in in_a_line(lossy)


def test_settings_cover_what_is_claimed() -> None:
    keys = {setting.key for setting in SETTINGS}
    assert len(keys) == len(SETTINGS)
    for shape in ("2x1", "2x2"):
        assert {f"{shape},{rate},mlp" for rate in ("50mbit", "100mbit", "1gbit", "unshaped")} <= keys
        assert f"{shape},1gbit,small" in keys
    assert {f"2x1,1gbit,{name}" for name in PROFILES} <= keys


@pytest.mark.parametrize(
    ("name", "parameters", "gmacs"),
    [("resnet", 25_557_032, 3.86), ("vgg", 138_357_544, 15.47), ("bert", 109_482_240, 10.87)],
)
def test_profiles_have_the_parameters_and_operations_of_their_networks(
    name: str, parameters: int, gmacs: float
) -> None:
    layers = PROFILES[name][0]()
    assert sum(torch.Size(shape).numel() for layer in layers for shape in layer.shapes) == parameters
    assert sum(layer.macs for layer in layers) / 1e9 == pytest.approx(gmacs, rel=1e-3)
