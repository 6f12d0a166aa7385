"""What was done and what it gave: as data, as text and as a page."""

from __future__ import annotations

from accel.report.model import Event, Machine, Report, State, Status, StrategyRow

__all__ = ["Event", "Machine", "Report", "State", "Status", "StrategyRow"]
