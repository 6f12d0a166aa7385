"""What each compressor costs, whatever the network: bytes it sends, processor time, memory.

    python -m benchmarks.compressor_costs [--rounds 7] [--record]

One bucket of 25 MB, of matrices and biases, on one thread, between two ranks that are only played: the hook's own
stages over channels that send nothing (`accel.comm.cost_model.dry_run`). Compressors take turns; times are medians of
rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import click
import torch

from accel.comm.catalogue import CATALOGUE, Scheme, register_compressor
from accel.comm.compressor import RESIDUAL, Compressor
from accel.comm.cost_model.dry_run import dry_run
from accel.comm.dgc import DGC
from accel.comm.layout import Layout
from accel.comm.powersgd import PowerSGD
from accel.comm.ranks.topology import Topology
from benchmarks.record import Column, Record
from benchmarks.render import SOURCE, Row
from benchmarks.spread import extremes

WIDTH, DEPTH = 1024, 6
TWO = Topology(((0,), (1,)))
MORE: dict[str, Callable[[], Compressor]] = {
    "acp-sgd 4": lambda: PowerSGD(alternate=True),
    "dgc 0.1 %": lambda: DGC(momentum=False),
}


RECORD = Record(
    "compressor-costs",
    f"one bucket of {DEPTH * (WIDTH + 1) * WIDTH * 4 / 1e6:.1f} MB between two ranks: sent by each, processor time",
    {
        "compressor": Column("by its name in the catalogue", "compressor"),
        "sent_mb": Column("by a rank, MB", "MB sent", ":.3f"),
        "of_gradients": Column("share of the gradients' bytes", "of the gradients", ":.2%"),
        "cpu_ms": Column("median of rounds, ms", "CPU-ms", "{cpu_ms:.1f} [{cpu_low_ms:.1f}, {cpu_high_ms:.1f}]"),
        "cpu_low_ms": Column("least, ms"),
        "cpu_high_ms": Column("most, ms"),
        "copies": Column("from step to step, and while new ones are made", "copies of the gradients kept"),
    },
    head=SOURCE + ": {what}.",
)
LINE = (
    "{compressor:12} {sent_mb:8.3f} MB, {of_gradients:7.2%} of the gradients, {cpu_ms:6.1f} ms [{cpu_low_ms:.1f}, "
    "{cpu_high_ms:.1f}], {copies} copies of the gradients kept"
)


def bucket() -> Layout:
    """Return the bucket."""
    names = tuple(f"{i}.{kind}" for i in range(DEPTH) for kind in ("weight", "bias"))
    shapes = tuple(torch.Size(shape) for _ in range(DEPTH) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    return Layout(0, names, shapes, torch.float32, True)


def once(name: str, layout: Layout) -> tuple[float, float]:
    """Return processor milliseconds and bytes sent by a rank."""
    stages = dry_run(Scheme(name), layout, TWO, torch.device("cpu"), runs=1)
    parts = [part for stage in stages for part in stage]
    calls = [part.call for part in parts if part.call is not None]
    # A ring of two sends each byte once; an exchange sends what it notes.
    sent = sum(call.near_bytes + call.far_bytes for call in calls)
    return sum(part.core_s for part in parts) * 1e3, sent


def memory_copies(compressor: Compressor, feedback: bool) -> int:
    """Return the copies of the gradients that a compressor keeps from step to step, and while it makes new ones."""
    return 2 * len({*compressor.fields, *((RESIDUAL,) if feedback and compressor.takes_feedback else ())})


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Measure each compressor."""
    torch.set_num_threads(1)
    for name, make in MORE.items():
        register_compressor(name, make, "lossy")
    layout = bucket()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CATALOGUE}
    for _ in range(rounds):
        for name, taken in found.items():
            taken.append(once(name, layout))
    rows = [_row(name, taken, layout) for name, taken in found.items()]
    for row in rows:
        click.echo(LINE.format_map(row))
    if record:
        RECORD.write(rows)


def _row(name: str, taken: list[tuple[float, float]], layout: Layout) -> Row:
    entry, sent = CATALOGUE[name], taken[-1][1]
    return {
        "compressor": name,
        "sent_mb": sent / 1e6,
        "of_gradients": sent / (4 * layout.numel),
        **extremes([ms for ms, _ in taken]).named("cpu_ms", "cpu_low_ms", "cpu_high_ms"),
        "copies": memory_copies(entry.make(), entry.level == "lossy"),
    }


if __name__ == "__main__":
    main()
