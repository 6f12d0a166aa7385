"""The tables of docs/gpu.md, made from what `make gpu` has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.render import Cell, Row, block, table

_JUDGED = {True: "met", False: "**missed**", None: "not measured"}


def judged_block(result: Row) -> str:
    """Return the targets, and what was found of each."""
    head = f"{_source(result)} Tests: {result['tests']['line'].split(' in ')[0]}."
    columns: dict[str, Cell] = {
        "target": lambda row: row["line"].replace("|", r"\|"),
        "asked": "{asked}",
        "found": _found,
        "": _judged,
    }
    return "\n".join([block(head, columns, result["targets"]), *_runs(result)])


def _source(result: Row) -> str:
    return f"`{result['command']}`, {result['date']}, {result['device']}, torch {result['torch']}."


def _found(row: Row) -> str:
    spread = " [{:.3g}, {:.3g}]".format(*row["spread"]) if row.get("spread") else ""
    return "" if row["found"] is None else f"{row['found']:.3g}{spread}"


def _judged(row: Row) -> str:
    return _JUDGED[row["met"]]


def _runs(result: Row) -> Iterator[str]:
    """Say of which sections the figures are from another run, and which did not end."""
    for name, section in result.items():
        if isinstance(section, dict):
            said = [section[key] for key in ("run", "failed") if key in section]
            if said:
                yield f"\n{name}: {'; '.join(said)}."


def windows_block(result: Row) -> str:
    """Return window attention's times beside those of its rivals."""
    section = result["window_attention"]
    shown = [row for row in section["rows"] + section.get("large_windows", []) if "failed" not in row]
    columns: dict[str, Cell] = {
        "window, batch": "{window}, {batch}",
        "op": "{op}",
        "forward µs": _us("forward_device_ms"),
        "both ways µs": _us("both_device_ms"),
        "share of roofline, both": lambda row: f"{row['roofline_both']:.0%}",
        "launched, both µs": _us("both_ms"),
    }
    head = f"{_source(result)} Device time: replays of a graph over inputs that no cache holds; 20 to 80 % of them."
    return block(head, columns, sorted(shown, key=lambda row: (len(row["window"]), row["window"], row["batch"])))


