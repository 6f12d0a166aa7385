"""The table of the README that says what each part gives, against what, on how certain a ground."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Result = dict[str, Any]


class Line(NamedTuple):
    """One row: what was done, against what, the figure, and the page that has all of them."""

    what: str
    against: str
    figure: str
    page: str


def proof_block(newest: Callable[[str], Result | None]) -> str:
    """Return the table; `newest` finds the newest result that matches a pattern."""
    lines = ["| | against | measured [spread] | all figures |", "|---|---|---|---|"]
    dates, machines = set(), set()
    for pattern, read in SOURCES:
        result = newest(pattern)
        if result is None:
            continue
        dates.add(result["date"])
        machine = result["machine"]
        machines.add(machine if isinstance(machine, str) else machine["device"])
        lines += [
            f"| {line.what} | {line.against} | {line.figure} | [{line.page}]({line.page}) |" for line in read(result)
        ]
    head = f"Recorded {' to '.join(sorted({min(dates), max(dates)}))} on {' and '.join(sorted(machines))}, 2 cores."
    return "\n".join([head, "", *lines])


def _times(value: float, low: float, high: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}x [{low:.{digits}f}, {high:.{digits}f}]"


def _never_slower(result: Result) -> Iterator[Line]:
    ratios = [loop["ratio"] for loop in result["loops"]]
    yield Line(
        f"`optimize` on {len(ratios)} loops of all kinds: time of a step",
        "the plain loop",
        f"{min(ratios):.2f} to {max(ratios):.3f} of it",
        "docs/controller.md",
    )


def _faults(result: Result) -> Iterator[Line]:
    summary = result["summary"]
    rivals = ", ".join(f"{name} {found['right']}" for name, found in summary["rivals"].items())
    yield Line(
        f"`accel profile`: cause named right in {summary['cases']} scripts, {summary['controls']} of them healthy",
        rivals,
        f"{summary['right']}; savings told within 10 points: "
        f"{summary['predictions_within']} of {summary['predictions']}",
        "docs/profiler.md",
    )


def _loaders(result: Result) -> Iterator[Line]:
    rows = {(row["job"], row["loader"]): row for row in result["rows"]}
    chosen = {
        "2,000 small images, 3 ms step": "continuous, auto",
        "500 small JPEG, 12 ms step": "continuous, auto",
        "512 JPEG 500x375 to 224x224, 30 ms step": "ImageDataset: continuous, auto",
        "60,000 tiny samples, no step": "continuous, auto",
        "256 samples from far away, 3 ms step": "continuous, auto",
        "2,000 small images, no step, forkserver": "continuous, forkserver(2)",
        "epochs of 8 batches, trivial samples, 3 GB parent, 8 workers": "continuous, fork(8)",
    }
    for job, loader in chosen.items():
        row = rows.get((job, loader))
        if row is not None:
            baseline, against = _baseline([each for (other, _), each in rows.items() if other == job])
            yield Line(f"`ContinuousLoader`: {job}", against, _over(baseline, row), "docs/loader.md")
    firsts = [row["first_most_ms"] for (job, loader), row in rows.items() if (job, loader) in chosen.items()]
    yield Line(
        "longest wait for the first batch of an epoch, all of those", "", f"{max(firsts):.1f} ms", "docs/loader.md"
    )


def _baseline(rows: list[Result]) -> tuple[Result, str]:
    """Return what a job's loaders are compared with, and its name: the fastest, if numbers of workers were tried."""
    numbers = {row["loader"]: re.fullmatch(r"DataLoader, (\d+) persistent workers", row["loader"]) for row in rows}
    tried = [found[1] for found in numbers.values() if found]
    if len(tried) < 2:
        return rows[0], rows[0]["loader"]
    best = min((row for row in rows if numbers[row["loader"]]), key=lambda row: float(row["epoch_s"]))
    return best, f"{best['loader']}, the best of {', '.join(tried)}"


