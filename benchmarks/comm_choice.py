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
import random
import statistics
import time
from datetime import timedelta
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme, allowed
from accel.comm.hooks import hook
from accel.comm.selection.planner import Planner
from accel.comm.selector import AutoComm
from benchmarks.comm.gradient_profiles import PROFILES, Replayed
from benchmarks.comm.lab import why_not
from benchmarks.comm.ranks import group, mlp, replicas_equal, report, run_in_lab, slowest
from benchmarks.record import Column, Record
from benchmarks.render import Cell, Row, block, times
from benchmarks.spread import Spread, fifths, ratios

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


RECORD = Record(
    "comm-choice",
    "a DDP step with gradient communication chosen automatically, against DDP and every fixed choice",
    {
        "shape": Column("hosts x ranks of each"),
        "rate": Column("of each host's link"),
        "model": Column("what is trained"),
        "method": Column('"ddp", "ddp again", "auto LEVEL", or a scheme for all buckets'),
        "chosen": Column("what the automatic choice came to"),
        "step_s": Column("median step of the slowest rank, s"),
        "low_s": Column("20th percentile, s"),
        "high_s": Column("80th percentile, s"),
        "speedup": Column("median over the rounds of DDP's step over the method's; each round runs every method once"),
        "speedup_low": Column("20th percentile of the rounds"),
        "speedup_high": Column("80th percentile of the rounds"),
        "of_best": Column("automatic: step ÷ that of the best fixed choice allowed, or of DDP; median of the rounds"),
        "of_best_low": Column("20th percentile of the rounds"),
        "of_best_high": Column("80th percentile of the rounds"),
        "best": Column("which fixed choice that is"),
        "predicted_s": Column("what the model said of the step before it ran, s"),
        "search_s": Column("automatic: measuring and searching, beyond what DDP would have needed for these steps, s"),
        "replicas_equal": Column("whether all ranks have the same weights in the end"),
    },
    key=("shape", "rate", "model"),
)


def table_block(result: Row) -> str:
    """Return what was chosen automatically, against the best fixed scheme."""
    head = (
        "{date}, {machine}, torch {torch}, gloo. Ways take turns in one launch; median and 20 to 80 % of rounds. "
        "Commands stand in the result. DDP again: a second DDP in the same turns; it shows how far apart two of the "
        "same are."
    )
    speedup = times("speedup")
    again = {_setting(row): speedup.format_map(row) for row in result["rows"] if row["method"] == "ddp again"}
    columns: dict[str, Cell] = {
        "ranks": "{shape}",
        "link": "{rate}",
        "model": "{model}",
        "allowed": lambda row: row["method"].removeprefix("auto "),
        "chosen": "{chosen}",
        "speed-up over DDP": speedup,
        "DDP again": lambda row: again.get(_setting(row), ""),
        "step ÷ best fixed": "{of_best:.3f} [{of_best_low:.2f}, {of_best_high:.2f}]",
        "predicted ÷ measured": lambda row: f"{row['predicted_s'] / row['step_s']:.2f}",
    }
    return block(head.format_map(result), columns, (r for r in result["rows"] if r["method"].startswith("auto")))


