"""Train on as many workers as torchrun has started, and go on from the last checkpoint when their number changes.

torchrun ends all workers with SIGTERM when a pod joins, and a pod that is evicted gets one too. A worker that sees it
tells the others, so that all stop after the same step; rank 0 writes the checkpoint. A worker that dies without a word
costs the steps since the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE = 64  # of all workers together: the number of workers changes nothing but the speed
STOPPED = 128 + signal.SIGTERM  # not 0, which torchrun would take for the end of the training


class StopRequest:
    """Remembers a SIGTERM, and asks all workers whether one of them has got it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def anywhere(self) -> bool:
        """Return the same answer on all workers. It waits for the device: where steps are short, ask less often."""
        flag = torch.tensor(float(self._received), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def save(path: Path, state: dict[str, object]) -> None:
    """Replace the checkpoint in one move: a kill leaves the old one or the new one, never half of one."""
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def share_of_batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's samples of the batch of `step`, which is the same batch on any number of workers."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH_SIZE, 8, generator=generator)
    return inputs[rank::world], inputs[rank::world].sum(dim=1, keepdim=True)


def train(steps: int, checkpoint: Path, checkpoint_every: int, pause_s: float) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    stop = StopRequest(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel = DistributedDataParallel(model)
    for step in range(first, steps):
        inputs, targets = (part.to(device) for part in share_of_batch(step, rank, world))
        # DDP takes the mean over the workers: with this factor that is the mean over the batch, whatever the shares.
        loss = (parallel(inputs) - targets).square().sum() * world / BATCH_SIZE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stopping, done = stop.anywhere(), step + 1
        if rank == 0 and (stopping or done == steps or done % checkpoint_every == 0):
            save(checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done})
            print(f"step {done} workers {world} {'stopped' if stopping else 'saved'}", flush=True)
        if stopping:
            sys.exit(STOPPED)
        time.sleep(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all workers share")
    parser.add_argument("--steps", type=int, default=10_000, help="of the whole training, restarts included")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds after each step, to watch it")
    arguments = parser.parse_args()
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(arguments.steps, arguments.checkpoints / "last.pt", arguments.checkpoint_every, arguments.pause_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
