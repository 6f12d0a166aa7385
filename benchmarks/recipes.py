"""Write the search's recipes: what an expert would switch on at once, without what the recorded results speak against.

    python -m benchmarks.recipes [--check]

A strategy of an expert's list stays if no trial of it is recorded for such a device, or if it won in two of three and
lost in a quarter at most. It has won where it was kept, and where its whole interval was above 1 and a search dropped
it for giving too little: among others a little counts, the more the shorter they make the step. What moves no bit and
is free to switch stays unless it has lost oftener than intervals of 95 % are wrong: what gives nothing does no harm.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from accel.files import write_atomic
from accel.search.recipes import PATH
from benchmarks.record import FOLDER, newest

FREE = ("allocator", "dropout_masks", "pin_memory")
EXPERT: dict[str, tuple[tuple[str, str], ...]] = {
    "cuda": (
        ("autocast_bf16", ""),
        ("tf32", ""),
        ("channels_last", ""),
        ("torch_compile", ""),
        ("fused_optimizer", ""),
        ("window_attention", ""),
        ("cuda_graphs", "launch"),
        ("pin_memory", ""),
    ),
    "cpu with AMX": (
        ("allocator", ""),
        ("dropout_masks", ""),
        ("autocast_bf16", ""),
        ("channels_last", ""),
        ("torch_compile", ""),
        ("fused_optimizer", ""),
    ),
    "cpu": (
        ("allocator", ""),
        ("dropout_masks", ""),
        ("channels_last", ""),
        ("torch_compile", ""),
        ("fused_optimizer", ""),
    ),
}
"""Kind of device → strategies, and the bottleneck that must limit the step for one."""
_KEPT, _LOST, _WRONG = 2 / 3, 1 / 4, 1 / 20


class Verdict(NamedTuple):
    """One recorded trial that has decided."""

    strategy: str
    where: str
    won: bool
    lost: bool
    gain: float | None


def verdicts(device: str) -> list[Verdict]:
    """Return the recorded verdicts for a kind of device."""
    if device == "cuda":
        searches, gpu = (
            [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob(f"{name}-*.json"))]
            for name in ("searches", "gpu")
        )
        return [*_in_rows(searches), *(verdict for figures in gpu for verdict in _of_gpu(figures))]
    if device == "cpu":
        return [*_in_rows(newest("strategy-gains")), *_in_rows(newest("demo"))]
    own = list(_in_rows(newest("demo-amx")))
    known = {each.strategy for each in own}
    return own + [each for each in verdicts("cpu") if each.strategy not in known]


def _in_rows(figures: Any) -> Iterator[Verdict]:
    """Yield what the rows of strategies anywhere in a record say."""
    if isinstance(figures, list):
        for each in figures:
            yield from _in_rows(each)
    elif isinstance(figures, dict):
        if "status" in figures and ("name" in figures or "strategy" in figures):
            yield from _of_row(figures.get("name") or figures["strategy"], figures)
            return
        for name, each in figures.items():
            if isinstance(each, dict) and "status" in each and "name" not in each:
                yield from _of_row(name, each)
            else:
                yield from _in_rows(each)


def _of_row(name: str, row: dict[str, Any]) -> Iterator[Verdict]:
    gain, low, high = row.get("gain"), row.get("gain_low"), row.get("gain_high")
    if gain is not None and row["status"] in ("kept", "undone", "inconclusive", "refused"):
        is_small = low is not None and low > 1 and row.get("why", "").startswith("gives less than")
        won = row["status"] == "kept" or is_small
        yield Verdict(name, "", won, high is not None and high < 1, gain)


def _of_gpu(figures: dict[str, Any]) -> Iterator[Verdict]:
    """Yield what the steps that were timed beside each other say; small models are limited by launches there."""
    for row in figures.get("graphs", {}).get("rows", ()):
        gain = row["speedup"]["eager"]
        yield Verdict("cuda_graphs", "launch", gain > 1, gain < 1, gain)
    for name, speedup in (("window_attention", "fused over eager"), ("torch_compile", "compile over eager")):
        if each := figures.get("training", {}).get("speedup", {}).get(speedup):
            yield Verdict(name, "", min(each[1:]) > 1, max(each[1:]) < 1, each[0])
    yield from _in_rows(figures.get("table", []))


def recipe(device: str) -> list[dict[str, Any]]:
    """Return the recipe for a kind of device, as `recipes.json` has it."""
    found = verdicts(device)
    members = []
    for strategy, where in EXPERT[device]:
        own = [each for each in found if (each.strategy, each.where) == (strategy, where)]
        won, lost, is_free = sum(each.won for each in own), sum(each.lost for each in own), strategy in FREE
        wins = won >= _KEPT * len(own) and lost <= _LOST * len(own)
        if not (lost <= _WRONG * len(own) if is_free else wins):
            continue
        gains = [math.log(each.gain) for each in own if each.won and each.gain]
        gain = round(math.exp(sum(gains) / len(gains)), 3) if gains else None
        figures = {"trials": len(own), "won": won, "lost": lost, "gain": gain}
        members.append({"strategy": strategy, "where": where, "is_free": is_free, **figures})
    return members


def text() -> str:
    """Return what `recipes.json` is to hold."""
    what = "written by python -m benchmarks.recipes from benchmarks/results/"
    return json.dumps({"what": what, "recipes": {device: recipe(device) for device in EXPERT}}, indent=1) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if the file is out of date.")
def main(check: bool) -> None:
    """Write the recipes."""
    if not check:
        write_atomic(PATH, text())
    elif Path(PATH).read_text("utf-8") != text():
        print("recipes.json is out of date: python -m benchmarks.recipes")
        sys.exit(1)


if __name__ == "__main__":
    main()
