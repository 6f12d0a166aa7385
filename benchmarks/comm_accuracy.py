"""Accuracy with compressed gradients against dense ones, after the same steps.

    python -m benchmarks.comm_accuracy [--only powersgd] [--task images] [--seeds 3] [--text FOLDER] [--record]

Every rank is a process of its own, on gloo over loopback; what is measured is accuracy, not time. For one seed,
weights, batches and learning rates are the same in all trainings, so differences are those of pairs. "exact" is dense.
SGD with Nesterov momentum 0.9 throughout; DGC and 1-bit take the momentum over. For data and models see
`benchmarks.comm.accuracy_tasks`.

With --record each seed is written as soon as it is done and replaces what stood for it: a run that was stopped goes on
with --missing, which leaves out what is recorded for the same task, compressor and seed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compression.momentum import Corrected
from accel.comm.compressor import Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.sgd_momentum import take_momentum
from benchmarks import recording
from benchmarks.comm.accuracy_tasks import TASKS, Source, Task, judge, learning_rate

DENSE = "exact"
# By the number of steps: DGC warms up over the first fifth of them, in four stages.
METHODS: dict[str, Callable[[int], Compressor]] = {
    DENSE: lambda steps: Exact(),
    "int8": lambda steps: Int8(),
    "1-bit": lambda steps: OneBit(start_step=steps // 5, momentum=True),
    "1-bit alone": lambda steps: OneBit(start_step=steps // 5),  # momentum stays with the optimizer
    "powersgd": lambda steps: PowerSGD(),
    "powersgd 16": lambda steps: PowerSGD(16),  # of a width of 96: transformers need more than networks on images
    "acp-sgd": lambda steps: PowerSGD(alternate=True),
    "dgc": lambda steps: DGC(0.01, warmup_steps=steps // 20),
    "dgc 4%": lambda steps: DGC(0.04, warmup_steps=steps // 20),
    "dgc alone": lambda steps: DGC(0.01, momentum=False),
    "dgc masked": lambda steps: DGC(0.01, masking=True, warmup_steps=steps // 20),
}
SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
POINTS, SHARE = 0.5, 0.01
"""How far below dense a method may be: in points of accuracy, or as a share of the loss."""
TIMEOUT_S = 600


class Row(NamedTuple):
    """One training."""

    task: str
    method: str
    compressor: str
    ranks: int
    steps: int
    batch: int
    """Samples of a rank in a step."""
    seed: int
    score: float
    unit: str
    train_loss: float
    """Mean of rank 0's last 50 steps, nats."""
    replicas_equal: bool
    data: str
    command: str
    optimizer: str = "momentum=0.9"

    @property
    def key(self) -> tuple[str, str, int]:
        """Return what a later row replaces."""
        return self.task, self.method, self.seed


# One rank


