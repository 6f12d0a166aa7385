"""What a job under torchrun would end by, once nodes join or workers are started again: one variable avoids it.

Since torch shares one TCP store between the rendezvous and the workers, two things go wrong (torch 2.13):

- A torchrun keeps that store's address from its first round. When a node joins, those that were there before publish no
  address for the new round; the newcomer waits for one until its time is over, and the whole job fails. Seen under
  `c10d` and `etcd-v2`, as of `dynamic_rendezvous.py`.
- Workers that are started again read in it where the others were before, unless those have been faster: Gloo's
  connections are refused, in that start and in each one after it. One kill of three ended a job of two so, none of six
  with the variable; `_create_c10d_store` of `rendezvous.py` counts on a new store for every start.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment makes each round have a store of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def remedy(environment: Mapping[str, str] = os.environ, command: Sequence[str] | None = None) -> str:
    """Return what to do so that nodes may join this job, and its workers be started again; '' if none may, or all can.

    Args:
        environment: of this worker; torchrun passes its own on.
        command: of the torchrun that has started it; None reads it from the system.

    Example:
        >>> remedy({"TORCHELASTIC_USE_AGENT_STORE": "True"}, ["torchrun", "--nnodes=1:4", "train.py"])[:31]
        'a node that joins this job late'
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    command = _command_of_parent() if command is None else command
    how = f"by a fault of torch; set {VARIABLE}=1 where torchrun is started"
    nodes = _option(command, ("--nnodes", "--nnode"), environment.get("PET_NNODES", "1"))
    least, ranges, most = nodes.partition(":")
    if ranges and least != most:
        return f"a node that joins this job later would end it, {how}"
    starts = _option(command, ("--max-restarts", "--max_restarts"), environment.get("PET_MAX_RESTARTS", "0"))
    return "" if starts.strip() == "0" else f"workers of this job that are started again may not find each other, {how}"


def _option(command: Sequence[str], names: Sequence[str], given: str) -> str:
    """Return the value of an option of a command line, or what was given otherwise."""
    for position, word in enumerate(command):
        name, is_set, value = word.partition("=")
        if name in names:
            return value if is_set else next(iter(command[position + 1 :]), given)
    return given


def _command_of_parent() -> list[str]:
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no such system, or the parent has gone
        return []
    return [word.decode(errors="replace") for word in words]
