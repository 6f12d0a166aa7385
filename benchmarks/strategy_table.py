"""What each strategy won and lost on each model of the suite, from the reports of whole processes.

`python -m benchmarks.end_to_end --record` writes it: each process with accel hands its report on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Cell, Row, block
from benchmarks.spread import geometric_mean

RECORD = Record(
    "strategy-gains",
    "gain of each strategy in its own trial, as accel's report has it: step without ÷ step with it",
    {
        "model": Column("of the suite"),
        "variant": Column('"first" or "second" run, or what was allowed'),
        "allow": Column("of accel.optimize"),
        "size": Column('"tiny" or "full"'),
        "data": Column('"synthetic" or "real"'),
        "strategy": Column("by its name"),
        "status": Column("kept, undone, inconclusive, not tried, not applicable, not allowed"),
        "setting": Column("kept or tried last"),
        "gain": Column("in its own trial; none without one"),
        "gain_low": Column("of its interval"),
        "gain_high": Column("of its interval"),
        "why": Column("the report's reason"),
    },
    key=("model", "variant", "strategy"),
)
_TRIED = ("kept", "undone", "inconclusive", "refused")  # the last is what records before version 0.1.0 call it


def rows_of(process: Row, report: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a process.

    Args:
        process: its row of `benchmarks.end_to_end`.
        report: the rows of accel's report; empty without accel.
    """
    shared = {name: process[name] for name in ("model", "variant", "allow", "size", "data")}
    columns = ("status", "setting", "gain", "gain_low", "gain_high", "why")
    return [{**shared, "strategy": row["name"], **{name: row[name] for name in columns}} for row in report]


def table_block(result: Row) -> str:
    """Return a table of strategies by models, from first runs: there each is tried."""
    rows = [row for row in result["rows"] if row["variant"] == "first" and row["status"] in _TRIED]
    models = list(dict.fromkeys(row["model"] for row in rows))
    strategies: dict[str, dict[str, Row]] = {}
    for row in rows:
        strategies.setdefault(row["strategy"], {})[row["model"]] = row
    head = (
        f"{SOURCE.format_map(result)}. Gain of each strategy in its own trial in first runs, on top of what was kept "
        "before it; bold where it was kept, ? where the trial could not decide. Empty where it did not apply "
        "or was not tried."
    )
    columns: dict[str, Cell] = {
        "strategy": "`{name}`",
        "kept": lambda line: f"{len(_gains(line['models'], 'kept'))} of {len(line['models'])}",
        "mean where kept": lambda line: _mean(_gains(line["models"], "kept")),
        **{model: _cell(model) for model in models},
    }
    lines = [{"name": name, "models": by_model} for name, by_model in sorted(strategies.items())]
    return block(head, columns, lines)


def _gains(models: dict[str, Row], status: str) -> list[float | None]:
    return [row["gain"] for row in models.values() if row["status"] == status]


def _mean(gains: Sequence[float | None]) -> str | None:
    measured = [gain for gain in gains if gain is not None]
    return f"{geometric_mean(measured):.2f}x" if measured else None


def _cell(model: str) -> Cell:
    def cell(line: Row) -> str | None:
        row = line["models"].get(model)
        if row is None:
            return None
        gain = "failed" if row["gain"] is None and row["status"] == "undone" else "-"
        gain = f"{row['gain']:.2f}x" if row["gain"] is not None else gain
        return {"kept": f"**{gain}**", "undone": gain}.get(row["status"], f"{gain} ?")

    return cell
