"""The exceptions that accel raises for users, and nothing else.

AccelError
├── InvalidArgument   an argument of a public call is wrong   (also a ValueError)
├── CheckpointError   a checkpoint can't be written, or is of another training
│   └── OtherVersion  it is of another version of accel
├── PlanError         a plan file is corrupt or made for another model (also a ValueError)
└── ReportError       a report file is corrupt or of another schema    (also a ValueError)

A failing acceleration never raises: it is dropped and reported.
"""

from __future__ import annotations


class AccelError(Exception):
    """Base class of every error that accel raises on purpose."""


class InvalidArgument(AccelError, ValueError):
    """An argument of a public call breaks its contract; the text names the remedy."""


class CheckpointError(AccelError):
    """A checkpoint can't be written, which training may outlive, or is one of another model or optimizer."""


class OtherVersion(CheckpointError):
    """A checkpoint is of another version: none before it is taken in its place."""


class PlanError(AccelError, ValueError):
    """A plan can't be read, or was made for another model."""


class ReportError(AccelError, ValueError):
    """A report can't be read, or has a schema this version doesn't know."""
