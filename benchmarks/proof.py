"""The table of the README that says what each part gives, against what, on how certain a ground."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu import searches
from benchmarks.render import Cell, block, times
from benchmarks.resizing import WAYS
from benchmarks.spread import geometric_mean

Result = dict[str, Any]


class Line(NamedTuple):
    """One row: what was done, against what, the figure, and the page that has all of them."""

    what: str
    against: str
    figure: str
    page: str
    headline: bool = False
    """Whether the front page has it: eight lines do at most."""


COLUMNS: dict[str, Cell] = {
    "": "{what}",
    "against": "{against}",
    "measured [spread]": "{figure}",
    "all figures": "[{page}]({link})",
}


def proof_block(newest: Callable[[str], Result | None]) -> str:
    """Return the front page's table; `newest` finds the newest result of a name."""
    return _table(newest, "docs/", lambda line: line.headline)


def figures_block(newest: Callable[[str], Result | None]) -> str:
    """Return the table of the page of figures: every line."""
    return _table(newest, "", lambda line: True)


def _table(newest: Callable[[str], Result | None], folder: str, chosen: Callable[[Line], bool]) -> str:
    results = [(result, read) for name, read in SOURCES.items() if (result := newest(name)) is not None]
    shown = [(result, own) for result, read in results if (own := [line for line in read(result) if chosen(line)])]
    dates, machines = {result["date"] for result, _ in shown}, {_machine(result) for result, _ in shown}
    on_cpu, on_gpu = (sorted(each for each in machines if each.startswith("NVIDIA") == is_gpu) for is_gpu in (0, 1))
    head = f"Recorded {' to '.join(sorted({min(dates), max(dates)}))} on {' and '.join(on_cpu)}"
    head += f"; where a line says so, on {' and '.join(on_gpu)}." if on_gpu else "."
    lines = (line for _, own in shown for line in own)
    return block(head, COLUMNS, ({**line._asdict(), "link": folder + line.page} for line in lines))


def _machine(result: Result) -> str:
    machine = result.get("machine", result.get("device"))  # the latter of the GPU suite
    name = str(machine["device"] if isinstance(machine, dict) else machine)
    return name.partition(",")[0] if name.startswith("NVIDIA") else f"{name}, 2 cores"


def _times(row: Result, name: str = "speedup", low: str = "", high: str = "") -> str:
    digits = 2 if row[name] < 10 else 1 if row[name] < 100 else 0
    return times(name, low, high, digits).format_map(row)


def _demo(result: Result) -> Iterator[Line]:
    for name, allow in (("default", "reordered"), ("reduced", "reduced")):
        figure = _times(result["variants"][name], "speedup", "low", "high")
        what = f'`make demo`: `optimize(allow="{allow}", budget=5)` on a small CNN, Fashion-MNIST: time of a step'
        yield Line(what, "the plain loop", figure, "figures.md")


def _never_slower(result: Result) -> Iterator[Line]:
    ratios = [loop["ratio"] for loop in result["loops"]]
    yield Line(
        f"`optimize` on {len(ratios)} loops of all kinds: time of a step",
        "the plain loop",
        f"{min(ratios):.2f} to {max(ratios):.3f} of it",
        "figures.md",
    )


def _end_to_end(result: Result) -> Iterator[Line]:
    rows, included = result["rows"], "search and imports included"
    for variant in ("first", "second"):
        chosen = [row for row in rows if row.get("variant") == variant]
        if not chosen:
            continue
        ratios = [row["ratio"] for row in chosen]
        lasted = [row["seconds"] for row in chosen]
        seconds = " to ".join(f"{each:.0f}" for each in dict.fromkeys((min(lasted), max(lasted))))
        what = f"`optimize` on {len(ratios)} models, {variant} run: steps of a process in {seconds} s, {included}"
        figure = (
            f"{geometric_mean(ratios):.2f}x, median {median(ratios):.2f}x, {min(ratios):.2f}x to {max(ratios):.2f}x"
        )
        yield Line(what, "the plain loop", figure, "figures.md", headline=variant == "second")
    for row in rows:
        if row.get("variant", "first") == "first":
            figure = _times(row, "ratio", "low", "high")
            what = f"`optimize` on {row['model']}: steps of a process in {row['seconds']:.0f} s, {included}"
            alone = "variant" not in row and row["model"] == "ncf"  # before the whole suite was recorded
            yield Line(what, "the plain loop", figure, "figures.md", headline=alone)


def _faults(result: Result) -> Iterator[Line]:
    summary = result["summary"]
    yield Line(
        "`accel profile`: cause named right in {cases} scripts, {controls} of them healthy".format_map(summary),
        ", ".join(f"{name} {rival['right']}" for name, rival in summary["rivals"].items()),
        "{right}; savings estimated within 10 points: {predictions_within} of {predictions}".format_map(summary),
        "profiler.md",
        headline=True,
    )


