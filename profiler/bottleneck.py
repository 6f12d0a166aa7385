"""The classes of bottleneck."""

from __future__ import annotations

from enum import Enum


class Bottleneck(str, Enum):
    """What a step can be waiting for.

    `outside` (work between two steps) and `host` (the machine or the interpreter itself) stand beside the classes of
    the design: they are what a step waits for as often as any, and neither is input nor computation.
    """

    INPUT = "input"
    TRANSFER = "transfer"
    LAUNCH = "launch"
    COMPUTE = "compute"
    MEMORY = "memory"
    SYNC = "sync"
    COMMUNICATION = "communication"
    STRAGGLER = "straggler"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"
    HOST = "host"
