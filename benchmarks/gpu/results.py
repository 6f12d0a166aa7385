"""Figures of one device, on disk after each row, and what of them need not be measured again.

The file is written twice: where the results go, and in the cache folder, in which the next call on the same machine
finds what the earlier ones have measured.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from accel.files import write_atomic
from benchmarks.gpu import targets
from benchmarks.gpu.sections import LIBRARY, SECTIONS
from benchmarks.record import FOLDER, ROOT, replaced
from benchmarks.render import Row

SHOWN = ("tests", "window_attention", "assignment", "gradient_kernels", "to_target")
"""Without these a file is no source of the manual's tables."""


@functools.cache
def sources(*paths: str) -> str:
    """Return a hash of the Python files at or below these paths of the repository."""
    hashed = hashlib.sha256()
    for path in (ROOT / each for each in paths):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            hashed.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()[:12]


def header(command: str) -> Row:
    """Return what was run where."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def recorded(like: Row) -> Row:
    """Return the sections that were recorded last with such a device and torch; each says of which day it is."""
    results: list[Row] = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("gpu-*.json")]
    same = [row for row in results if all(row.get(name) == like[name] for name in ("device", "torch"))]
    last = max(same, key=lambda row: str(row["date"]), default={})
    tested = {"tests": last["tests"]} if _are_tested(last) else {}
    return tested | {name: {"run": last["date"], **last[name]} for name in SECTIONS if name in last}


def is_green(figures: Row) -> bool:
    """Return whether all tests passed, of the sources as they are."""
    return bool(figures.get("tests", {}).get("green")) and _are_tested(figures)


def _are_tested(figures: Row) -> bool:
    return bool(figures.get("tests", {}).get("sources") == sources(*LIBRARY, "tests"))


class Results:
    """All figures of a device so far.

    Args:
        figures: the header, and what is known already.
        paths: the files that hold them.

    Attributes:
        figures: what the files hold.
    """

    def __init__(self, figures: Row, paths: Sequence[Path]) -> None:
        self.figures, self._paths = figures, paths

    @classmethod
    def opened(cls, command: str, out: Path, cache: Path) -> Results:
        """Return those of this device, with what the last call on this machine has left in the cache folder."""
        now, kept = header(command), cache / "figures.json"
        earlier: Row = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        if not all(earlier.get(name) == now[name] for name in ("device", "torch")):
            earlier = recorded(now)
        kind = re.split(r"\W", now["device"].removeprefix("NVIDIA "))[0].lower()
        return cls({**earlier, **now}, (out / f"gpu-{kind}-{now['date']}.json", kept))

    def put(self, name: str, value: Any) -> None:
        """Take in the figures of a section, judge them if it has targets or these sources were tested, and write."""
        self.figures[name] = value
        if name in targets.SECTIONS or _are_tested(self.figures):
            self.figures["targets"] = targets.judged(self.figures, is_green(self.figures))
        self.figures.setdefault("targets", [])
        self.figures["partial"] = not all(
            {*self.figures.get(shown, {})} - {"failed", "sources", "seconds"} for shown in SHOWN
        )
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(self.figures, indent=1) + "\n")

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a section."""
        rows: list[Row] = self.figures.get(name, {}).get("rows", [])
        return rows

    def add(self, name: str, row: Row, key: Sequence[str]) -> None:
        """Take in a row in the place of an older one about the same, and write."""
        self.put(name, {**self.figures.get(name, {}), "rows": replaced(self.rows(name), [row], key)})

    def has(self, name: str, about: Mapping[str, Any]) -> bool:
        """Tell whether there is a row with these columns that did not fail."""
        return any("failed" not in row and about.items() <= row.items() for row in self.rows(name))

    def is_known(self, name: str) -> bool:
        """Tell whether a section has been measured to its end, of the sources as they are."""
        figures = self.figures.get(name, {})
        return "failed" not in figures and figures.get("sources") == sources(*SECTIONS[name].sources)
