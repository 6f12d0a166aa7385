"""The network doctor: settings, links, devices, system, and the log of a run."""

from __future__ import annotations

from accel.comm.doctor.examination import NO_LOG, Examination, examine

__all__ = ["NO_LOG", "Examination", "examine"]
