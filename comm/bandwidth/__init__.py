"""The bandwidth table: every operation timed per link class, its result checked."""

from __future__ import annotations

from accel.comm.bandwidth.table import Bandwidth, Lost, Row, Settings, measure

__all__ = ["Bandwidth", "Lost", "Row", "Settings", "measure"]
