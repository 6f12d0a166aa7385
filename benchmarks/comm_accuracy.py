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
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compression.momentum import MomentumCorrection
from accel.comm.compressor import Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.sgd_momentum import take_momentum
from benchmarks.comm.accuracy_tasks import TASKS, Source, Task, judge, learning_rate
from benchmarks.comm.ranks import group, replicas_equal, report, reported
from benchmarks.record import Column, Record, command_line, replaced
from benchmarks.render import Cell, Row, block

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


RECORD = Record(
    "comm-accuracy",
    "accuracy after the same steps, by what is sent in place of gradients; better_by is against exact",
    {
        "task": Column("what is learnt"),
        "method": Column("what is sent"),
        "compressor": Column("with its options"),
        "ranks": Column("processes"),
        "steps": Column("of the training"),
        "batch": Column("samples of a rank in a step"),
        "seed": Column("of weights and batches"),
        "score": Column("of what is held out, in the unit"),
        "unit": Column("of the score"),
        "train_loss": Column("mean of rank 0's last 50 steps, nats"),
        "replicas_equal": Column("whether all ranks have the same weights in the end"),
        "data": Column("in words"),
        "optimizer": Column("options of SGD"),
    },
)
KEY = ("task", "method", "seed")
"""What a later row replaces."""


# One rank


