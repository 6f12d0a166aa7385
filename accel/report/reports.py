"""Read a report of either kind: of a run under `accel.optimize`, or of a profiled one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from accel.errors import ReportError
from accel.profiler.report import KIND, ProfileReport, UnreadableReport, from_json
from accel.report.model import Report


def load(path: str | os.PathLike[str]) -> Report | ProfileReport:
    """Read the report in a file; its field `kind` says of which kind it is.

    Raises:
        ReportError: if the file can't be read, is no JSON, or is no whole report of a schema that this version knows.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        held = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(
            f"{path} can't be read as a report: {error}. "
            f"Make one with `accel profile`, or with report={str(path)!r} of accel.optimize."
        ) from None
    if not isinstance(held, dict) or held.get("kind") != KIND:
        return Report.load(path)
    try:
        return from_json(text)
    except UnreadableReport as error:
        raise ReportError(
            f"{path} is not a whole profile report: {error}. Make it again with `accel profile`."
        ) from None