def _over(baseline: Result, row: Result) -> str:
    if baseline["speedup_low"] == baseline["speedup_high"] == 1.0:
        return _times(row["speedup"], row["speedup_low"], row["speedup_high"])
    # Ratios within a turn were recorded over another loader: the widest that the turns' times allow is told.
    return _times(
        baseline["epoch_s"] / row["epoch_s"],
        baseline["epoch_low_s"] / row["epoch_high_s"],
        baseline["epoch_high_s"] / row["epoch_low_s"],
    )


def _jpeg(result: Result) -> Iterator[Line]:
    for row in result["rows"]:
        if row["job"] == "resize" and row["way"] in ("DataLoader, Pillow", "SPDL, OpenCV", "DALI on the CPU"):
            ratio = row["cpu_ratio"]
            figure = _times(ratio["value"], ratio["low"], ratio["high"])
            yield Line("JPEG 500x375 to 224x224, CPU time", row["way"], figure, "docs/images.md")


def _lengths(result: Result) -> Iterator[Line]:
    padded = [row for row in result["rows"] if row["padded"]]
    for lengths in dict.fromkeys(row["lengths"] for row in padded):
        found = {row["policy"]: row["efficiency"] for row in padded if lengths == row["lengths"]}
        ours = max(value for name, value in found.items() if name.startswith("ours"))
        figure = f"{ours:.0%} against {found['DistributedSampler']:.0%} of the ranks' time spent on tokens"
        what = f"length-balanced padded batches, 8 ranks, {lengths}"
        yield Line(what, "`DistributedSampler`", figure, "docs/samplers.md")


def _simota(result: Result) -> Iterator[Line]:
    race = result["cpu"]
    figure = _times(race["ratio"], race["ratio_p20"], race["ratio_p80"])
    yield Line("SimOTA, 16 images of 640x640, 50 boxes", "the published loop", figure, "docs/kernels.md")


def _fcos(result: Result) -> Iterator[Line]:
    race = result["ratios"]["FCOS3D, 10 boxes, against range"]
    figure = _times(race["ratio"], race["low"], race["high"])
    yield Line("FCOS3D targets, 8 images, 30,929 points", "MMDetection3D's code", figure, "docs/kernels.md")


def _hooks(result: Result) -> Iterator[Line]:
    chosen = {
        ("2x2", "100mbit"): ("hierarchical exact", "hierarchical int8"),
        ("2x1", "100mbit"): ("int8", "1-bit", "powersgd", "dgc"),
        ("2x1", "1gbit"): ("powersgd",),
    }
    rows = {(row["shape"], row["rate"], row["method"]): row for row in result["rows"]}
    for (shape, rate), methods in chosen.items():
        for row in (rows[shape, rate, method] for method in methods if (shape, rate, method) in rows):
            figure = _times(row["speedup"], row["speedup_low"], row["speedup_high"])
            what = f"gradients by `{row['method']}`, {shape} hosts x ranks, {rate}, 100 MB: time of a step"
            yield Line(what, "DDP", figure, "docs/comm_figures.md")


def _choice(result: Result) -> Iterator[Line]:
    names = {"resnet": "ResNet-50", "vgg": "VGG-16", "bert": "BERT-base"}
    for row in result["rows"]:
        if row["model"] in names and row["method"] == "auto lossy":
            figure = _times(row["speedup"], row["speedup_low"], row["speedup_high"])
            what = f"gradients of {names[row['model']]}, {row['shape']} hosts x ranks, {row['rate']}, chosen by itself"
            yield Line(f"{what}: time of a step", "DDP", figure, "docs/comm_figures.md")


SOURCES: tuple[tuple[str, Callable[[Result], Iterator[Line]]], ...] = (
    ("never-slower-reordered-*.json", _never_slower),
    ("fault-matrix-cpu-*.json", _faults),
    ("loaders-cpu-*.json", _loaders),
    ("jpeg-cpu-*.json", _jpeg),
    ("length-balance-cpu-*.json", _lengths),
    ("comm-hooks-cpu-*.json", _hooks),
    ("comm-choice-cpu-*.json", _choice),
    ("simota-cpu-*.json", _simota),
    ("fcos-targets-cpu-*.json", _fcos),
)
