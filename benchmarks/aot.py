"""Compile every kernel variant for three generations of GPUs, without one, and compare with the committed table.

    python -m benchmarks.aot [--check | --record] [--only TEXT] [--jobs N]

For each variant and architecture: registers a thread, bytes of stack (spills), shared memory, which tensor-core
instruction was found, and a digest of what was compiled. `--check` compiles everything, and ends with status 1 on a
spill, or on a difference from benchmarks/aot.csv. `--record` compiles what has another digest than there, and writes
the file: a change of a kernel is committed with its rows. The tests compare all digests, and compile a sample.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from accel.files import write_atomic
from accel.profiler.host import usable_cores
from benchmarks.kernels.aot_spills import KNOWN_SPILLS

TABLE = Path(__file__).with_name("aot.csv")
ARCHITECTURES = (80, 90, 100)
SHARED_MOST = {80: 166_912, 90: 232_448, 100: 232_448}
"""Architecture → bytes of shared memory a program may have; a launch with more raises."""
_TENSOR_CORES = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")


@dataclass(frozen=True)
class Row:
    """What one variant compiles to."""

    variant: str
    architecture: int
    """Compute capability times ten."""
    registers: int
    stack_bytes: int
    """Spilled values lie there."""
    shared_bytes: int
    tensor_cores: str
    """The instruction, '' if there is none."""
    key: str
    """Digest of the source, the parameters and the compiler's version."""


def compiled(name: str, architecture: int) -> Row:
    """Compile one variant; runs in a process of its own, in which kernels are not interpreted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.kernels.aot_variants import variants

    variant = next(v for v in variants(architecture) if v.name == name)
    signature = variant.signature()
    order = list(signature)
    # The launcher finds pointers aligned to 16 bytes; without that hint the compiler reports spills that no run has.
    aligned = {(order.index(argument),): [["tt.divisibility", 16]] for argument in variant.pointers}
    constants = {(order.index(argument),): value for argument, value in variant.constants.items()}
    source = ASTSource(variant.kernel, signature, constants, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=variant.options)
    usage = _resources(kernel.asm["cubin"])
    found = next((word for word in _TENSOR_CORES if word in kernel.asm["ptx"]), "")
    return Row(name, architecture, usage["REG"], usage["STACK"], kernel.metadata.shared, found, variant.key)


def _resources(cubin: bytes) -> dict[str, int]:
    """Return what the compiler's own tool says of a binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


def _named(job: tuple[str, int]) -> Row:
    return compiled(*job)


def compile_all(names: Sequence[str], jobs: int) -> list[Row]:
    """Compile the variants for all architectures, several at a time."""
    work = [(name, architecture) for name in names for architecture in ARCHITECTURES]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_compiling) as pool:
        return list(pool.map(_named, work))


def _compiling() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["OMP_NUM_THREADS"] = "1"


def names(only: str = "") -> list[str]:
    """Return the names of the variants that contain `only`."""
    from benchmarks.kernels.aot_variants import variants

    return [variant.name for variant in variants(ARCHITECTURES[0]) if only in variant.name]


def held(recorded: Iterable[Row]) -> dict[str, list[Row]]:
    """Return variant → its recorded rows, where these were made of what the variant is now."""
    from benchmarks.kernels.aot_variants import variants

    keys = {(v.name, architecture): v.key for architecture in ARCHITECTURES for v in variants(architecture)}
    found: dict[str, list[Row]] = {name: [] for name, _ in keys}
    for row in recorded:
        if keys.get((row.variant, row.architecture)) == row.key:
            found[row.variant].append(row)
    return {name: rows for name, rows in found.items() if tuple(row.architecture for row in rows) == ARCHITECTURES}


def renewed(recorded: Iterable[Row], jobs: int) -> list[Row]:
    """Return the rows of all variants, those that hold as they are and the others compiled."""
    kept = held(recorded)
    made = compile_all([name for name in names() if name not in kept], jobs)
    rows = [row for rows in kept.values() for row in rows] + made
    order = {name: index for index, name in enumerate(names())}
    return sorted(rows, key=lambda row: (order[row.variant], row.architecture))


def read(path: Path = TABLE) -> list[Row]:
    """Read the committed table."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    numbers = {f.name for f in fields(Row) if f.type == "int"}
    return [_row_of({name: int(word) if name in numbers else word for name, word in line.items()}) for line in lines]


def _row_of(values: dict[str, Any]) -> Row:
    return Row(**values)


def text_of(rows: Iterable[Row]) -> str:
    """Return the table as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def problems(found: Sequence[Row], recorded: Sequence[Row]) -> list[str]:
    """Say what is wrong: spills, too much shared memory, rows unlike the recorded ones, rows on one side only."""
    known = {(row.variant, row.architecture): row for row in recorded}
    told = [
        f"{_label(row)}: {row.stack_bytes} bytes of stack (spills)"
        for row in found
        if row.stack_bytes > KNOWN_SPILLS.get((row.variant, row.architecture), 0)
    ]
    told += [
        f"{_label(row)}: {row.shared_bytes} bytes of shared memory, there are {SHARED_MOST[row.architecture]}"
        for row in found
        if row.shared_bytes > SHARED_MOST[row.architecture]
    ]
    for row in found:
        before = known.pop((row.variant, row.architecture), None)
        if before is None:
            told.append(f"{_label(row)}: not in {TABLE.name}; record it")
        elif before != row:
            changes = [
                f"{n} {a} → {b}"
                for (n, a), b in zip(asdict(before).items(), asdict(row).values(), strict=True)
                if a != b
            ]
            told.append(f"{_label(row)}: {', '.join(changes)}; if that is meant, record it")
    return told + [f"{_label(row)}: in {TABLE.name}, but there is no such variant" for row in known.values()]


def _label(row: Row) -> str:
    return f"{row.variant}, sm_{row.architecture}"


@click.command()
@click.option("--check", is_flag=True, help="End with status 1 on a spill or a difference from the committed table.")
@click.option("--record", is_flag=True, help="Compile what changed, and write the committed table.")
@click.option("--only", default="", help="Variants whose name contains this.")
@click.option("--jobs", default=usable_cores, type=int, help="Compilations at a time.  [default: cores]")
def main(check: bool, record: bool, only: str, jobs: int) -> None:
    """Compile."""
    if record and only:
        raise click.UsageError("--record writes the whole table: leave --only out")
    rows = renewed(read() if TABLE.exists() else [], jobs) if record else compile_all(names(only), jobs)
    click.echo(text_of(rows), nl=False)
    if record:
        write_atomic(TABLE, text_of(rows))
    if check:
        told = problems(rows, [row for row in read() if only in row.variant])
        for line in told:
            click.echo(line, err=True)
        sys.exit(1 if told else 0)


if __name__ == "__main__":
    main()
