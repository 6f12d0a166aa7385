"""The user's run: its steps, what is switched on in it, and what is checked."""

from __future__ import annotations

from accel.run.context import Observed, Run

__all__ = ["Observed", "Run"]