def _setting(row: Row) -> tuple[Any, ...]:
    return row["shape"], row["rate"], row["model"]


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
        self.state: Planner | None = None
        self.began = time.perf_counter()
        if kind != "ddp":
            timeout = timedelta(seconds=120)
            self.state = (
                Planner(self.ddp, timeout=timeout)
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
        return slowest(time.perf_counter() - began) / steps

    def search(self) -> dict[str, Any]:
        """Let an `AutoComm` come to its choice; return what it said."""
        state, steps = self.state, 0
        assert isinstance(state, AutoComm)
        while not state.settled:
            self.step()
            steps += 1
        choice = state.choice
        assert choice is not None
        predicted = {str(option): option.step_s for option in choice.options}
        return {
            "chosen": str(state.chosen or "plain"),
            "predicted": predicted,
            "steps": steps,
            "search_s": time.perf_counter() - self.began - steps * choice.plain_s,
            "table": state.explain(),
        }


def work(setting: Setting, rounds: int) -> None:
    """Measure as one rank; rank 0 prints the result."""
    load = workload(setting.model, setting.depth)
    plain, again, fixed = Trainee(load, "ddp"), Trainee(load, "ddp"), Trainee(load, "fixed")
    for trainee in (plain, again, fixed):
        for _ in range(2):  # DDP makes new buckets after the first step
            trainee.step()
    automatic = {}
    searched = {}
    for level in setting.allow:
        automatic[f"auto {level}"] = trainee = Trainee(load, level)
        searched[f"auto {level}"] = trainee.search()
    schemes = {str(scheme): scheme for scheme in allowed("lossy", by_hosts=setting.ranks > 1)}
    trainees = {"ddp": plain, AGAIN: again, **automatic, **dict.fromkeys(schemes, fixed)}
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    for number in range(-1, rounds):
        for name in random.Random(number).sample(list(seconds), len(seconds)):  # the same on every rank
            took = turn(trainees[name], schemes.get(name))
            if number >= 0:  # the first round makes threads, groups and buffers
                seconds[name].append(took)
    report({"seconds": seconds, "searched": searched, "replicas_equal": replicas_equal(load.model)})
    for trainee in (fixed, *automatic.values()):
        assert trainee.state is not None
        trainee.state.close()


def turn(trainee: Trainee, scheme: Scheme | None) -> float:
    """Return the length of a method's step in its turn, after one to get its buffers and connections going again.

    That of one step; of as many as take `_ENOUGH_S`, or `_MOST`, where it is short.
    """
    if scheme is not None:
        assert trainee.state is not None
        trainee.state.use(scheme)
    trainee.step()
    first = trainee.timed(1)
    steps = min(int(_ENOUGH_S / first), _MOST)
    return trainee.timed(steps) if steps > 1 else first


# The lab


def measure(setting: Setting, rounds: int) -> list[Row]:
    """Run one setting and return a row for each method."""
    arguments = ["benchmarks.comm_choice", "--worker", json.dumps(setting)]
    return rows_of(setting, run_in_lab(setting.hosts, setting.rate, setting.ranks, arguments, rounds))


def rows_of(setting: Setting, result: dict[str, Any]) -> list[Row]:
    """Return the rows of what the ranks have measured."""
    shape = f"{setting.hosts}x{setting.ranks}"
    about = {"shape": shape, "rate": setting.rate or "unshaped", "model": setting.model}
    seconds, searched = result["seconds"], result["searched"]
    predictions = next(iter(searched.values()))["predicted"]
    rows = []
    for method in seconds:
        row = {
            **about,
            "method": method,
            "chosen": "",
            **fifths(seconds[method]).named("step_s", "low_s", "high_s"),
            **_ratio(seconds["ddp"], seconds[method]).named("speedup", "speedup_low", "speedup_high"),
            **dict.fromkeys(("of_best", "of_best_low", "of_best_high")),
            "best": "",
            "predicted_s": predictions.get("plain" if method in ("ddp", AGAIN) else method),
            "search_s": None,
            "replicas_equal": result["replicas_equal"],
        }
        if method in searched:
            row |= _automatic(seconds, method, searched[method], setting)
        rows.append(row)
    return rows


def _automatic(
    seconds: dict[str, list[float]], method: str, searched: dict[str, Any], setting: Setting
) -> dict[str, Any]:
    """Return what a row of an automatic choice has beside the others."""
    level = method.removeprefix("auto ")
    fixed = ["ddp", *map(str, allowed(level, by_hosts=setting.ranks > 1))]
    best = min(fixed, key=lambda name: statistics.median(seconds[name]))
    return {
        "chosen": searched["chosen"],
        **_ratio(seconds[method], seconds[best]).named("of_best", "of_best_low", "of_best_high"),
        "best": best,
        "predicted_s": searched["predicted"].get(searched["chosen"]),
        "search_s": searched["search_s"],
    }


def _ratio(slow: list[float], fast: list[float]) -> Spread:
    return fifths(ratios(slow, fast))


def in_a_line(row: Row) -> str:
    """Return a row in a line."""
    parts = [
        "{shape} {rate:8} {model:6} {method:20} {step_s:7.3f} s",
        "{low_s:.3f} to {high_s:.3f}",
        "{speedup:6.2f} ({speedup_low:.2f} to {speedup_high:.2f}) times DDP",
    ]
    if row["predicted_s"] is not None:
        parts.append(f"predicted {row['predicted_s'] / row['step_s'] - 1:+.0%}")
    if row["of_best"] is not None:
        parts.append("{of_best:.3f} ({of_best_low:.3f} to {of_best_high:.3f}) of {best}")
        parts.append("chose {chosen}, search {search_s:.1f} s")
    return ", ".join(parts).format_map(row) + ("" if row["replicas_equal"] else ", replicas DIFFER")


@click.command()
@click.option("--only", multiple=True, help="Only this setting: 2x1,1gbit,mlp; a part of it will do.")
@click.option("--rounds", default=6, show_default=True, help="Times each method has its turn.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
@click.option("--worker", hidden=True)
def main(only: tuple[str, ...], rounds: int, record: bool, worker: str | None) -> None:
    """Measure."""
    if worker is not None:
        with group(timeout_s=300):
            return work(Setting(*json.loads(worker)), rounds)
    if reason := why_not():
        raise click.ClickException(reason)
    chosen = [setting for setting in SETTINGS if not only or any(part in setting.key for part in only)]
    if not chosen:
        raise click.ClickException(f"--only names none of {', '.join(setting.key for setting in SETTINGS)}")
    for setting in chosen:
        rows = measure(setting, rounds)
        for row in rows:
            print(in_a_line(row), flush=True)
        if record:
            RECORD.write(rows)


if __name__ == "__main__":
    main()
