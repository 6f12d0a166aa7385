"""The classes of bottleneck."""

from __future__ import annotations

from enum import Enum


class Bottleneck(str, Enum):
    """What a step can be waiting for.

    `outside` (work between two steps) and `host` (the machine or the interpreter itself) complete the list: steps wait
    for them as often as for the others, and they are neither input nor computation.
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