def train(task: Task, source: Source, method: str, seed: int) -> dict[str, Any]:
    """Train once, as one of the ranks, and return what came of it."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(source.model(), bucket_cap_mb=0.5)  # more than one bucket
    state = CommState(ddp, METHODS[method](task.steps), timeout=timedelta(seconds=120))
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=task.lr, **SGD)
    if isinstance(state.compressor, Corrected) and state.compressor.momentum:
        take_momentum(state, optimizer)
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    losses = []
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * learning_rate(step, task.steps)
        optimizer.zero_grad()
        loss = source.loss(ddp, source.batch(generator, task.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    score = judge(source, ddp.module)
    found = {
        "compressor": repr(state.compressor),
        "score": score,
        "train_loss": statistics.fmean(losses[-50:]),
        "replicas_equal": _replicas_equal(ddp),
        "data": source.name,
    }
    state.close()
    return found


def _replicas_equal(model: torch.nn.Module) -> bool:
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    same = torch.tensor([int(torch.equal(own, first))])
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def work(job: dict[str, Any]) -> None:
    """Train with each seed as one rank; rank 0 prints each result."""
    torch.set_num_threads(1)
    task = TASKS[job["task"]]._replace(steps=job["steps"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=job["rank"],
        world_size=task.ranks,
        timeout=timedelta(minutes=2),
    )
    source = task.load(job["folder"])
    for seed in job["seeds"]:
        found = train(task, source, job["method"], seed)
        if job["rank"] == 0:
            print("RESULT " + json.dumps({**found, "seed": seed}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# All of them


def launch(name: str, task: Task, method: str, seeds: list[int], folder: str | None) -> Iterator[dict[str, Any]]:
    """Run the ranks of one method and yield the result of each seed as it comes."""
    with tempfile.TemporaryDirectory() as place:
        job = {"task": name, "steps": task.steps, "method": method, "seeds": seeds, "folder": folder}
        job["store"] = str(Path(place) / "store")
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = []
        for rank in range(task.ranks):
            command = [sys.executable, "-m", "benchmarks.comm_accuracy", "--worker", json.dumps({**job, "rank": rank})]
            with (Path(place) / f"{rank}.log").open("wb") as log:
                out = subprocess.PIPE if rank == 0 else log
                ranks.append(subprocess.Popen(command, stdout=out, stderr=log, env=environ))
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                if line.startswith(b"RESULT "):
                    yield json.loads(line[7:])
            codes = [one.wait(TIMEOUT_S) for one in ranks]
            if any(codes):
                worst = next(i for i, code in enumerate(codes) if code)
                said = (Path(place) / f"{worst}.log").read_text(errors="replace")[-3000:]
                raise click.ClickException(f"rank {worst} of {name}, {method} failed:\n{said}")
        finally:
            for one in ranks:
                one.kill()
                one.wait()
                if one.stdout is not None:
                    one.stdout.close()


def compare(rows: list[Row]) -> list[dict[str, Any]]:
    """Return how each method compares with dense over the seeds that both have."""
    found = []
    for name, method in dict.fromkeys((row.task, row.method) for row in rows):
        dense = {row.seed: row for row in rows if row.key == (name, DENSE, row.seed)}
        own = [row for row in rows if (row.task, row.method) == (name, method)]
        pairs = [(row.score, dense[row.seed].score) for row in own if row.seed in dense]
        line: dict[str, Any] = {"task": name, "method": method, "seeds": len(own), "unit": own[0].unit}
        line["mean"] = statistics.fmean(row.score for row in own)
        line["spread"] = max(row.score for row in own) - min(row.score for row in own)
        if pairs and method != DENSE:
            better = [a - b if own[0].unit.startswith("%") else (b - a) / b for a, b in pairs]
            limit = POINTS if own[0].unit.startswith("%") else SHARE
            line.update(better_by=statistics.fmean(better), lowest=min(better), highest=max(better), limit=limit)
            line["within"] = line["better_by"] >= -limit
        found.append(line)
    return found


def _optimizer() -> str:
    return ", ".join(f"{name}={value}" for name, value in SGD.items())


def recorded() -> list[Row]:
    """Return the rows recorded so far."""
    return [Row(**{name: one[name] for name in Row._fields if name in one}) for one in recording.rows("comm-accuracy")]


def write(new: Row) -> None:
    """Put a row in the place of the one for the same task, method and seed; drop those of other settings."""

    def kept(row: Row) -> bool:
        settings = ((one.ranks, one.steps, one.batch, one.optimizer) for one in (row, new))
        same = next(settings) == next(settings)
        return row.key != new.key and (row.task != new.task or same)

    order = {(name, method): i for i, (name, method) in enumerate((a, b) for a in TASKS for b in METHODS)}
    rows = [*filter(kept, recorded()), new]
    rows.sort(key=lambda row: (order[row.task, row.method], row.seed))
    what = "accuracy after the same steps, by what is sent in place of gradients; better_by is against exact"
    recording.write("comm-accuracy", what, {"compared": compare(rows), "rows": [row._asdict() for row in rows]})


def show(rows: list[Row]) -> None:
    """Print the comparison."""
    for line in compare(rows):
        images = line["unit"].startswith("%")
        text = f"{line['task']:7} {line['method']:9} {line['mean']:.{2 if images else 4}f} {line['unit']}"
        text += f" over {line['seeds']} seeds, spread {line['spread']:.{2 if images else 4}f}"
        if "within" in line:
            scale, unit = (1, "points") if images else (100, "% of the loss")
            better, low, high = (scale * line[name] for name in ("better_by", "lowest", "highest"))
            text += f"; better than dense by {better:+.2f} {unit} ({low:+.2f} to {high:+.2f})"
            text += f", within {scale * line['limit']:g}: {'yes' if line['within'] else 'NO'}"
        print(text, flush=True)


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(METHODS)), help="Only these methods.")
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(TASKS)), help="Only these tasks.")
@click.option("--seeds", default=3, show_default=True, help="Trainings of each method.")
@click.option("--steps", default=0, help="Of each training; 0 for the task's own.")
@click.option("--data", help="Folder with the four Fashion-MNIST files.")
@click.option("--text", help="Folder of *_gut.txt files.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
@click.option("--missing", is_flag=True, help="Leave out what was recorded today.")
@click.option("--worker", hidden=True)
def main(
    only: tuple[str, ...],
    tasks: tuple[str, ...],
    seeds: int,
    steps: int,
    data: str | None,
    text: str | None,
    record: bool,
    missing: bool,
    worker: str | None,
) -> None:
    """Measure."""
    if worker is not None:
        return work(json.loads(worker))
    command = " ".join(["python -m benchmarks.comm_accuracy", *(one for one in sys.argv[1:] if one != "--record")])
    found: list[Row] = []
    for name in tasks or TASKS:
        task = TASKS[name] if not steps else TASKS[name]._replace(steps=steps)
        for method in only or METHODS:
            like = [row for row in recorded() if (row.steps, row.optimizer) == (task.steps, _optimizer())]
            done = {row.key for row in like} if missing else set()
            wanted = [seed for seed in range(seeds) if (name, method, seed) not in done]
            folder = data if name == "images" else text
            for one in launch(name, task, method, wanted, folder) if wanted else ():
                settings: dict[str, Any] = {
                    "ranks": task.ranks,
                    "steps": task.steps,
                    "batch": task.batch,
                    "unit": task.judged,
                    "optimizer": _optimizer(),
                }
                found.append(Row(task=name, method=method, command=command, **settings, **one))
                if record:
                    write(found[-1])
                equal = "" if found[-1].replicas_equal else ", REPLICAS DIFFER"
                print(f"{name} {method} seed {one['seed']}: {one['score']:.4f} {task.judged}{equal}", flush=True)
    show(recorded() if record else found)


if __name__ == "__main__":
    main()
