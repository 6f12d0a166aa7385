"""Patches of public scripts: what a run says of its patch, the gain of a step, and when a patch holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import patches, public_scripts
from benchmarks.public_scripts import Ending


def test_six_public_scripts_and_more_can_run_long_enough() -> None:
    assert len(patches.LONGER) >= 6


@pytest.mark.parametrize(
    ("said", "written", "left"),
    [
        ("accel: Net 1.2x\naccel: wrote out.diff with allocator (patch -p1 < out.diff)\n", ["allocator"], {}),
        (
            "accel: wrote /tmp/out.diff with allocator, pin_memory (patch -p1 -d .. < /tmp/out.diff); sample_cache is "
            "left out: no line does the same; keep it by plan= (sample_cache); tf32 is left out: found 2 times\n",
            ["allocator", "pin_memory"],
            {"sample_cache": "no line does the same; keep it by plan= (sample_cache)", "tf32": "found 2 times"},
        ),
        ("accel: no patch: dropout_masks is left out: no line\n", [], {"dropout_masks": "no line"}),
        ("accel: no patch: nothing was kept\n", [], {}),
    ],
)
def test_what_a_run_says_of_its_patch(said: str, written: list[str], left: dict[str, str]) -> None:
    assert patches.said_of_patch(said) == (written, left)


@pytest.mark.parametrize("said", ["", "accel: no patch: [Errno 2] No such file or directory: 'train.py'\n"])
def test_a_run_that_failed_to_write_its_patch_is_no_success(said: str) -> None:
    with pytest.raises(public_scripts.ScriptFailed):
        patches.said_of_patch(said)


def test_a_step_is_the_median_of_the_second_half(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    assert public_scripts._step_s(file) is None
    file.write_text(json.dumps([0, 9, 18, 27, 28, 29, 30, 40]))
    assert public_scripts._step_s(file) == 1.0


@pytest.mark.parametrize(("patched_s", "holds"), [(0.51, True), (0.60, False)])
def test_a_patch_holds_with_nine_tenths_of_the_gain(patched_s: float, holds: bool) -> None:
    def endings(*steps: float) -> list[Ending]:
        return [Ending(0, "", {}, 10 * step, "", step) for step in steps]

    times = {"plain": endings(1.0, 1.1), "run": endings(0.5, 0.55), "patched": endings(patched_s, 1.1 * patched_s)}
    gains = patches._gains(times)
    assert (gains["run"], gains["holds"]) == (pytest.approx(2.0), holds)
    assert gains["process"] == pytest.approx(1 / patched_s)
    assert patches._gains({"plain": endings(1.0), "run": [], "patched": []})["holds"]
