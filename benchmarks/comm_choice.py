"""The automatic choice of gradient communication against DDP as it is and against every fixed choice.

    python -m benchmarks.comm_choice [--only 2x1,1gbit,mlp] [--rounds 6] [--record]

In each launch DDP without a hook (twice: what two of the same differ by), one `AutoComm` for each level of `allow`, and
every way of the catalogue for all buckets alike share one model and take turns, in an order drawn anew for each round:
a shaped link lets pass at once what it has saved up while others sent less. A step's time is that of its slowest rank;
short steps are repeated within a turn, without a barrier between them, as in training. Each `AutoComm` searches first,
on steps of its own. "mlp" is layers of 1024 x 1024 in DDP's buckets of 25 MB, "small" a model of 1 MB whose step is all
arithmetic; "resnet", "vgg" and "bert" see `benchmarks.comm.gradient_profiles`.
Hosts are network namespaces on shaped links (root and iproute2), backend gloo, one thread to a rank.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme, allowed
from accel.comm.cost_model.choice import describe
from accel.comm.engine.switch import Switch, hook
from accel.comm.selector import AutoComm
from benchmarks import recording
from benchmarks.comm.gradient_profiles import PROFILES, Replayed
from benchmarks.comm.lab import Lab, why_not
from benchmarks.comm_hooks import mlp, replicas_equal

_ENOUGH_S, _MOST = 1.0, 7
AGAIN = "ddp again"


class Setting(NamedTuple):
    """One network and one model."""

    hosts: int
    ranks: int
    rate: str | None
    model: str
    depth: int = 0
    """Layers of the mlp: fewer on slow links, where steps last."""
    allow: tuple[str, ...] = ("lossy", "reduced")

    @property
    def key(self) -> str:
        """What `--only` takes."""
        return f"{self.hosts}x{self.ranks},{self.rate or 'unshaped'},{self.model}"


SETTINGS = (
    Setting(2, 1, "50mbit", "mlp", 4),
    Setting(2, 1, "100mbit", "mlp", 8),
    Setting(2, 1, "1gbit", "mlp", 24),
    Setting(2, 1, None, "mlp", 24),
    Setting(2, 1, "1gbit", "small"),
    Setting(2, 2, "50mbit", "mlp", 3, allow=("lossy",)),
    Setting(2, 2, "100mbit", "mlp", 4, allow=("lossy",)),
    Setting(2, 2, "1gbit", "mlp", 8, allow=("lossy",)),
    Setting(2, 2, None, "mlp", 8, allow=("lossy",)),
    Setting(2, 2, "1gbit", "small"),
    Setting(2, 1, "1gbit", "resnet", allow=("lossy",)),
    Setting(2, 1, "1gbit", "vgg", allow=("lossy",)),
    Setting(2, 1, "1gbit", "bert", allow=("lossy",)),
)


class Row(NamedTuple):
    """One method on one setting, against DDP in the same launch."""

    shape: str
    rate: str
    model: str
    method: str
    """"ddp", "ddp again", "auto LEVEL", or a way for all buckets."""
    chosen: str
    """What the automatic choice came to."""
    step_s: float
    low_s: float
    """20th percentile."""
    high_s: float
    """80th percentile."""
    speedup: float
    """Median over the rounds of DDP's step over the method's; each round runs every method once."""
    speedup_low: float
    """20th percentile of the rounds."""
    speedup_high: float
    of_best: float | None
    """Automatic: step over that of the best fixed choice allowed, DDP included; median over the rounds."""
    of_best_low: float | None
    of_best_high: float | None
    best: str
    """Which that is."""
    predicted_s: float | None
    """What the model said of it before it ran."""
    search_s: float | None
    """Automatic: seconds that measuring and searching took, beyond what DDP would have needed for these steps."""
    replicas_equal: bool


# One rank


class Workload(NamedTuple):
    """A model and its batch."""

    model: nn.Module
    batch: Tensor


def workload(name: str, depth: int) -> Workload:
    """Return what every rank trains, each with a batch of its own."""
    if name in PROFILES:
        layers, samples = PROFILES[name]
        return Workload(Replayed(layers(), samples), torch.ones(1))
    width, layers_, rows = (256, 4, 2048) if name == "small" else (1024, depth, 8)
    model = mlp(width, layers_)
    return Workload(model, torch.randn(rows, width, generator=torch.Generator().manual_seed(dist.get_rank())))


class Trainee:
    """A DDP module with a hook or without; all share one model."""

    def __init__(self, work: Workload, kind: str) -> None:
        self.work = work
        self.ddp = DistributedDataParallel(work.model)
        self.state: Switch | None = None
        self.began = time.perf_counter()
        if kind != "ddp":
            timeout = timedelta(seconds=120)
            self.state = (
                Switch(self.ddp, timeout=timeout)
                if kind == "fixed"
                else AutoComm(self.ddp, kind, check=8, verbose=False, timeout=timeout)
            )
            self.ddp.register_comm_hook(self.state, hook)
        self.optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-4)

    def step(self) -> None:
        """Train a step."""
        self.optimizer.zero_grad()
        self.ddp(self.work.batch).square().mean().backward()
        self.optimizer.step()

    def timed(self, steps: int) -> float:
        """Train some steps, one after the other as training does; return the seconds of one, by the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return took.item() / steps

    def search(self) -> dict[str, Any]:
        """Let an `AutoComm` come to its choice; return what it said."""
        state, steps = self.state, 0
        assert isinstance(state, AutoComm)
        while not state.settled:
            self.step()
            steps += 1
        choice = state.choice
        assert choice is not None
        plans = {describe(one.plan): one.step_s for one in choice.options}
        chosen = describe(state.chosen or (None,))
        return {
            "chosen": chosen,
            "predicted": plans,
            "steps": steps,
            "search_s": time.perf_counter() - self.began - steps * choice.plain_s,
            "table": state.explain(),
        }