def _us(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        median, low, high = (row[name][key] * 1e3 for key in ("median", "low", "high"))
        digits = 1 if median < 100 else 0
        return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    return cell


def assignment_block(result: Row) -> str:
    """Return target assignment's times beside the published loops'."""
    section, found = result["assignment"], list[str]()
    fcos: dict[str, Cell] = {
        "op, boxes": "{op}, {boxes}",
        "device µs": _us("ours_device_ms"),
        "launched µs": _us("ours_ms"),
        "published, range index, ms": lambda row: f"{row['range_ms']['median']:.1f}",
        "published, tensor index, ms": lambda row: f"{row['arange_ms']['median']:.1f}",
    }
    simota: dict[str, Cell] = {
        "images": "{images}",
        "device µs": _us("device_ms"),
        "launched µs": _us("ms"),
        "published loop ms": _rival("loop"),
        "vectorised ms": _rival("plain"),
    }
    found += [_source(result), "", "FCOS and FCOS3D, 8 images of 30,929 points:", "", *table(fcos, section["fcos"])]
    found += ["", "SimOTA, 640 x 640, 100 boxes an image:", "", *table(simota, section["simota"])]
    return "\n".join(found)


def _rival(name: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        rival = row.get("rivals", {}).get(name)
        return None if rival is None else rival["failed"] if "failed" in rival else f"{rival['median']:.1f}"

    return cell


def training_block(result: Row) -> str:
    """Return optimizers, captured steps and mixed precision."""
    optimizers: dict[str, Cell] = {
        "100 M parameters": "{op}",
        "device µs": _us("device_ms"),
        "share of bandwidth": lambda row: f"{row['roofline']:.0%}",
        "against": lambda row: ", ".join(f"{name}: {times:.2f}x" for name, times in row["speedup"].items()) or None,
    }
    graphs: dict[str, Cell] = {
        "model": "{model}",
        "captured step ms": lambda row: f"{row['ms']['captured']:.2f}",
        "over eager": _over("eager"),
        "over a captured model alone": _over("model"),
        'over `torch.compile(mode="reduce-overhead")`': _over("reduce-overhead"),
    }
    newer = {"over the same of the whole step": "step, reduce-overhead", "over a graph by hand": "graph by hand"}
    raced = {rival for row in result.get("graphs", {}).get("rows", []) for rival in row.get("speedup", {})}
    graphs |= {heading: _over(rival) for heading, rival in newer.items() if rival in raced}
    mixed: dict[str, Cell] = {
        "dtype": "{dtype}",
        "autocast ms": lambda row: f"{row['ms']['autocast']:.1f}",
        "O2 ms": lambda row: f"{row['ms']['O2']:.1f}",
        "speed-up": "{speedup:.2f}x",
        "memory": lambda row: f"{row['memory']:.0%}",
    }
    parts: list[tuple[str, str, dict[str, Cell]]] = [
        ("optimizers", "Optimizers:", optimizers),
        ("graphs", "A small MLP and a small transformer, forward, backward and AdamW:", graphs),
        ("mixed_precision", "BERT-base:", mixed),
    ]
    found = [_source(result)]
    for name, words, columns in parts:
        rows: list[Any] = [row for row in result.get(name, {}).get("rows", []) if "failed" not in row]
        found += ["", words, "", *table(columns, rows)] if rows else []
    return "\n".join([*found, *_parts_of_steps(result.get("mixed_precision", {}))])


def _parts_of_steps(section: Row) -> list[str]:
    """Return what the device does in a step of BERT-base, under autocast and at O2."""
    ways: dict[str, Row] = {
        f"{dtype}, {way}": ms for dtype, own in section.get("parts", {}).items() for way, ms in own.items()
    }
    if not ways:
        return []
    names = list(dict.fromkeys(name for ms in ways.values() for name in ms))
    columns: dict[str, Cell] = {"ms of the device": "{part}", **{way: _of_part(ways[way]) for way in ways}}
    return [
        "",
        "What a step of it consists of, by torch's profiler:",
        "",
        *table(columns, [{"part": name} for name in names]),
    ]


def _of_part(ms: Row) -> Callable[[Row], str | None]:
    return lambda row: f"{ms[row['part']]:.1f}" if row["part"] in ms else None


def to_target_block(result: Row) -> str:
    """Return how long jobs take to their targets, by who chooses the batch."""
    section = result["to_target"]
    columns: dict[str, Cell] = {
        "job": "{job}",
        "batch": "{variant}",
        "s": lambda row: f"{row['seconds'][0]:.1f}" + ("" if row["reached"] else ", target missed"),
        "samples": lambda row: f"{row['samples']:,.0f}",
        "steps": lambda row: f"{row['steps']:,.0f}",
        "times as fast as x1": _ratio("against_start"),
        "as the best fixed": _ratio("against_best"),
    }
    command, day = "python -m benchmarks.gpu --only to_target", section.get("run", result["date"])
    head = f"`{command}`, {day}, {result['device']}, torch {result['torch']}."
    return block(head, columns, section["comparison"])


def _ratio(name: str) -> Callable[[Row], str | None]:
    return lambda row: f"{row[name][0]:.2f}x" if row[name] else None


def gradients_block(result: Row) -> str:
    """Return the kernels of gradient compressors."""
    columns: dict[str, Cell] = {
        "op": "{op}",
        "launched µs": _us("ms"),
        "device µs": lambda row: None if row["device_ms"] is None else _us("device_ms")(row),
        "share of bandwidth": lambda row: f"{row['roofline']:.0%}" if row["device_ms"] else None,
        "against": lambda row: ", ".join(f"{name}: {times:.3g}x" for name, times in row["speedup"].items()),
    }
    section = result["gradient_kernels"]
    command = "python -m benchmarks.gpu --only gradient_kernels"
    head = f"`{command}`, {section.get('run', result['date'])}, {result['device']}, torch {result['torch']}."
    return block(head, columns, [row for row in section["rows"] if "failed" not in row])


def _over(rival: str) -> Callable[[Row], str | None]:
    return lambda row: f"{row['speedup'][rival]:.1f}x" if rival in row["speedup"] else None
