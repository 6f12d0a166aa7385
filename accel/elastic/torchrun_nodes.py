"""Whether a node that joins a running job later would end it: torch's own fault, which one variable avoids.

Since torch shares one TCP store between the rendezvous and the workers, a torchrun keeps that store's address from its
first round. When a node joins, those that were there before publish no address for the new round; the newcomer waits
for one until its time is over, and the whole job fails. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment
makes each round publish its own. Seen in torch 2.13 under `c10d` and `etcd-v2`, as of `dynamic_rendezvous.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def remedy(environment: Mapping[str, str] = os.environ, command: Sequence[str] | None = None) -> str:
    """Return what to do so that nodes may join this job later; '' if they can, or none may.

    Args:
        environment: of this worker; torchrun passes its own on.
        command: of the torchrun that has started it; None reads it from the system.

    Example:
        >>> remedy({"TORCHELASTIC_USE_AGENT_STORE": "True"}, ["torchrun", "--nnodes=1:4", "train.py"])[:31]
        'a node that joins this job late'
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    least, most = _nodes(_command_of_parent() if command is None else command, environment)
    if least == most:
        return ""
    how = f"set {VARIABLE}=1 where torchrun is started"
    return f"a node that joins this job later would end it, by a fault of torch; {how}"


def _nodes(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the least and the largest number of nodes as torchrun was given them."""
    given = environment.get("PET_NNODES", "1")
    for position, word in enumerate(command):
        name, is_set, value = word.partition("=")
        if name in ("--nnodes", "--nnode"):
            given = value if is_set else next(iter(command[position + 1 :]), given)
            break
    least, ranges, most = given.partition(":")
    return least, most if ranges else least


def _command_of_parent() -> list[str]:
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no such system, or the parent has gone
        return []
    return [word.decode(errors="replace") for word in words]
