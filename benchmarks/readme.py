"""Fill the marked blocks of README.md and the manual from committed results: no figure is typed by hand.

    python -m benchmarks.readme [--check]

The newest file of each kind under benchmarks/results/ is used; `--check` changes nothing and exits with 1 if a page is
out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from accel.files import write_atomic
from benchmarks import (
    bernoulli,
    cluster_policy,
    cluster_resizing,
    cluster_simulations,
    comm_accuracy,
    comm_choice,
    comm_hooks,
    compressor_costs,
    decision_faults,
    demo,
    end_to_end,
    fault_matrix,
    fcos_targets,
    jpeg,
    launch_cost,
    length_balance,
    loaders,
    muon,
    never_slower,
    noise_overhead,
    optimizers,
    pollux,
    public_scripts,
    recovery,
    repeated_tests,
    resizing,
    scaling,
    short_runs,
    simota,
    strategy_table,
    time_to_accuracy,
    torch_versions,
    tuning,
)
from benchmarks.gpu import decisive_tables, searches
from benchmarks.gpu import tables as gpu
from benchmarks.proof import figures_block, proof_block
from benchmarks.record import ROOT, newest


class Block(NamedTuple):
    """A marked part of a page."""

    page: str
    marker: str
    result: str
    """Name of the record it is made from."""
    text: Callable[[dict[str, Any]], str]
    part: str = ""
    """Of the record, if any will do that has it."""


BLOCKS = (
    Block("docs/figures.md", "demo", "demo", demo.table_block),
    Block("docs/figures.md", "demo_amx", "demo-amx", demo.table_block),
    Block("README.md", "proof", "never-slower-reordered", lambda _: proof_block(newest)),
    Block("docs/figures.md", "scripts", "public-scripts", public_scripts.RECORD.block),
    Block("docs/figures.md", "long", "long-scripts", public_scripts.LONG.block),
    Block("docs/figures.md", "figures", "never-slower-reordered", lambda _: figures_block(newest)),
    Block("docs/figures.md", "table", "never-slower-reordered", never_slower.RECORD.block),
    Block("docs/figures.md", "whole", "end-to-end", end_to_end.table_block),
    Block("docs/figures.md", "short", "short-runs", short_runs.RECORD.block),
    Block("docs/strategies.md", "gains", "strategy-gains", strategy_table.table_block),
    Block("docs/ranks.md", "scaling", "scaling", scaling.RECORD.block),
    Block("docs/profiler.md", "faults", "fault-matrix", fault_matrix.table_block),
    Block("docs/loader.md", "loaders", "loaders", loaders.RECORD.block),
    Block("docs/samplers.md", "lengths", "length-balance", length_balance.RECORD.block),
    Block("docs/images.md", "jpeg", "jpeg", jpeg.RECORD.block),
    Block("docs/comm_figures.md", "hooks", "comm-hooks", comm_hooks.RECORD.block),
    Block("docs/comm_figures.md", "launches", "comm-launches", comm_hooks.LAUNCHES.block),
    Block("docs/comm_figures.md", "costs", "compressor-costs", compressor_costs.RECORD.block),
    Block("docs/comm_figures.md", "choice", "comm-choice", comm_choice.table_block),
    Block("docs/comm_figures.md", "accuracy", "comm-accuracy", comm_accuracy.table_block),
    Block("docs/goodput.md", "step-times", "pollux-step-times", pollux.STEP_TIMES.block),
    Block("docs/goodput.md", "steps", "pollux-steps", pollux.STEPS.block),
    Block("docs/cluster.md", "simulations", "cluster-simulations", cluster_simulations.RECORD.block),
    Block("docs/cluster.md", "ray", "cluster-resizing", cluster_resizing.RECORD.block),
    Block("docs/cluster.md", "tuning", "tuning", tuning.RECORD.block),
    Block("docs/cluster.md", "rounds", "cluster-policy", cluster_policy.RECORD.block),
    Block("docs/noise_scale.md", "overhead", "noise-overhead", noise_overhead.RECORD.block),
    Block("docs/optimizers.md", "cpu", "optimizers", optimizers.RECORD.block),
    Block("docs/optimizers.md", "muon", "muon", muon.RECORD.block),
    Block("docs/figures.md", "target", "time-to-accuracy", time_to_accuracy.table_block),
    Block("docs/kernels.md", "simota", "simota", simota.table_block),
    Block("docs/kernels.md", "fcos", "fcos-targets", fcos_targets.table_block),
    Block("docs/contributing/kernels.md", "host", "launch-cost", launch_cost.RECORD.block),
    Block("docs/contributing/decisions.md", "decisions", "decision-faults", decision_faults.RECORD.block),
    Block("docs/contributing/tests.md", "runs", "repeated-tests", repeated_tests.table_block),
    Block("docs/contributing/tests.md", "versions", "torch-versions", torch_versions.RECORD.block),
    Block("docs/checkpoints.md", "recovery", "recovery", recovery.RECORD.block),
    Block("docs/checkpoints.md", "resizing", "resizing", resizing.RECORD.block),
    Block("docs/kernels.md", "bernoulli", "bernoulli", bernoulli.RECORD.block),
    Block("docs/gpu.md", "decisive", "gpu", decisive_tables.text, "table"),
    Block("docs/gpu.md", "targets", "gpu", gpu.judged_block),
    Block("docs/gpu.md", "searches", "searches", searches.searches_block),
    Block("docs/gpu.md", "windows", "gpu", gpu.windows_block),
    Block("docs/gpu.md", "assignment", "gpu", gpu.assignment_block),
    Block("docs/gpu.md", "training", "gpu", gpu.training_block),
    Block("docs/gpu.md", "gradients", "gpu", gpu.gradients_block),
    Block("docs/gpu.md", "to_target", "gpu", gpu.to_target_block),
)


def filled(page: str, text: str) -> str:
    """Return a page with its blocks filled; a block without results stays as it is."""
    for block in BLOCKS:
        if block.page == page and (result := newest(block.result, block.part)) is not None:
            begin, end = f"<!-- {block.marker}:begin -->", f"<!-- {block.marker}:end -->"
            text = text[: text.index(begin)] + f"{begin}\n{block.text(result)}\n" + text[text.index(end) :]
    return text


@click.command()
@click.option("--check", is_flag=True, help="Exit with 1 if a page is out of date.")
def main(check: bool) -> None:
    """Fill the pages' figures."""
    old = {block.page: (ROOT / block.page).read_text(encoding="utf-8") for block in BLOCKS}
    new = {page: filled(page, text) for page, text in old.items()}
    if check:
        sys.exit(old != new)
    for page, text in new.items():
        write_atomic(ROOT / page, text)


if __name__ == "__main__":
    main()
