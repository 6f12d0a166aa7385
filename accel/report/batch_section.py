"""The part of the report on the batch size: what was decided, what was predicted and what came of it."""

from __future__ import annotations

from collections.abc import Iterator

from accel.report import blocks
from accel.report.blocks import Facts, Section, Table, TableCell, TableRow
from accel.report.model import Report
from accel.report.words import finite, ratio_text


def batch_text(report: Report) -> str:
    """Return how the batch size has changed and what that is worth, in one sentence; '' if it stays."""
    if report.max_batch_size is None or not report.batch_rows:
        return report.batch_note
    first, last = report.batch_rows[0], report.batch_rows[-1]
    if report.batch_note:
        return f"{last.batch} samples; {report.batch_note}"
    if first.batch == last.batch:
        return f"{last.batch} samples, as the loop has it: no larger one was shown to be better"
    gain = ""
    if first.measured and last.measured:
        gain = f", {ratio_text(last.measured / first.measured)}x the estimated goodput"
    return f"{first.batch} → {last.batch} samples{gain}"


def batch_section(report: Report) -> Iterator[Section]:
    """Show the changes of the batch size, if it may change."""
    if report.max_batch_size is None:
        return
    numbers = ("step<7", "samples<8", "predicted<10", "measured<9", "noise<8")
    columns = [*blocks.columns(*numbers, whole=True), *blocks.columns("why<0", only="page")]
    rows = [
        TableRow(
            cells=blocks.cells(
                str(row.step),
                TableCell(text=f"{row.batch}{'?' if row.tried else ''}", tone="strong"),
                *(_figure(value) for value in (row.goodput, row.measured, row.noise)),
                row.why or "-",
            ),
            below=row.why,
        )
        for row in report.batch_rows
    ]
    caption = "Goodput in samples per second as if of the loop's own batch; ? was tried; noise: gradient noise scale"
    facts = [("batch size", batch_text(report)), ("at most", f"{report.max_batch_size} samples")]
    if report.progress is not None:
        facts.append(("progress", f"{report.progress:.0f} steps of the loop's own batch"))
    table = [Table(columns=columns, rows=rows, caption=caption)] if rows else []
    yield Section(name="batches", title="batch size", blocks=[Facts(pairs=facts), *table])


def _figure(value: float | None) -> str:
    value = finite(value)
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
