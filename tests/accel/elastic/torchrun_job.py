"""The job of `scheduled_job` as torchrun starts it, slow enough for nodes to come and go meanwhile."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.accel.elastic.scheduled_job import Log, Run, train

PACE_S = float(os.environ.get("PACE_S", "0.25"))


def main(folder: Path) -> None:
    """Train in a folder; each run has a name that sorts by when it began, which all ranks agree on."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    began = [time.time_ns()]
    dist.broadcast_object_list(began)
    log = Log(folder / "logs" / f"{began[0]}-{rank}")
    log(pid=os.getpid(), agent=os.getppid())
    hurry = folder / "hurry"
    train(Run(world, 2), rank, folder / "checkpoints", log, lambda: None if hurry.exists() else time.sleep(PACE_S))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