LOADERS = (
    ("2,000 small images, 3 ms step", "continuous, auto"),
    ("500 small JPEG, 12 ms step", "continuous, auto"),
    ("512 JPEG 500x375 to 224x224, 30 ms step", "continuous, auto"),
    ("512 JPEG 500x375 to 224x224, 30 ms step", "ImageDataset: continuous, auto"),
    ("60,000 tiny samples, no step", "continuous, auto"),
    ("256 samples from far away, 3 ms step", "continuous, auto"),
    ("2,000 small images, no step, forkserver", "continuous, forkserver(2)"),
    ("epochs of 8 batches, trivial samples, 3 GB parent, 8 workers", "continuous, fork(8)"),
)
"""Jobs, and the loader whose row is shown."""


def _loaders(result: Result) -> Iterator[Line]:
    rows = {(row["job"], row["loader"]): row for row in result["rows"]}
    shown = {key: rows[key] for key in LOADERS if key in rows}
    for (job, loader), row in shown.items():
        baseline, against = _baseline([other for other in result["rows"] if other["job"] == job])
        persistent = rows.get((job, baseline["loader"].replace(" workers", " persistent workers")))
        if persistent is not None:
            against += f" (persistent ones: {_times(persistent).partition(' ')[0]})"
        what = "`ContinuousLoader` and `ImageDataset`" if loader.startswith("ImageDataset") else "`ContinuousLoader`"
        is_first = (job, loader) == LOADERS[0]
        yield Line(f"{what}: {job}", against, _over(baseline, row), "loader.md", headline=is_first)
    most = max(row["first_most_ms"] for row in shown.values())
    yield Line("longest wait for the first batch of an epoch, all of those", "", f"{most:.1f} ms", "loader.md")


def _baseline(rows: list[Result]) -> tuple[Result, str]:
    """Return what a job's loaders are compared with, and its name: the fastest, if numbers of workers were tried."""
    matches = [(row, re.fullmatch(r"DataLoader, (\d+) persistent workers", row["loader"])) for row in rows]
    tried = [(row, match[1]) for row, match in matches if match]
    if len(tried) < 2:
        return rows[0], rows[0]["loader"]
    best = min((row for row, _ in tried), key=lambda row: float(row["epoch_s"]))
    return best, f"{best['loader']}, the best of {', '.join(number for _, number in tried)}"


def _over(baseline: Result, row: Result) -> str:
    if baseline["speedup_low"] == baseline["speedup_high"] == 1.0:
        return _times(row)
    # Ratios within a turn were recorded over another loader: the widest that the turns' times allow is shown.
    widest = {
        "speedup": baseline["epoch_s"] / row["epoch_s"],
        "speedup_low": baseline["epoch_low_s"] / row["epoch_high_s"],
        "speedup_high": baseline["epoch_high_s"] / row["epoch_low_s"],
    }
    return _times(widest)


def _jpeg(result: Result) -> Iterator[Line]:
    for row in result["rows"]:
        if row["job"] == "resize" and row["way"] in ("DataLoader, Pillow", "SPDL, OpenCV", "DALI on the CPU"):
            ratio = _times(row["cpu_ratio"], "value", "low", "high")
            yield Line("JPEG 500x375 to 224x224, CPU time", row["way"], ratio, "images.md")


def _lengths(result: Result) -> Iterator[Line]:
    padded = [row for row in result["rows"] if row["padded"]]
    for lengths in dict.fromkeys(row["lengths"] for row in padded):
        shares = {row["policy"]: row["efficiency"] for row in padded if lengths == row["lengths"]}
        ours = max(value for name, value in shares.items() if name.startswith("ours"))
        figure = f"{ours:.0%} against {shares['DistributedSampler']:.0%} of the ranks' time spent on tokens"
        what = f"length-balanced padded batches, 8 ranks, {lengths}"
        yield Line(what, "`DistributedSampler`", figure, "samplers.md")


def _simota(result: Result) -> Iterator[Line]:
    figure = _times(result["cpu"], "ratio", "ratio_p20", "ratio_p80")
    yield Line("SimOTA, 16 images of 640x640, 50 boxes", "the published loop", figure, "kernels.md")


def _fcos(result: Result) -> Iterator[Line]:
    figure = _times(result["ratios"]["FCOS3D, 10 boxes, against range"], "ratio", "low", "high")
    yield Line("FCOS3D targets, 8 images, 30,929 points", "MMDetection3D's code", figure, "kernels.md")


