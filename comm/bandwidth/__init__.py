"""The bandwidth table: every operation timed per link class, its result checked."""

from __future__ import annotations

from accel.comm.bandwidth.table import Bandwidth, Fit, PeerLost, Row, Settings, fit_line, measure_links
from accel.profiler import renamed

__all__ = ["Bandwidth", "Fit", "PeerLost", "Row", "Settings", "fit_line", "measure_links"]

measure = renamed.function("measure", measure_links)
