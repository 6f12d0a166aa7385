"""Scaling: how many samples a second 1, 2, 4 … ranks train, with and without accel.

    python -m benchmarks.scaling [MODEL …] [--shape 1x1 --shape 2x1 …] [--rate 1gbit] [--allow lossy] [--record]
    python -m benchmarks.scaling resnet bert gpt --shape 1x2 --kind weak --pinned --by-hand
    python -m benchmarks.scaling mlp100 --shape 2x1 --kind weak --allow lossy --rivals
    python -m benchmarks.scaling --plot docs/scaling.svg

Strong scaling keeps the batch of the whole group, weak scaling that of each rank. Ranks run under torchrun. As root
with iproute2 each host of a shape (hosts x ranks of each) is a network namespace whose link is shaped to `--rate`; with
GPUs, or without root, there is one host. Each launch trains one variant, all of them in turns A B B A; a step is that
of the slowest rank, after the search. `--by-hand` adds what an expert writes: the module compiled before it is wrapped,
and a fused optimizer. `--rivals` adds DDP with torch's own hooks: 16-bit gradients, and PowerSGD. `--pinned` gives each
rank one core. At the end stands the geometric mean of all speed-ups. `--plot` draws what is recorded, and measures
nothing. `mlp100` is no model of the suite: its gradients are 100 MB, its step takes 0.4 s on one core.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel
from accel.profiler.host import usable_cores
from benchmarks.comm.lab import Lab, why_not
from benchmarks.comm.ranks import mlp, report, reported, slowest
from benchmarks.record import ROOT, Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import extremes, geometric_mean
from benchmarks.suite import MODELS, Size, Workload, train_step
from benchmarks.variants import optimized

KINDS = ("strong", "weak")
HOOKS = ("torch fp16", "torch PowerSGD")
"""Rivals: DDP with a communication hook of torch's."""


def mlp100(size: Size) -> Workload:
    """Make ten layers of 1,600, 25.6 M weights, with 64 samples a batch; both sizes are the same."""
    x = torch.randn(20 * 64, 1600)
    loader = DataLoader(TensorDataset(x, x.roll(1, 1).relu()), 64, shuffle=True)
    model = mlp(1600, 10)
    return Workload(model, loader, torch.optim.AdamW(model.parameters(), 1e-3), nn.functional.mse_loss)


WORKLOADS = {**{name: make for name, make in MODELS.items() if name != "gan"}, "mlp100": mlp100}


