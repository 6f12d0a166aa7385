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


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows that were recorded today."""
    file = path(name)
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    return found


def write(name: str, what: str, figures: dict[str, Any], *, command: str = "", device: str = "cpu") -> None:
    """Write a result.

    Args:
        name: of the benchmark.
        what: the figures are.
        figures: whatever else the file holds.
        command: that made all of them; '' where each row has its own.
        device: "cpu" or "cuda".
    """
    from accel.journal import machine_name

    summary = {
        "what": what,
        **({"command": command} if command else {}),
        "date": date.today().isoformat(),
        "machine": machine_name(torch.device(device)),
        "torch": torch.__version__,
        **figures,
    }
    write_atomic(path(name, device), json.dumps(summary, indent=1) + "\n")
