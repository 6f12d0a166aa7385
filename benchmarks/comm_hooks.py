"""Communication hooks against DDP as it is, on shaped links between network namespaces.

    python -m benchmarks.comm_hooks [--shape 2x2] [--rate 100mbit] [--only "hierarchical int8"] [--record]
    python -m benchmarks.comm_hooks --launches 50 [--record]

The model is 24 layers of 1024 x 1024, 25.2 million float32 parameters, 100.8 MB of gradients in DDP's buckets of 25 MB;
batch 8, SGD, one thread to a rank. All methods of a row stay in one launch, each with a DDP module of its own over the
same parameters, and take turns (A B C, C B A, …); a step's time is that of its slowest rank. Bytes are those of the
interface of host 0, headers included. With --launches every hook trains a small model of 5 buckets, in each of as many
launches.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Compressor, Exact, Quantised
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.sgd_momentum import take_momentum
from benchmarks.comm.lab import Lab, why_not
from benchmarks.comm.ranks import group, mlp, replicas_equal, report, run_in_lab, slowest
from benchmarks.record import Column, Record
from benchmarks.render import Row, times
from benchmarks.spread import extremes, fifths, ratios

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "exact": Exact,
    "fp16": lambda: Half(torch.float16),
    "bf16": Half,
    "int8": Int8,
    "1-bit": OneBit,
    "powersgd": PowerSGD,
    "acp-sgd": lambda: PowerSGD(alternate=True),
    "dgc": DGC,
}


class Setting(NamedTuple):
    """One network and what is run on it."""

    hosts: int
    ranks: int
    rate: str
    methods: tuple[str, ...]


COMPRESSING = ("bf16", "int8", "1-bit", "powersgd", "acp-sgd", "dgc")
BY_HOSTS = tuple(f"hierarchical {name}" for name in ("exact", "bf16", "int8", "1-bit", "powersgd", "dgc"))
SETTINGS = (
    Setting(2, 2, "100mbit", BY_HOSTS),
    Setting(2, 4, "100mbit", ("hierarchical exact",)),
    Setting(2, 1, "100mbit", COMPRESSING),
    Setting(2, 1, "1gbit", COMPRESSING),
)
RECORD = Record(
    "comm-hooks",
    "a DDP step on shaped links, by communication hook",
    {
        "shape": Column("hosts x ranks of each", "ranks"),
        "rate": Column("of each host's link", "link"),
        "method": Column('"ddp" or a hook; each is compared with DDP in the same launch', "hook"),
        "step_s": Column("median step of the slowest rank, s", "s per step", ":.3f"),
        "low_s": Column("20th percentile, s"),
        "high_s": Column("80th percentile, s"),
        "speedup": Column("median step of DDP over that of the method", "speed-up", times("speedup")),
        "speedup_low": Column("least ratio over the rounds; each round runs every method once"),
        "speedup_high": Column("most over the rounds"),
        "sent_mb": Column("by host 0 in a step, MB", "MB sent by a host", ":.2f"),
        "of_theory": Column("sent bytes over those of the formula, which counts no headers", "of theory", ":.3f"),
        "replicas_equal": Column("whether all ranks have the same weights in the end"),
    },
    head=(
        "{date}, {machine}, {cores} cores, torch {torch}, gloo. Hosts are network namespaces; ranks: hosts x ranks of "
        "each; 25 M parameters, 100 MB of gradients. Each hook took turns with DDP itself in one launch; median, "
        "lowest and highest round. Commands stand in the result."
    ),
    key=("shape", "rate", "method"),
)
LAUNCHES = Record(
    "comm-launches",
    "launches that train with every hook, 5 buckets, gloo, replicas equal",
    {
        "shape": Column("hosts x ranks of each"),
        "hooks": Column("that each launch trains with"),
        "launches": Column("how many"),
        "good": Column("those that ended well"),
        "seconds": Column("for all of them, s"),
    },
    key=("shape",),
    head=lambda result: f"{result['date']}, {result['machine']}, torch {result['torch']}: {_ended(result['rows'])}",
)


def _ended(rows: list[Row]) -> str:
    return " ".join(
        f"{row['good']} of {row['launches']} launches of {row['shape']} with {len(row['hooks'])} hooks each, "
        f"`{row['command']}`, ended well, replicas equal."
        for row in rows
    )


def make_state(model: nn.Module, method: str, timeout_s: float = 120.0) -> CommState:
    """Return the state of a method: "int8", "hierarchical bf16", …"""
    *way, name = method.split()
    return CommState(
        model, COMPRESSORS[name](), hierarchical=way == ["hierarchical"], timeout=timedelta(seconds=timeout_s)
    )


def uplink_bytes(method: str, hosts: int, ranks: int, gradient_bytes: int) -> float:
    """Return what a host must send each step."""
    *way, name = method.split()
    world = hosts * ranks
    if name == "dgc":  # all-gather of positions and values, all-reduce of the biases: one row in 1025
        size, here = (hosts, 1) if way else (world, ranks)
        gathered = here * (size - here)
        return (2 * 1024 * DGC().ratio * gathered + 2 * gathered / size) / 1025 * gradient_bytes
    if name == "1-bit" and (hosts if way else world) <= 4:  # everyone's bits to everyone, and the biases
        codes = (hosts - 1) if way else ranks * (world - ranks)
        biases = 2 * (hosts - 1) / hosts if way else 2 * (world - 1) / world
        return (1024 * _share("1-bit") * codes + biases) / 1025 * gradient_bytes
    share = 1.0 if name == "ddp" else _share(name)
    if way == ["hierarchical"]:
        return 2 * (hosts - 1) / hosts * share * gradient_bytes
    if name in ("ddp", "exact", "powersgd", "acp-sgd"):
        return 2 * (world - 1) / world * share * gradient_bytes  # a ring: one of a host's ranks sends to the next host
    # All-to-all and all-gather: each rank sends to each rank of other hosts.
    return 2 * ranks * (world - ranks) / world * share * gradient_bytes


def _share(name: str) -> float:
    """Return what is sent of a layer of 1024 x 1024 and its biases, or of any values, as a share of its bytes."""
    compressor = COMPRESSORS[name]()
    if isinstance(compressor, PowerSGD):
        return compressor.sent([torch.Size([1024, 1024]), torch.Size([1024])]) / (1024 * 1025)
    return compressor.encoded_bytes(1 << 20) / (4 << 20) if isinstance(compressor, Quantised) else 1.0


# One rank


def make_optimizer(model: nn.Module, state: CommState | None) -> torch.optim.SGD:
    """Return SGD, with momentum where that is part of the method."""
    if state is None or not isinstance(state.compressor, DGC):
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    take_momentum(state, optimizer)
    return optimizer


def tx_bytes() -> int:
    """Return what this host has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


