"""The user's run: its objects, the wrapper around the model's calls, backward passes, and other ranks."""

from __future__ import annotations

from accel.run.context import Observed, Run
from accel.run.gate import Gate

__all__ = ["Gate", "Observed", "Run"]
