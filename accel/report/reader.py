"""Read a report of either kind: of a run under `accel.optimize`, or of a profiled one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accel.errors import ReportError
from accel.profiler.report import KIND, SCHEMA, ProfileReport, from_object
from accel.profiler.typed_json import UnreadableJson, decode, read
from accel.report.model import Report


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
