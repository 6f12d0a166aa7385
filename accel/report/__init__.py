"""Reports: their data, and its rendering as text and as a web page."""

from __future__ import annotations

from accel.report.report import NOTHING_REMEMBERED, Event, Machine, Report, ReportPlace, State, Status, StrategyRow

__all__ = ["NOTHING_REMEMBERED", "Event", "Machine", "Report", "ReportPlace", "State", "Status", "StrategyRow"]
