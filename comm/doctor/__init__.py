"""The network doctor: settings, links, devices, system, and the log of a run."""

from __future__ import annotations

from accel.comm.doctor.examination import NO_LOG, CheckFinding, Examination, examine
from accel.comm.doctor.host import Host
from accel.comm.doctor.nccl_log import NcclLog, NotALog
from accel.comm.doctor.nccl_log import read as read_nccl_log

__all__ = ["NO_LOG", "CheckFinding", "Examination", "Host", "NcclLog", "NotALog", "examine", "read_nccl_log"]
