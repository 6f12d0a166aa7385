"""The report of a run, with its words: printed, saved as JSON or as a page, shown in a notebook, and read again."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from accel.errors import ReportError
from accel.files import write_atomic
from accel.profiler.report import KIND, SCHEMA, ProfileReport, from_object
from accel.profiler.typed_json import UnreadableJson, decode, read
from accel.report.model import RunReport


class Report(RunReport):
    """Everything that accel reports about one run.

    Times are in ms or s as the names say; `anatomy_*` map a phase of the step to its median ms.
    """

    def verdict(self) -> str:
        """Return the outcome in one line, speed first."""
        from accel.report.words import run_verdict_text

        return run_verdict_text(self)

    def kept_text(self) -> str:
        """Return what was kept in trials of its own, with its gains, in one line."""
        from accel.report.words import kept_text

        return kept_text(self)

    def to_json(self) -> str:
        """Return the report as JSON, with what to do next."""
        from accel.report.next_step import after_run

        self.next_step = after_run(self)
        return super().to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, or as a self-contained web page if `path` ends in `.html`; whole or not at all."""
        if str(path).endswith(".html"):
            from accel.report.rendering import as_page

            write_atomic(path, as_page(self))
        else:
            write_atomic(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report written by `save`.

        Raises:
            ReportError: if the file is no JSON, is of another kind or schema, or lacks a field.
        """
        report = load(path)
        if not isinstance(report, cls):
            raise ReportError(
                f"{path} is a report of `accel profile`, not of accel.optimize; read it with `accel report`."
            )
        return report

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own: its styles are not the notebook's."""
        from accel.report.rendering import as_page

        return f'<iframe srcdoc="{escape(as_page(self))}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def __str__(self) -> str:
        from accel.report.rendering import as_text

        return as_text(self)


def load(path: str | os.PathLike[str]) -> Report | ProfileReport:
    """Read the report in a file; its field `kind` says of which kind it is.

    Raises:
        ReportError: if the file can't be read, is no JSON, or is no whole report of a schema that this version knows.
    """
    try:
        raw = decode(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{path} can't be read as a report: {error}. "
            f"Make one with `accel profile`, or with report={str(path)!r} of accel.optimize."
        ) from None
    if isinstance(raw, dict) and raw.get("kind") == KIND:
        try:
            return from_object(raw)
        except UnreadableJson as error:
            raise ReportError(
                f"{path} is not a whole profile report: {error}. Make it again with `accel profile`."
            ) from None
    return _of_optimize(raw, path)


def _of_optimize(raw: Any, path: str | os.PathLike[str]) -> Report:
    schema = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
    if schema != SCHEMA:
        raise ReportError(
            f"{path} must have report schema {SCHEMA}, found {schema!r}; make it again with this version."
        )
    try:
        # Every report has these: without them, a file is something else that has a schema.
        return read(Report, raw, "report", required=("machine", "rows", "events"))
    except UnreadableJson as error:
        raise ReportError(f"{path} is not a whole report: {error}. Make it again with this version.") from None
