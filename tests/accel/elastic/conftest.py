"""Fixtures of the loops whose batch size accel chooses."""

from __future__ import annotations

from tests.accel.elastic.batch_loops import clock, job, noise

__all__ = ["clock", "job", "noise"]
