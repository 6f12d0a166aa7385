"""Where figures go: benchmarks/results/NAME-DEVICE-DATE.json, with what they are, how they were made, and on what."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

from accel.files import write_atomic

FOLDER = Path(__file__).parent / "results"


def path(name: str, device: str = "cpu") -> Path:
    """Return today's file."""
    return FOLDER / f"{name}-{device}-{date.today().isoformat()}.json"


def rows(name: str, device: str = "cpu") -> list[dict[str, Any]]:
    """Return the rows that were recorded last; those of another day say which."""
    files = sorted(FOLDER.glob(f"{name}-{device}-*.json"))
    if not files:
        return []
    found = json.loads(files[-1].read_text(encoding="utf-8"))
    own: list[dict[str, Any]] = found["rows"]
    today = date.today().isoformat()
    return own if found["date"] == today else [{"date": found["date"], **row} for row in own]


def write(name: str, what: str, figures: dict[str, Any], *, command: str = "", device: str = "cpu") -> None:
    """Write a result.

    Args:
        name: of the benchmark.
        what: the figures are.
        figures: whatever else the file holds.
        command: that made all of them; '' where each row has its own.
        device: "cpu" or "cuda".
    """
    from accel.report.journal import machine_name

    summary = {
        "what": what,
        **({"command": command} if command else {}),
        "date": date.today().isoformat(),
        "machine": machine_name(torch.device(device)),
        "torch": torch.__version__,
        **figures,
    }
    write_atomic(path(name, device), json.dumps(summary, indent=1) + "\n")