def train(task: Task, source: Source, method: str, seed: int) -> dict[str, Any]:
    """Train once, as one of the ranks, and return what came of it."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(source.model(), bucket_cap_mb=0.5)  # more than one bucket
    state = CommState(ddp, METHODS[method](task.steps), timeout=timedelta(seconds=120))
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=task.lr, **SGD)
    if isinstance(state.compressor, MomentumCorrection) and state.compressor.momentum:
        take_momentum(state, optimizer)
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    losses = []
    for step in range(task.steps):
        for options in optimizer.param_groups:
            options["lr"] = task.lr * learning_rate(step, task.steps)
        optimizer.zero_grad()
        loss = source.loss(ddp, source.batch(generator, task.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    result = {
        "compressor": repr(state.compressor),
        "score": judge(source, ddp.module),
        "train_loss": statistics.fmean(losses[-50:]),
        "replicas_equal": replicas_equal(ddp),
        "data": source.name,
    }
    state.close()
    return result


def work(job: dict[str, Any]) -> None:
    """Train with each seed as one rank; rank 0 prints each result."""
    task = TASKS[job["task"]]._replace(steps=job["steps"])
    with group(timeout_s=120, init_method=f"file://{job['store']}", rank=job["rank"], world_size=task.ranks):
        source = task.load(job["folder"])
        for seed in job["seeds"]:
            report({**train(task, source, job["method"], seed), "seed": seed})


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
                if (result := reported(line.decode())) is not None:
                    yield result
            codes = [process.wait(TIMEOUT_S) for process in ranks]
            if any(codes):
                worst = next(i for i, code in enumerate(codes) if code)
                said = (Path(place) / f"{worst}.log").read_text(errors="replace")[-3000:]
                raise click.ClickException(f"rank {worst} of {name}, {method} failed:\n{said}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def compare(rows: list[Row]) -> list[dict[str, Any]]:
    """Return how each method compares with dense over the seeds that both have."""
    lines = []
    for name, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        dense = {row["seed"]: row["score"] for row in rows if (row["task"], row["method"]) == (name, DENSE)}
        own = [row for row in rows if (row["task"], row["method"]) == (name, method)]
        scores, unit = [row["score"] for row in own], own[0]["unit"]
        line: dict[str, Any] = {"task": name, "method": method, "seeds": len(own), "unit": unit}
        line |= {"mean": statistics.fmean(scores), "spread": max(scores) - min(scores)}
        pairs = [(row["score"], dense[row["seed"]]) for row in own if row["seed"] in dense]
        if pairs and method != DENSE:
            better = [a - b if unit.startswith("%") else (b - a) / b for a, b in pairs]
            limit = POINTS if unit.startswith("%") else SHARE
            line.update(better_by=statistics.fmean(better), lowest=min(better), highest=max(better), limit=limit)
            line["within"] = line["better_by"] >= -limit
        lines.append(line)
    return lines


def _optimizer() -> str:
    return ", ".join(f"{name}={value}" for name, value in SGD.items())


def _setting(row: Row) -> tuple[Any, ...]:
    return row["ranks"], row["steps"], row["batch"], row.get("optimizer", "momentum=0.9")


def write(new: Row, command: str = "") -> None:
    """Put a row in the place of the one for the same task, method and seed; drop those of other settings."""
    comparable = [row for row in RECORD.rows() if row["task"] != new["task"] or _setting(row) == _setting(new)]
    rows = replaced(comparable, [{**new, "command": command or command_line()}], KEY)
    tasks, methods = list(TASKS), list(METHODS)
    rows.sort(key=lambda row: (tasks.index(row["task"]), methods.index(row["method"]), row["seed"]))
    RECORD.write(rows, "python -m benchmarks.comm_accuracy", compared=compare(rows))


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


def table_block(result: Row) -> str:
    """Return accuracy after the same steps."""
    optimizers = "; ".join(dict.fromkeys(row.get("optimizer", "momentum=0.9") for row in result["rows"]))
    head = (
        f"`python -m benchmarks.comm_accuracy`, {result['date']}, {result['machine']}, torch {result['torch']}. Same "
        f"weights, batches and learning rates for one seed; SGD with {optimizers}, which 1-bit and DGC take over, but "
        "for those called alone. Difference to dense gradients: mean, and the worst and best seed; in points of "
        "accuracy, or in parts of the loss."
    )
    columns: dict[str, Cell] = {
        "task": "{task}",
        "sent": "{method}",
        "seeds": "{seeds}",
        "score": lambda row: f"{row['mean']:.{2 if '%' in row['unit'] else 4}f} {row['unit']}",
        "better than dense by": _better,
        "within the limit": _within,
    }
    return block(head, columns, result["compared"])


def _better(row: Row) -> str | None:
    if "better_by" not in row:
        return None
    unit = "{:+.2f}" if row["limit"] > 0.1 else "{:+.2%}"
    mean, low, high = (unit.format(row[name]) for name in ("better_by", "lowest", "highest"))
    return f"{mean} [{low}, {high}]"


def _within(row: Row) -> str | None:
    if "within" not in row:
        return None
    limit = f"{row['limit']:g}" if row["limit"] > 0.1 else f"{row['limit']:.0%}"
    return f"{'yes' if row['within'] else 'no'} ({limit})"


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(METHODS)), help="Only these methods.")
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(TASKS)), help="Only these tasks.")
@click.option("--seeds", default=3, show_default=True, help="Trainings of each method.")
@click.option("--steps", default=0, help="Of each training; 0 for the task's own.")
@click.option("--data", type=click.Path(), help="Folder with the four Fashion-MNIST files.")
@click.option("--text", type=click.Path(), help="Folder of *_gut.txt files.")
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
    rows: list[Row] = []
    for name in tasks or TASKS:
        task = TASKS[name] if not steps else TASKS[name]._replace(steps=steps)
        setting = {"ranks": task.ranks, "steps": task.steps, "batch": task.batch, "optimizer": _optimizer()}
        for method in only or METHODS:
            same = [row for row in RECORD.rows() if missing and _setting(row) == _setting(setting)]
            done = {(row["task"], row["method"], row["seed"]) for row in same}
            wanted = [seed for seed in range(seeds) if (name, method, seed) not in done]
            folder = data if name == "images" else text
            for result in launch(name, task, method, wanted, folder) if wanted else ():
                rows.append({"task": name, "method": method, **setting, "unit": task.judged, **result})
                if record:
                    write(rows[-1])
                equal = "" if result["replicas_equal"] else ", REPLICAS DIFFER"
                print(f"{name} {method} seed {result['seed']}: {result['score']:.4f} {task.judged}{equal}", flush=True)
    show(RECORD.rows() if record else rows)


if __name__ == "__main__":
    main()
