"""The exceptions that accel raises for users, and nothing else.

AccelError
├── InvalidArgument   an argument of a public call is wrong   (also a ValueError)
│   └── InvalidType   it is of another kind                   (also a TypeError)
├── InvalidState      a call comes when it can't be answered  (also a RuntimeError)
├── CommError         a rank is gone, or the network          (also a RuntimeError)
├── CheckpointError   a checkpoint can't be written, or is of another training
│   └── OtherVersion  it is of another version of accel
├── PlanError         a plan file is corrupt or made for another model (also a ValueError)
└── ReportError       a report file is corrupt or of another schema    (also a ValueError)

Errors of the system and of Python's protocols keep their names (OSError, ImportError, IndexError, …). A failing
acceleration never raises: it is dropped and reported.
"""

from __future__ import annotations

from accel.profiler.errors import AccelError, InvalidArgument, InvalidState, InvalidType

__all__ = [
    "AccelError",
    "CheckpointError",
    "InvalidArgument",
    "InvalidState",
    "InvalidType",
    "OtherVersion",
    "PlanError",
    "ReportError",
]


class CheckpointError(AccelError):
    """A checkpoint can't be written, which training may outlive, or is one of another model or optimizer."""


class OtherVersion(CheckpointError):
    """A checkpoint is of another version: none before it is taken in its place."""


class PlanError(AccelError, ValueError):
    """A plan can't be read, or was made for another model."""


class ReportError(AccelError, ValueError):
    """A report can't be read, or has a schema this version doesn't know."""