def _percent(side: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        efficiency = row[f"{side}_efficiency"]
        return None if efficiency is None else f"{efficiency:.0%}"

    return cell


def _title(row: Row) -> str:
    links = f", links of {row['rate']}" if row["rate"] else ""
    level = "" if row["allow"] == "reordered" else f", allow={row['allow']!r}"
    return f"{row['model']}, {row['kind']}{links}{level}"


RECORD = Record(
    "scaling",
    "samples a second of a whole group under DistributedDataParallel, with and without accel",
    {
        "model": Column("of the suite", "model"),
        "size": Column('"tiny" or "full"'),
        "kind": Column("strong: the group's batch stays; weak: the rank's"),
        "allow": Column("of accel.optimize"),
        "rate": Column("of each host's link; empty where it is not shaped"),
        "shape": Column("hosts x ranks of each", "hosts x ranks"),
        "ranks": Column("in all"),
        "batch": Column("of each rank", "batch of a rank"),
        "plain_s": Column("step of the slowest rank, s", "plain s", ":.3f"),
        "accel_s": Column("the same with accel, s", "accel s", ":.3f"),
        "plain_samples_s": Column("of the group", "plain samples/s", ":.1f"),
        "accel_samples_s": Column("of the group", "accel samples/s", ":.1f"),
        "speedup": Column(
            "plain ÷ accelerated step, pairs of launches",
            "speed-up [least, most]",
            "{speedup:.2f}x [{speedup_low:.2f}, {speedup_high:.2f}]",
        ),
        "speedup_low": Column("least of the pairs"),
        "speedup_high": Column("most of the pairs"),
        **{
            f"{side}_efficiency": Column(
                "samples/s ÷ ranks ÷ those of one plain rank", f"{side} efficiency", _percent(side)
            )
            for side in ("plain", "accel")
        },
        "rivals": Column(
            "plain ÷ each rival's step, pairs of launches",
            "rivals",
            lambda row: ", ".join(f"{name} {times:.2f}x" for name, times in row.get("rivals", {}).items()) or None,
        ),
        "kept": Column("strategies that stayed", "kept", lambda row: ", ".join(row["kept"]) or "-"),
    },
    head=(
        f"{SOURCE}, {{cores}} cores: ranks beyond that share them. Efficiency is over as many plain ranks that each "
        "train as one alone."
    ),
    title=_title,
    key=("model", "size", "kind", "rate", "allow", "shape"),
)


class Launch(NamedTuple):
    """What one launch trains."""

    model: str
    size: Size
    batch: int
    """Of each rank."""
    variant: str
    """`plain`, `accel`, `by hand` (compiled and with a fused optimizer), or one of `HOOKS`."""
    allow: str
    steps: int
    """That are measured."""
    settle_s: float
    """The longest search."""
    pinned: bool = False
    """Each rank on a core of its own."""
    budget: str = "60"
    """Of accel.optimize: its 3 % of a launch would not pay for a compiler."""


# One rank


def work(launch: Launch) -> None:
    """Train as one rank; rank 0 prints step times and what was kept."""
    cuda = torch.cuda.is_available()
    if launch.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300))
    torch.manual_seed(0)
    workload = WORKLOADS[launch.model](launch.size)
    if launch.variant == "by hand":
        workload.model.compile()
        for group in workload.optimizer.param_groups:
            group["fused"] = True
    # torch's PowerSGD waits within callbacks: over gloo ranks come to those of several buckets in any order, and hang.
    in_one = launch.variant == "torch PowerSGD" and not cuda
    workload = sharded(workload, launch.batch, device, 1000 if in_one else None)
    is_accelerated = launch.variant == "accel"
    if launch.variant in HOOKS:
        _put_hook_on(workload.model, launch.variant)
    elif is_accelerated:
        workload = optimized(workload, allow=launch.allow, cache=False, budget=launch.budget)

    def over() -> bool:
        return not is_accelerated or accel.explain(workload.model).state != "searching"

    times = _timed(workload, device, over, launch.steps, launch.settle_s)
    step_s = slowest(statistics.median(times))
    rows = accel.explain(workload.model).rows if is_accelerated else []
    kept = [row.name for row in rows if row.status == "kept"]
    left = {row.name: row.why for row in rows if row.status not in ("kept", "not applicable")}
    report({"step_s": step_s, "kept": kept, "left": left})
    dist.barrier()
    dist.destroy_process_group()


def sharded(workload: Workload, batch: int, device: torch.device, bucket_mb: int | None = None) -> Workload:
    """Return the workload under DDP, with a share of the data for each rank."""
    model, ids = workload.model.to(device), [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=bucket_mb)
    data = workload.loader.dataset
    loader = DataLoader(data, batch, sampler=DistributedSampler(data), drop_last=True)
    return workload._replace(model=ddp, loader=loader)


def _put_hook_on(ddp: Any, name: str) -> None:
    if name == "torch fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    else:  # torch's defaults, but that it begins before the steps that are measured and not after 1,000
        ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=3), powerSGD_hook)


