"""Ranks that SLURM has started (`srun accel run train.py`): torch's variables from SLURM's.

    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID ─▶ RANK, WORLD_SIZE, LOCAL_RANK
    SLURM_STEP_NODELIST                       ─▶ MASTER_ADDR, the first node: task 0 is there
    SLURM_JOB_ID, SLURM_STEP_ID               ─▶ MASTER_PORT, the same on all nodes

https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from accel.errors import InvalidArgument

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below those that Linux gives to connections."""
_NEEDED = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID")
"""Of a task that srun has started; in a batch script itself there is no step."""


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torch.distributed needs to know of a task of `srun`; nothing elsewhere, or under torchrun.

    Args:
        environment: of this process.

    Raises:
        InvalidArgument: if a variable of SLURM's is not as its manual says.

    Example:
        >>> torch_variables({"RANK": "3", "SLURM_PROCID": "0"})
        {}
    """
    if "RANK" in environment or not set(_NEEDED).issubset(environment):
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_NTASKS"]
    try:
        job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment["SLURM_STEP_ID"])
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_NTASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_tasks_by_node(tasks)[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(nodes),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + (job + step) % _PORTS),
        }
    except (ValueError, IndexError):
        given = {name: value for name, value in environment.items() if name.startswith("SLURM_STEP") or name in _NEEDED}
        raise InvalidArgument(f"SLURM's variables must be as its manual says. Found: {given}") from None


def first_node(nodes: str) -> str:
    """Return the first host of a list in SLURM's form.

    Example:
        >>> first_node("gpu[007-012,020],login1")
        'gpu007'
    """
    first = re.match(r"[^,\[]+(?:\[([^,\-\]]+)[^\]]*\])?[^,\[]*", nodes)
    if first is None:
        raise InvalidArgument(nodes)
    return first[0] if first[1] is None else re.sub(r"\[.*\]", first[1], first[0])


def _tasks_by_node(tasks: str) -> list[int]:
    """Return how many tasks each node has: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
