"""Reports: their data, and its rendering as text and as a web page."""

from __future__ import annotations

from accel.report.model import Event, Machine, Report, State, Status, StrategyRow

__all__ = ["Event", "Machine", "Report", "State", "Status", "StrategyRow"]