def _timed(
    workload: Workload, device: torch.device, over: Callable[[], bool], steps: int, settle_s: float
) -> list[float]:
    """Train until the search is over on rank 0, then so many steps more; return their times, s."""
    began = time.perf_counter()
    times: list[float] = []
    settled_at: int | None = None
    for number, (x, target) in enumerate(_batches(workload)):
        start = time.perf_counter()
        train_step(workload, x.to(device), target.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if settled_at is None and number % 5 == 4:
            ready = over() or time.perf_counter() - began > settle_s
            settled_at = number if _as_rank_0(ready, device) else None
        if settled_at is not None and number - settled_at >= steps:
            break
    return times[-steps:]


def _batches(workload: Workload) -> Iterator[tuple[Any, Any]]:
    for epoch in itertools.count():
        workload.loader.sampler.set_epoch(epoch)
        yield from workload.loader


def _as_rank_0(flag: bool, device: torch.device) -> bool:
    value = torch.tensor([int(flag)], device=device)
    dist.broadcast(value, 0)
    return bool(value.item())


# Launches


def launched(launch: Launch, hosts: int, ranks: int, rate: str, timeout_s: float) -> Row:
    """Launch ranks under torchrun and return what rank 0 printed; say why strategies that apply were not kept.

    Raises:
        RuntimeError: if they fail.
    """
    command = ["-m", "benchmarks.scaling", "--worker", json.dumps(launch._asdict())]
    if rate:
        with Lab(hosts, rate) as lab:
            output = lab.run(command, ranks, timeout_s)[0].output
    else:
        own = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            own, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
        output = done.stdout
    result = next(result for line in output.splitlines() if (result := reported(line)) is not None)
    for name, why in result.pop("left").items():
        click.echo(f"  {name}: {why}", err=True)
    return result


def batch_of_a_rank(batch: int, ranks: int, kind: str) -> int:
    """Return the batch of each rank, for that of one rank alone.

    Raises:
        ValueError: if the batch can't be shared out evenly.
    """
    if kind == "weak":
        return batch
    if batch % ranks:
        raise ValueError(
            f"the batch must be a multiple of the ranks for strong scaling. Found: {batch} on {ranks} ranks"
        )
    return batch // ranks


def compare(
    launch: Launch, shape: tuple[int, int], rate: str, rounds: int, rivals: Sequence[str], start: Callable[..., Row]
) -> Row:
    """Launch plain ranks, accelerated ones and rivals in turns, and return their step times.

    Args:
        launch: with the batch of each rank.
        shape: hosts, and ranks of each.
        rate: of the links; '' for one host without shaping.
        rounds: launches of each.
        rivals: other variants.
        start: launches and returns what rank 0 printed.
    """
    variants = ["plain", "accel", *rivals]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    kept: list[str] = []
    for number in range(rounds):
        for name in variants if number % 2 == 0 else reversed(variants):
            result = start(launch._replace(variant=name), *shape, rate, 600.0 + launch.settle_s)
            seconds[name].append(result["step_s"])
            kept = result["kept"] if name == "accel" else kept
    pairs = {name: [p / own for p, own in zip(seconds["plain"], seconds[name], strict=True)] for name in variants}
    ranks = shape[0] * shape[1]
    figures: Row = {}
    for name in ("plain", "accel"):
        step_s = statistics.median(seconds[name])
        figures |= {f"{name}_s": step_s, f"{name}_samples_s": ranks * launch.batch / step_s}
    return {
        "model": launch.model,
        "size": launch.size,
        "rate": rate,
        "allow": launch.allow,
        "shape": f"{shape[0]}x{shape[1]}",
        "ranks": ranks,
        "batch": launch.batch,
        **figures,
        "speedup": geometric_mean(pairs["accel"]),
        "speedup_low": extremes(pairs["accel"]).low,
        "speedup_high": extremes(pairs["accel"]).high,
        "rivals": {name: geometric_mean(pairs[name]) for name in rivals},
        "kept": kept,
    }


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one curve with their efficiency: samples a second over those of as many ranks alone.

    It is None where one rank alone has not been measured.
    """
    alone = next((row["plain_samples_s"] for row in rows if row["ranks"] == 1), None)

    def efficiency(row: Row, side: str) -> float | None:
        return None if alone is None else row[f"{side}_samples_s"] / row["ranks"] / alone

    return [{**row, **{f"{side}_efficiency": efficiency(row, side) for side in ("plain", "accel")}} for row in rows]


def _alone(launch: Launch, kind: str, rate: str) -> list[Row]:
    """Return what was recorded of one rank: under another `allow` it trains plainly as well."""
    conditions = {"model": launch.model, "size": launch.size, "kind": kind, "rate": rate, "ranks": 1}
    return [row for row in RECORD.rows() if all(row[name] == value for name, value in conditions.items())][:1]


def default_shapes(gpus: int, cores: int, has_lab: bool) -> list[str]:
    """Return what is measured here: powers of two up to the GPUs, hosts of a lab, or ranks up to the cores."""
    most = gpus or (max(cores, 4) if has_lab else cores)
    numbers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return [f"{number}x1" if has_lab and not gpus else f"1x{number}" for number in numbers]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw samples a second over ranks, a panel for each curve, axes from zero; dotted is a perfect curve.

    Args:
        rows: of curves that have one rank, or else follow from one that has.
        path: of an SVG or PNG file.
    """
    import io

    from matplotlib.figure import Figure

    curves: dict[str, list[Row]] = {}
    for row in rows:
        assert RECORD.title is not None
        curves.setdefault(RECORD.title(row), []).append(row)
    figure = Figure(figsize=(4.5 * len(curves), 3.6), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (title, curve) in zip(panels, curves.items(), strict=True):
        curve = sorted(curve, key=lambda row: int(row["ranks"]))
        ranks = [row["ranks"] for row in curve]
        for side, marker in (("plain", "o"), ("accel", "s")):
            panel.plot(ranks, [row[f"{side}_samples_s"] for row in curve], marker=marker, label=side)
        first = curve[0]
        alone = first["plain_samples_s"] / first["ranks"] / (first["plain_efficiency"] or 1.0)
        panel.plot([0, max(ranks)], [0, alone * max(ranks)], ":", color="grey", label="perfect")
        panel.set(title=title, xlabel="ranks", ylabel="samples/s", xlim=0, ylim=0, xticks=ranks)
        panel.legend()
    kind = path.suffix.removeprefix(".") or "svg"
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(buffer.getvalue())
    part.replace(path)


LINE = (
    "{model} {kind:6} {shape:5} batch {batch:3}: {plain_s:.3f} → {accel_s:.3f} s a step, {plain_samples_s:.1f} → "
    "{accel_samples_s:.1f} samples/s, {speedup:.2f}x [{speedup_low:.2f}, {speedup_high:.2f}], kept {words}{others}"
)


def _shape(text: str) -> tuple[int, int]:
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdigit() and ranks.isdigit() and int(hosts) and int(ranks)):
        raise click.BadParameter(f"a shape must be hosts x ranks of each, such as 2x1. Found: {text}")
    return int(hosts), int(ranks)


@click.command()
@click.argument("models", nargs=-1, type=click.Choice([*WORKLOADS]))
@click.option("--shape", "shapes", multiple=True, help="Hosts x ranks of each; default what fits here.")
@click.option("--kind", "kinds", multiple=True, default=KINDS, type=click.Choice(KINDS))
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, if hosts can be had.")
@click.option(
    "--allow", default="reordered", show_default=True, type=click.Choice(["exact", "reordered", "reduced", "lossy"])
)
@click.option("--size", default="tiny", show_default=True, type=click.Choice(["tiny", "full"]))
@click.option("--steps", default=30, show_default=True, type=click.IntRange(2), help="Measured in a launch.")
@click.option("--settle", default=120.0, show_default=True, help="Longest search, s.")
@click.option("--budget", default="60", show_default=True, help="Of accel.optimize: s, or a share of the launch.")
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1), help="Launches of each variant.")
@click.option("--by-hand", is_flag=True, help="Launch a compiled model with a fused optimizer too.")
@click.option("--rivals", is_flag=True, help="Launch DDP with torch's hooks too: 16-bit gradients, PowerSGD.")
@click.option("--pinned", is_flag=True, help="Give each rank one core.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw what is recorded to this file.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/, after each curve.")
@click.option("--worker", hidden=True)
def main(
    models: tuple[str, ...],
    shapes: tuple[str, ...],
    kinds: tuple[str, ...],
    rate: str,
    allow: str,
    size: Size,
    steps: int,
    settle: float,
    budget: str,
    rounds: int,
    by_hand: bool,
    rivals: bool,
    pinned: bool,
    plot: Path | None,
    record: bool,
    worker: str | None,
) -> None:
    """Measure scaling curves of MODELS (default: resnet)."""
    if worker is not None:
        return work(Launch(**json.loads(worker)))
    if plot is not None:
        return draw(RECORD.rows(), plot)
    console = Console(highlight=False, soft_wrap=True)
    gpus = torch.cuda.device_count()
    reason = "GPUs are used" if gpus else why_not()
    if reason:
        console.print(f"one host, its links not shaped: {reason}")
    wanted = [_shape(text) for text in shapes or default_shapes(gpus, usable_cores(), not reason)]
    if reason and any(hosts > 1 for hosts, _ in wanted):
        raise click.ClickException(f"shapes with several hosts can't be had: {reason}")
    others = [*(["by hand"] if by_hand else []), *(HOOKS if rivals else ())]
    gains: dict[str, list[float]] = {}
    for model, kind in itertools.product(models or ("resnet",), kinds):
        batch = WORKLOADS[model](size).loader.batch_size
        curve = []
        for shape in wanted:
            try:
                share = batch_of_a_rank(batch, shape[0] * shape[1], kind)
            except ValueError as error:
                raise click.ClickException(str(error)) from None
            launch = Launch(model, size, share, "plain", allow, steps, settle, pinned=pinned, budget=budget)
            row = {**compare(launch, shape, "" if reason else rate, rounds, others, launched), "kind": kind}
            curve.append(row)
            speedups = {"accel": row["speedup"], **row["rivals"]}
            said = "".join(f", {name} {speedups[name]:.2f}x" for name in others)
            console.print(LINE.format_map({**row, "words": ", ".join(row["kept"]) or "nothing", "others": said}))
            for name, speedup in speedups.items():
                gains.setdefault(name, []).append(speedup)
        if record:
            RECORD.write(with_efficiency([*curve, *_alone(launch, kind, "" if reason else rate)])[: len(curve)])
    for what, each in gains.items():
        console.print(f"geometric mean of {len(each)}, {what}: {geometric_mean(each):.2f}x, least {min(each):.2f}x")


if __name__ == "__main__":
    main()