def work(setting: Setting, rounds: int) -> None:
    """Measure as one rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    load = workload(setting.model, setting.depth)
    plain, again, fixed = Trainee(load, "ddp"), Trainee(load, "ddp"), Trainee(load, "fixed")
    for one in (plain, again, fixed):
        for _ in range(2):  # DDP makes new buckets after the first step
            one.step()
    automatic = {}
    searched = {}
    for level in setting.allow:
        automatic[f"auto {level}"] = trainee = Trainee(load, level)
        searched[f"auto {level}"] = trainee.search()
    ways = {str(way): way for way in allowed("lossy", by_hosts=setting.ranks > 1)}
    trainees = {"ddp": plain, AGAIN: again, **automatic, **dict.fromkeys(ways, fixed)}
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    for number in range(-1, rounds):
        for name in random.Random(number).sample(list(seconds), len(seconds)):  # the same on every rank
            took = turn(trainees[name], ways.get(name))
            if number >= 0:  # the first round makes threads, groups and buffers
                seconds[name].append(took)
    found = {"seconds": seconds, "searched": searched, "replicas_equal": replicas_equal(load.model)}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    for one in (fixed, *automatic.values()):
        assert one.state is not None
        one.state.close()
    dist.barrier()
    dist.destroy_process_group()


def turn(trainee: Trainee, way: Scheme | None) -> float:
    """Return the length of a method's step in its turn, after one to get its buffers and connections going again.

    That of one step; of as many as take `_ENOUGH_S`, or `_MOST`, where it is short.
    """
    if way is not None:
        assert trainee.state is not None
        trainee.state.use((way,))
    trainee.step()
    first = trainee.timed(1)
    steps = min(int(_ENOUGH_S / first), _MOST)
    return trainee.timed(steps) if steps > 1 else first


# The lab


def measure(setting: Setting, rounds: int) -> list[Row]:
    """Run one setting and return a row for each method."""
    arguments = ["-m", "benchmarks.comm_choice", "--worker", json.dumps(setting), "--rounds", str(rounds)]
    with Lab(setting.hosts, setting.rate) as lab:
        output = lab.run(arguments, setting.ranks, timeout_s=900 + 150 * rounds)[0].output
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return rows_of(setting, json.loads(line.removeprefix("RESULT ")))


def rows_of(setting: Setting, result: dict[str, Any]) -> list[Row]:
    """Return the rows of what the ranks have found."""
    seconds, searched = result["seconds"], result["searched"]
    said = next(iter(searched.values()))["predicted"]
    found = []
    for method in seconds:
        own = searched.get(method)
        best = _best(seconds, method.removeprefix("auto "), setting) if own else ""
        speedup = _ratio(seconds["ddp"], seconds[method])
        behind: tuple[float | None, ...] = _ratio(seconds[method], seconds[best]) if own else (None, None, None)
        low, high = _fifths(seconds[method])
        predicted = (
            own["predicted"].get(own["chosen"]) if own else said.get("plain" if method in ("ddp", AGAIN) else method)
        )
        found.append(
            Row(
                f"{setting.hosts}x{setting.ranks}",
                setting.rate or "unshaped",
                setting.model,
                method,
                own["chosen"] if own else "",
                statistics.median(seconds[method]),
                low,
                high,
                speedup[0],
                speedup[1],
                speedup[2],
                behind[0],
                behind[1],
                behind[2],
                best,
                predicted,
                own["search_s"] if own else None,
                result["replicas_equal"],
            )
        )
    return found


def _best(seconds: dict[str, list[float]], level: str, setting: Setting) -> str:
    """Return the fastest of the fixed choices that a level allows."""
    names = ["ddp", *map(str, allowed(level, by_hosts=setting.ranks > 1))]
    return min(names, key=lambda name: statistics.median(seconds[name]))


def _ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios, and their 20th and 80th percentiles."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return (statistics.median(ratios), *_fifths(ratios))


def _fifths(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], fifths[3]


def told(row: Row) -> str:
    """Return a row in a line."""
    parts = [
        f"{row.shape} {row.rate:8} {row.model:6} {row.method:20} {row.step_s:7.3f} s",
        f"{row.low_s:.3f} to {row.high_s:.3f}",
        f"{row.speedup:6.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f}) times DDP",
    ]
    if row.predicted_s is not None:
        parts.append(f"predicted {row.predicted_s / row.step_s - 1:+.0%}")
    if row.of_best is not None:
        parts.append(f"{row.of_best:.3f} ({row.of_best_low:.3f} to {row.of_best_high:.3f}) of {row.best}")
        parts.append(f"chose {row.chosen}, search {row.search_s:.1f} s")
    return ", ".join(parts) + ("" if row.replicas_equal else ", replicas DIFFER")


@click.command()
@click.option("--only", multiple=True, help="Only this setting: 2x1,1gbit,mlp; a part of it will do.")
@click.option("--rounds", default=6, show_default=True, help="Times each method has its turn.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
@click.option("--worker", hidden=True)
def main(only: tuple[str, ...], rounds: int, record: bool, worker: str | None) -> None:
    """Measure."""
    if worker is not None:
        fields = json.loads(worker)
        return work(Setting(*fields), rounds)
    if reason := why_not():
        raise click.ClickException(reason)
    chosen = [setting for setting in SETTINGS if not only or any(part in setting.key for part in only)]
    if not chosen:
        raise click.ClickException(f"--only names none of {', '.join(one.key for one in SETTINGS)}")
    command = " ".join(["python -m benchmarks.comm_choice", *(one for one in sys.argv[1:] if one != "--record")])
    for setting in chosen:
        rows = measure(setting, rounds)
        for row in rows:
            print(told(row), flush=True)
        if record:
            write(command, rows)


def write(command: str, found: list[Row]) -> None:
    """Write the rows beside those of other settings recorded before."""
    rows = [{**one._asdict(), "command": command} for one in found]
    measured = {(row["shape"], row["rate"], row["model"]) for row in rows}
    old = [row for row in recording.rows("comm-choice") if (row["shape"], row["rate"], row["model"]) not in measured]
    what = "a DDP step with gradient communication chosen automatically, against DDP and every fixed choice"
    recording.write("comm-choice", what, {"cores": len(os.sched_getaffinity(0)), "rows": old + rows})


if __name__ == "__main__":
    main()
