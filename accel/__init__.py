"""accel: a performance toolkit for PyTorch training.

    model, loader = accel.optimize(model, loader)

`import accel` imports nothing heavy: torch is loaded when the first public name is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel import startup

__version__ = "0.1.0.dev0"

# To which a relative ACCEL_CACHE refers: scripts change to a directory of their own for each run.
try:
    _imported_in = os.getcwd()
except OSError:  # it has been deleted
    _imported_in = ""

# Public name → module that holds it. Loaded on first use, so that `import accel` stays free of torch.
_HOMES = {
    "AccelError": "accel.errors",
    "Plan": "accel.search.plan",
    "Report": "accel.report",
    "disabled": "accel.entry",
    "explain": "accel.entry",
    "optimize": "accel.entry",
    "report_score": "accel.scores",
    "undo": "accel.entry",
}

__all__ = ["AccelError", "Plan", "Report", "__version__", "disabled", "explain", "optimize", "report_score", "undo"]

if TYPE_CHECKING:
    from accel.entry import disabled, explain, optimize, undo
    from accel.errors import AccelError
    from accel.report import Report
    from accel.scores import report_score
    from accel.search.plan import Plan


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accel' has no attribute {name!r}; public names: {', '.join(__all__)}")
    with startup.counted() if "torch" in sys.modules else contextlib.nullcontext():  # else most of it is torch
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
