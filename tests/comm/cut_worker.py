"""One rank of the run whose link is cut: `python -m tests.comm.cut_worker FOLDER`, under torchrun in the lab."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.hooks import CommState, hook
from accel.comm.ranks.failure import CommError


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(5)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    state = CommState(ddp, timeout=timedelta(seconds=4))
    ddp.register_comm_hook(state, hook)
    ddp(torch.ones(2, 500)).sum().backward()
    (folder / f"{rank}.ready").touch()  # the next step moves 5 MB over 10 Mbit/s: 4 s
    began = time.monotonic()
    try:
        ddp(torch.ones(2, 500)).sum().backward()
        said = "nothing raised"
    except CommError as error:
        said = str(error)
    state.close()
    (folder / f"{rank}.part").write_text(f"{time.monotonic() - began:.1f} {said}")
    (folder / f"{rank}.part").rename(folder / f"{rank}.said")
    os._exit(0)  # without the group's own end, which has nobody to talk to


if __name__ == "__main__":
    main(Path(sys.argv[1]))