class Method:
    """A DDP module under one method; all share parameters."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=False)
        self.state = None if name == "ddp" else make_state(self.ddp, name)
        if self.state is not None:
            self.ddp.register_comm_hook(self.state, hook)
        self.optimizer = make_optimizer(model, self.state)
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def step(self, batch: torch.Tensor, keep: bool) -> None:
        """Take a step and, if `keep`, note its time over all ranks and what this host sent."""
        dist.barrier()
        sent, began = tx_bytes(), time.perf_counter()
        self.optimizer.zero_grad()
        self.ddp(batch).square().mean().backward()
        self.optimizer.step()
        seconds = time.perf_counter() - began
        dist.barrier()
        time.sleep(0.02)  # what is in the shaper's queue counts as not sent yet
        moved = tx_bytes() - sent
        seconds = slowest(seconds)
        if keep:
            self.seconds.append(seconds)
            self.sent.append(moved)


def work(methods: list[str], rounds: int, width: int, depth: int) -> None:
    """Measure as one rank; rank 0 prints the result."""
    model = mlp(width, depth)
    runs = [Method(name, model) for name in methods]
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(8, width)
    for run in runs:
        # DDP makes new buckets after the first step; the second one is the first in its final form.
        for _ in range(2):
            run.step(batch, keep=False)
    for number in range(rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            run.step(batch, keep=True)
    measured = {run.name: {"seconds": run.seconds, "sent": run.sent} for run in runs}
    report({"methods": measured, "replicas_equal": replicas_equal(model)})
    for run in runs:
        if run.state is not None:
            run.state.close()


def hooks() -> list[str]:
    """Return every method."""
    return [way + name for way in ("", "hierarchical ") for name in COMPRESSORS]


def work_once() -> None:
    """Train small models of 5 buckets with every hook, 4 steps each, and leave with 0 if all replicas are equal."""
    wrong = []
    with group(timeout_s=60):
        for method in hooks():
            model = mlp(64, 10)
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.032)
            state = make_state(ddp, method, 60.0)
            ddp.register_comm_hook(state, hook)
            optimizer = make_optimizer(model, state)
            torch.manual_seed(dist.get_rank())
            for _ in range(4):
                optimizer.zero_grad()
                ddp(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
            buckets = max(layout.index for layout in state.binding.layouts) + 1
            if buckets < 4 or not replicas_equal(model):
                wrong.append(f"{method}: {buckets} buckets, or replicas differ")
            state.close()
    sys.exit("\n".join(wrong) or 0)


# The lab


def measure(setting: Setting, rounds: int, depth: int = 24) -> list[Row]:
    """Run one setting and return a row for DDP and for each method."""
    methods = ["ddp", *setting.methods]
    arguments = ["benchmarks.comm_hooks", "--worker", json.dumps(methods), "--depth", str(depth)]
    result = run_in_lab(setting.hosts, setting.rate, setting.ranks, arguments, rounds)
    gradient_bytes = 4 * depth * (1024 * 1024 + 1024)
    plain = result["methods"]["ddp"]["seconds"]
    rows = []
    for method in methods:
        seconds, sent = result["methods"][method]["seconds"], statistics.median(result["methods"][method]["sent"])
        step, speedup = fifths(seconds), extremes(ratios(plain, seconds))
        theory = uplink_bytes(method, setting.hosts, setting.ranks, gradient_bytes)
        rows.append(
            {
                "shape": f"{setting.hosts}x{setting.ranks}",
                "rate": setting.rate,
                "method": method,
                **step.named("step_s", "low_s", "high_s"),
                "speedup": statistics.median(plain) / step.median,
                "speedup_low": speedup.low,
                "speedup_high": speedup.high,
                "sent_mb": sent / 1e6,
                "of_theory": sent / theory,
                "replicas_equal": result["replicas_equal"],
            }
        )
    return rows


def launch_all(launches: int) -> Row:
    """Launch two hosts of two ranks again and again; each launch trains with every hook."""
    good, began = 0, time.monotonic()
    with Lab(2) as lab:
        for _ in range(launches):
            try:
                lab.run(["-m", "benchmarks.comm_hooks", "--once"], 2, timeout_s=120)
                good += 1
            except (RuntimeError, TimeoutError) as error:
                print(error, flush=True)
    seconds = time.monotonic() - began
    return {"shape": "2x2", "hooks": hooks(), "launches": launches, "good": good, "seconds": seconds}


@click.command()
@click.option("--shape", help="Only this one, hosts x ranks: 2x2.")
@click.option("--rate", help="Only this link: 100mbit.")
@click.option("--only", multiple=True, help="Only this method, beside DDP.")
@click.option("--rounds", default=5, show_default=True, help="Times each method is measured.")
@click.option("--launches", default=0, help="Launch every hook so many times instead.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
@click.option("--depth", default=24, hidden=True)
@click.option("--worker", hidden=True)
@click.option("--once", is_flag=True, hidden=True)
def main(
    shape: str | None,
    rate: str | None,
    only: tuple[str, ...],
    rounds: int,
    launches: int,
    record: bool,
    depth: int,
    worker: str | None,
    once: bool,
) -> None:
    """Measure."""
    if worker is not None:
        with group(timeout_s=300):
            return work(json.loads(worker), rounds, 1024, depth)
    if once:
        return work_once()
    if reason := why_not():
        raise click.ClickException(reason)
    if launches:
        ended = launch_all(launches)
        print(f"{ended['good']} of {launches} launches of {len(hooks())} hooks ended well, {ended['seconds']:.0f} s")
        if record:
            LAUNCHES.write([ended])
        sys.exit(int(ended["good"] < launches))
    rows: list[Row] = []
    for setting in SETTINGS:
        if shape in (None, f"{setting.hosts}x{setting.ranks}") and rate in (None, setting.rate):
            methods = tuple(method for method in setting.methods if not only or method in only)
            measured = measure(setting._replace(methods=methods), rounds)
            for row in measured:
                print(LINE.format_map(row), "equal" if row["replicas_equal"] else "DIFFER", flush=True)
            rows += measured
    if record:
        RECORD.write(with_baselines(RECORD.rows(), rows))


LINE = (
    "{shape} {rate:8} {method:20} {step_s:7.3f} s ({low_s:.3f} to {high_s:.3f}), {speedup:5.2f} ({speedup_low:.2f} to "
    "{speedup_high:.2f}) times DDP, {sent_mb:6.1f} MB = {of_theory:.3f} of theory, replicas"
)


def with_baselines(before: list[Row], rows: list[Row]) -> list[Row]:
    """Return the rows to record: that of DDP stays the older one while there are other methods measured with it.

    Each row has its own launch's ratio to DDP.
    """
    measured = {(row["shape"], row["rate"], row["method"]) for row in rows}
    others = {
        (row["shape"], row["rate"])
        for row in before
        if row["method"] != "ddp" and (row["shape"], row["rate"], row["method"]) not in measured
    }
    return [row for row in rows if row["method"] != "ddp" or (row["shape"], row["rate"]) not in others]


if __name__ == "__main__":
    main()
