"""Whole searches on a GPU: what each kept, and what that gave over which plain loop."""

from __future__ import annotations

import re

from benchmarks.render import Cell, Row, block

MODELS = {"bert": "BERT-base", "gpt": "GPT-2", "resnet": "ResNet-50", "swin": "Swin-T"}
TF32 = ("resnet",)
"""Models whose products are convolutions: torch's default for them is TF32, and IEEE float32 for all others."""
_INTERVAL = re.compile(r"\d+\.\d+x \[[^]]+\]")


def rows(result: Row) -> list[Row]:
    """Return the searches of a record, in the order in which they were made; the last that kept the same is marked."""
    searched = [row for row in result["rows"] if row["variant"] != "plain"]
    found = [_row({**row, "command": _filled(result["command"], row)}, row["variant"]) for row in searched]
    for row in result["again"]["searches"]:
        found.append(_row(row, row["variant"]))
        second = _INTERVAL.search(result["again"]["search_of_125_s"])
        if round(row["end_s"]) == 125 and not found[-1]["figure"] and second:
            found[-1].update(kept="nothing by the first search, `pin_memory` by a second", figure=second[0])
    for row in (result["later"], result["day_after"]):
        whole = _INTERVAL.match(row["verdict"])
        found.append(_row({"model": "bert", **row}, "reduced", whole[0] if whole else ""))
    last = {(row["model"], row["kept"]): row for row in found if row["figure"]}
    return [{**row, "is_last": row is last.get((row["model"], row["kept"]))} for row in found]


def _filled(command: str, row: Row) -> str:
    """Return the command that was recorded for several searches, with what it says of this one."""
    return command.partition(" (")[0].replace("MODEL", row["model"]).replace("VARIANT", row["variant"])


def _row(row: Row, allow: str, whole: str = "") -> Row:
    kept = [each for each in row["strategies"] if each["status"] == "kept"]
    tried = any(each["status"] == "undone" for each in row["strategies"])
    names = ", ".join(f"`{each['name']}`" for each in kept)
    return {
        "model": MODELS[row["model"]],
        "allow": allow,
        "seconds": row["end_s"],
        "kept": names or ("nothing" if tried else "nothing, nothing was tried"),
        "figure": whole or ", ".join(f"{each['gain']:.2f}x in its own trial" for each in kept),
        "baseline": f"{'float32 in TF32' if row['model'] in TF32 else 'IEEE float32'} (torch's default)",
        "command": row.get("command"),
    }


def searches_block(result: Row) -> str:
    """Return the table of all searches."""
    head = f"{result['date']} and the day after, {result['machine']}, torch {result['torch']}; one process each. "
    head += "A search without a command has none on record."
    columns: dict[str, Cell] = {
        "model": "{model}",
        "`allow`": "{allow}",
        "s": "{seconds:.0f}",
        "kept": "{kept}",
        "over the plain loop": lambda row: row["figure"] or None,
        "which is": "{baseline}",
        "command": lambda row: row["command"] and f"`{row['command']}`",
    }
    return block(head, columns, rows(result))