def _gpu(result: Result) -> Iterator[Line]:
    """Yield what was gained on a GPU, nothing where a test failed."""
    if not result["tests"]["green"]:
        return
    device = result["device"].removeprefix("NVIDIA ")
    rows = {(r["window"], r["batch"], r["op"]): r for r in result["window_attention"]["rows"] if "failed" not in r}
    times_of = {op: row["both_device_ms"] for (*shape, op), row in rows.items() if shape == ["7x7", 128]}
    steps = {
        name: _times(dict(zip(("speedup", "low", "high"), found, strict=True)), "speedup", "low", "high")
        for name, found in result.get("training", {}).get("speedup", {}).items()
    }
    if ours := times_of.pop("fused", None):
        rivals = sorted(times_of, key=lambda op: float(times_of[op]["median"]))
        shown = dict.fromkeys([*rivals[:1], *(op for op in rivals if op == "timm fused")])
        words = "; ".join(RIVALS.get(op, op) + (", the best rival" if op == rivals[0] else "") for op in shown)
        figure = "; ".join(_faster(times_of[op], ours) for op in shown)
        what = f"Swin window attention on {device}, 128 images, forward and backward"
        if step := steps.get("fused over compile"):
            what, words = f"{what}; a whole step of Swin-T with it", f"{words}; the step: `torch.compile` alone"
            figure = f"{figure}; {step}"
        yield Line(what, words, figure, "gpu.md", headline=True)
    if step := steps.get("both over compile"):
        what = f"a whole step of Swin-T on {device} with it, and compiled"
        yield Line(what, "`torch.compile` alone", step, "gpu.md")
    for row in result["assignment"]["simota"]:
        for rival, words in (("loop", "the published loop"), ("plain", "the same, vectorised")):
            theirs = row.get("rivals", {}).get(rival, {"failed": ""})
            if "failed" not in theirs:
                what = f"SimOTA on {device}, {row['images']} images of 640x640, 100 boxes"
                yield Line(what, words, _faster(theirs, row["ms"]), "gpu.md")


RIVALS = {"timm fused": "timm's fused path", "compile": "`torch.compile`"}
"""Rivals of window attention, in words."""


def _searches(result: Result) -> Iterator[Line]:
    """Yield what whole searches on a GPU gave, by their closing trials, and otherwise by those of what was kept."""
    device = _machine(result).removeprefix("NVIDIA ")
    for row in reversed(searches.rows(result)):
        if row["figure"]:
            what = f'`optimize(allow="{row["allow"]}")` on {row["model"]}, {device}, {row["seconds"]:.0f} s'
            what += f": {row['kept']}"
            yield Line(
                what,
                f"the plain loop, {row['baseline']}",
                row["figure"],
                "gpu.md",
                headline=row["is_last"] and "[" in row["figure"] and "nothing" not in row["kept"],
            )


def _faster(theirs: Result, ours: Result) -> str:
    """Return how many times as fast, and the least and the most by the spreads of both."""
    ratio, low, high = (
        theirs[there] / ours[here] for there, here in (("median", "median"), ("low", "high"), ("high", "low"))
    )
    return _times({"speedup": ratio, "low": low, "high": high}, "speedup", "low", "high")


HOOKS = (
    ("2x2", "100mbit", "hierarchical exact"),
    ("2x2", "100mbit", "hierarchical int8"),
    ("2x1", "100mbit", "int8"),
    ("2x1", "100mbit", "1-bit"),
    ("2x1", "100mbit", "powersgd"),
    ("2x1", "100mbit", "dgc"),
    ("2x1", "1gbit", "powersgd"),
)
"""Hosts x ranks, link and method of the rows that are shown."""


def _hooks(result: Result) -> Iterator[Line]:
    rows = {(row["shape"], row["rate"], row["method"]): row for row in result["rows"]}
    for key in (key for key in HOOKS if key in rows):
        what = "gradients by `{method}`, {shape} hosts x ranks, {rate}, 100 MB: time of a step".format_map(rows[key])
        yield Line(what, "DDP", _times(rows[key]), "comm_figures.md")


def _choice(result: Result) -> Iterator[Line]:
    names = {"resnet": "ResNet-50", "vgg": "VGG-16", "bert": "BERT-base"}
    for row in result["rows"]:
        if row["model"] in names and row["method"] == "auto lossy":
            model, first = names[row["model"]], row["model"] == "resnet"
            where = f"{row['shape']} hosts x ranks, {row['rate']}"
            what = f'gradients as of {model}, {where}, `allow="lossy"` ({row["chosen"]} chosen): time of a step'
            yield Line(what, "DDP", _times(row), "comm_figures.md", headline=first)


def _resizing(result: Result) -> Iterator[Line]:
    rows = {(row["way"], row["change"]): row for row in result["rows"]}
    anew, kept = WAYS.values()
    for change in dict.fromkeys(change for _, change in rows):
        what = f"`LocalJob(in_place=True)`, {change} ranks: time that the job stands still"
        before = "all started anew, {gap_s:.2f} s {gap}".format_map(rows[anew, change])
        yield Line(what, before, "{gap_s:.2f} s {gap}".format_map(rows[kept, change]), "checkpoints.md")


SOURCES: dict[str, Callable[[Result], Iterator[Line]]] = {
    "searches": _searches,
    "gpu": _gpu,
    "demo": _demo,
    "never-slower-reordered": _never_slower,
    "end-to-end": _end_to_end,
    "fault-matrix": _faults,
    "loaders": _loaders,
    "jpeg": _jpeg,
    "length-balance": _lengths,
    "comm-hooks": _hooks,
    "comm-choice": _choice,
    "resizing": _resizing,
    "simota": _simota,
    "fcos-targets": _fcos,
}
"""Result → its lines."""
