"""`accel bench comm`: the table of nccl-tests for any backend of torch.distributed, per link class and checked."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from accel import __version__
from accel.errors import AccelError, InvalidArgument
from accel.files import check_folder, write_atomic
from accel.report.terminal import Cell, Page
from accel.report.words import clean

if TYPE_CHECKING:
    from accel.comm.bandwidth import Bandwidth, Row
    from accel.comm.bandwidth.fit import Fit

SCHEMA = 1
FAILED = 1
UNUSABLE = 2

# Also the order of the table. Written here because the modules that know them load torch.
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    dtype: str
    redop: str
    backend: str
    iters: int
    warmup: int
    row_s: float
    timeout_s: float
    target: str
    command: str


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read a number of bytes such as 4096, 4K or 64M, in powers of 1024 as nccl-tests does."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)(i?B)?", value.strip(), re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) < 1:
        raise click.BadParameter(f"must be a number of bytes such as 4096, 4K or 64M. Found: {value!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


@click.group()
def bench() -> None:
    """Measure what the machine gives."""


@bench.command()
@click.option("-o", "--operation", "operations", multiple=True, type=click.Choice(_OPERATIONS), help="Default: all.")
@click.option(
    "--min",
    "--min-size",
    "smallest",
    callback=_size,
    default="4K",
    metavar="SIZE",
    show_default=True,
    help="Smallest size.",
)
@click.option(
    "--max",
    "--max-size",
    "largest",
    callback=_size,
    default="64M",
    metavar="SIZE",
    show_default=True,
    help="Largest size.",
)
@click.option("--factor", type=click.IntRange(2, 1 << 20), default=4, show_default=True, help="From size to size.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True)
@click.option("--redop", type=click.Choice(["sum", "min", "max"]), default="sum", show_default=True)
@click.option("--link", "links", multiple=True, type=click.Choice(["intra", "inter", "world"]), help="Default: all.")
@click.option("--backend", default="", help="Of torch.distributed; default nccl with a GPU for each rank, else gloo.")
@click.option("--ranks", type=click.IntRange(1, 512), help="Processes to start here; default 2. Not under torchrun.")
@click.option("--iters", type=click.IntRange(2, 1000), default=20, show_default=True, help="Timed runs at most.")
@click.option("--warmup", type=click.IntRange(1, 100), default=2, show_default=True, help="Runs before them.")
@click.option("--row-seconds", type=click.FloatRange(0.01, 600), default=2.0, show_default=True, help="For timed runs.")
@click.option(
    "--timeout", type=click.FloatRange(1, 3600), default=30.0, show_default=True, help="Seconds; then given up."
)
@click.option(
    "--json", "target", type=click.Path(dir_okay=False), default="", metavar="FILE", help="Also write it there."
)
@click.pass_context
def comm(
    ctx: click.Context,
    operations: tuple[str, ...],
    smallest: int,
    largest: int,
    factor: int,
    dtype: str,
    redop: str,
    links: tuple[str, ...],
    backend: str,
    ranks: int | None,
    iters: int,
    warmup: int,
    row_seconds: float,
    timeout: float,
    target: str,
) -> None:
    """Time the collective operations over the links of this job and check their results.

    \b
        accel bench comm --ranks 4 --max 1M
        torchrun --nnodes 2 ... -m accel bench comm -o all_reduce

    Alone it starts processes on this machine. torchrun takes --max for an option of its own: write --max-size there.
    The exit status is 0, 1 if a result was wrong or a rank was lost, and 2 if the arguments can't be used.
    """
    if largest < smallest:
        raise InvalidArgument(f"--max must be at least --min, got {largest} and {smallest} bytes")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and ranks is not None:
        raise InvalidArgument(f"--ranks must not be given under torchrun, which started {os.environ['WORLD_SIZE']}")
    if target and (not launched or os.environ["RANK"] == "0"):  # who writes it
        check_folder("--json", target)
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    request = Request(
        operations=operations or _OPERATIONS,
        sizes=tuple(sizes),
        links=links,
        dtype=dtype,
        redop=redop,
        backend=backend,
        iters=iters,
        warmup=warmup,
        row_s=row_seconds,
        timeout_s=timeout,
        target=target,
        command=" ".join(["accel", *sys.argv[1:]]),
    )
    if launched:
        ctx.exit(_rank(request, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"))
    ctx.exit(_start(request, ranks or 2))


# --- processes -------------------------------------------------------------------------------------------------------


def _start(request: Request, ranks: int) -> int:
    """Run `ranks` processes on this machine; return the exit status."""
    # Imported here: nothing else needs torch before the ranks run.
    import torch.multiprocessing as mp

    # All traffic stays on this machine, and a host name that does not resolve must not stop it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="accel-bench-") as folder:
        context = mp.get_context("spawn")
        store = f"file://{folder}/store"
        processes = [context.Process(target=_child, args=(request, rank, ranks, store)) for rank in range(ranks)]
        for rank, process in enumerate(processes):
            os.environ["LOCAL_RANK"] = str(rank)
            process.start()
        codes = _joined(processes, request.timeout_s)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            click.echo(f"error: rank {rank} was ended by signal {-code} before the table was complete", err=True)
    ended = [code for code in codes if code]
    return max(abs(code) if code in (FAILED, UNUSABLE) else FAILED for code in ended) if ended else 0


def _joined(processes: list[Any], timeout_s: float) -> list[int | None]:
    """Wait for all; once one has failed, the others get the time that their timeouts take, no more."""
    last = None
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.05)
        if last is None and any(process.exitcode for process in processes):
            last = time.monotonic() + 3 * timeout_s + 15
        if last is not None and time.monotonic() > last:
            for process in processes:
                process.kill()
    return [process.exitcode for process in processes]


def _child(request: Request, rank: int, ranks: int, store: str) -> None:
    try:
        code = _rank(request, rank, ranks, store)
    except AccelError as error:
        if rank == 0:
            click.echo(f"error: {clean(error)}", err=True)
        code = UNUSABLE
    except KeyboardInterrupt:
        code = FAILED
    sys.stdout.flush()
    sys.exit(code)


def _rank(request: Request, rank: int, ranks: int, store: str) -> int:
    """Measure as one rank; rank 0 prints. Return the exit status."""
    import torch
    import torch.distributed as dist

    backend = request.backend or _best_backend(ranks)
    local = int(os.environ.get("LOCAL_RANK", rank))
    _check_backend(backend)
    if backend == "nccl":
        if local >= torch.cuda.device_count():
            raise InvalidArgument(
                f"nccl needs a GPU for each rank, got {torch.cuda.device_count()} for local rank {local}; "
                "use --backend gloo"
            )
        torch.cuda.set_device(local)
    try:
        timeout = timedelta(seconds=request.timeout_s)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if rank == 0:
            click.echo(f"error: the ranks did not meet: {_line(error)}; {_MEET}", err=True)
        return FAILED
    return _measured(request, rank, ranks, backend)


_MEET = "on several machines GLOO_SOCKET_IFNAME must name the interface they share; `accel doctor` looks at it"


def _best_backend(ranks: int) -> str:
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "gloo"


def _check_backend(backend: str) -> None:
    import torch.distributed as dist

    if not dist.is_backend_available(backend):
        known = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
        raise InvalidArgument(f"--backend must be one that this torch has ({', '.join(known)}), got {backend!r}")


def _measured(request: Request, rank: int, ranks: int, backend: str) -> int:
    import torch
    import torch.distributed as dist

    from accel.comm.bandwidth import PeerLost, Settings, measure

    torch.set_num_threads(1)
    table = _Table(request, backend, ranks) if rank == 0 else None
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        if table:
            table.row(row)

    settings = Settings(
        dtype=getattr(torch, request.dtype),
        redop=request.redop,
        warmup=request.warmup,
        runs=request.iters,
        row_s=request.row_s,
        timeout_s=request.timeout_s,
    )
    problem, result = "", None
    try:
        result = measure(
            request.operations,
            request.sizes,
            links=request.links or None,
            backend=backend,
            by_size=False,
            out_of_place_only=False,
            on_row=on_row,
            settings=settings,
        )
        dist.destroy_process_group()
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    except PeerLost as error:
        problem = str(error)
    if table:
        table.end(rows, result, problem)
    if problem:
        # Threads of a broken group may wait for ever at interpreter exit; what matters is on the screen and on disk.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    return FAILED if any(row.wrong for row in rows) else 0


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# --- the table -------------------------------------------------------------------------------------------------------

# Title → columns. Together 79 with a space between them.
_COLUMNS = {
    "size": 5,
    "count": 9,
    "type": 4,
    "redop": 5,
    "to": 3,
    "time us": 8,
    "spread": 9,
    "algbw": 7,
    "busbw": 7,
    "#wrong": 6,
    "sent/S": 6,
}
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


class _Table:
    """Prints rows as they come, so that a run that breaks has shown what it measured."""

    def __init__(self, request: Request, backend: str, ranks: int) -> None:
        self._request, self._backend, self._ranks = request, backend, ranks
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._shown: tuple[str, str] | None = None
        page = Page()
        page.say(f"accel bench comm: {_count(ranks, 'rank')}, {backend}", "bold")
        page.say(_LEGEND)
        click.echo(page.text())

    def row(self, row: Row) -> None:
        """Print one row, under a heading where the operation or the link changes."""
        page = Page()
        if self._shown != (row.link, row.operation):
            self._shown = row.link, row.operation
            page.heading(f"{row.operation}, {row.link}: {_count(row.ranks, 'rank')}")
            click.echo(page.text())
            click.echo(click.style(_joined_cells(list(_COLUMNS)), dim=True))
        if row.problem:
            page = Page()
            page.say(f"{size_text(row.size_bytes)}: {row.problem}", "yellow")
            click.echo(page.text())
        else:
            click.echo(click.style(_joined_cells(_cells(row)), fg="red" if row.wrong else None))

    def end(self, rows: list[Row], result: Bandwidth | None, problem: str) -> None:
        """Print the fitted lines and write the file."""
        fits = _fits(rows)
        lines = [one for one in fits if one[2].error <= _NO_LINE]
        page = Page()
        if fits:
            page.heading("lines t(S) = alpha + beta * S")
        if lines:
            page.row(_fit_cells("operation", "link", "alpha us", "beta s/byte", "1/beta GB/s", "worst error"))
        for operation, link, fit in lines:
            beta = fit.beta_s_per_byte
            speed = _gb(1 / beta) if beta else "-"
            page.row(
                _fit_cells(operation, link, _us(fit.alpha_s), f"{beta:.3g}", speed, f"{100 * fit.error:.0f} %"),
            )
        if without := [f"{operation} {link}" for operation, link, fit in fits if fit.error > _NO_LINE]:
            worst = max(fit.error for _, _, fit in fits)
            page.say(
                f"no line: {', '.join(without)}; times are up to {100 * worst:.0f} % off the nearest one: they follow "
                "none, or the machine was busy",
                "yellow",
            )
        if result is not None:
            page.say("")
            page.say(f"{_count(len(rows), 'row')} in {result.seconds:.1f} s; {_wrong_text(rows)}", "bold")
        click.echo(page.text())
        if problem:
            click.echo(f"error: {clean(problem)}", err=True)
        if self._request.target:
            _write(self._request.target, self._document(rows, fits, result, problem))

    def _document(
        self, rows: list[Row], fits: list[tuple[str, str, Fit]], result: Bandwidth | None, problem: str
    ) -> dict[str, Any]:
        import torch

        return {
            "kind": "comm",
            "schema": SCHEMA,
            "started": self._started,
            "command": self._request.command,
            "accel": __version__,
            "torch": torch.__version__,
            "backend": self._backend,
            "ranks": self._ranks,
            "nodes": [list(node) for node in result.nodes] if result else None,
            "problem": problem,
            "seconds": result.seconds if result else None,
            "rows": [{**asdict(row), "algbw": row.algbw, "busbw": row.busbw} for row in rows],
            "fits": [{"operation": operation, "link": link, **fit._asdict()} for operation, link, fit in fits],
        }


_NO_LINE = 0.5
"""Worst relative error from which on no line is printed: it would predict times that were not measured anywhere."""

_LEGEND = (
    "Sizes in bytes (K = 1024), bandwidths in GB/s as nccl-tests defines them. to: in place or out of place; spread: "
    "p20 and p80 beside the median; sent/S: what the network interfaces counted."
)


def _fit_cells(*texts: str) -> list[Cell]:
    widths = (14, 5, 9, 11, 11, 11)
    return [
        Cell(text=text, width=width, right=number > 1)
        for number, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]


def _joined_cells(texts: list[str]) -> str:
    return " ".join(text.rjust(width) for text, width in zip(texts, _COLUMNS.values(), strict=True))


def _cells(row: Row) -> list[str]:
    assert row.time_s and row.time_p20_s is not None and row.time_p80_s is not None
    below, above = (100 * (edge / row.time_s - 1) for edge in (row.time_p20_s, row.time_p80_s))
    return [
        size_text(row.size_bytes),
        str(row.count),
        re.sub(r"[a-z]+", lambda match: _SHORT[match[0]], row.dtype),
        row.redop or "-",
        "in" if row.in_place else "out",
        _us(row.time_s),
        f"{below:+.0f}/{above:+.0f}%",
        _gb(row.algbw),
        _gb(row.busbw),
        "-" if row.wrong is None else str(row.wrong),
        "-" if row.sent_bytes is None else f"{row.sent_bytes / row.size_bytes:.2f}",
    ]


def size_text(size: int) -> str:
    """Say a number of bytes, in K, M or G where it is a whole number of them.

    Example:
        >>> size_text(65536)
        '64K'
    """
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}" if seconds < 1e-3 else f"{1e6 * seconds:.0f}"


def _gb(rate: float | None) -> str:
    if rate is None:
        return "-"
    value = rate / 1e9
    return f"{value:.3g}" if 1e-3 <= value < 1e4 else f"{value:.1e}" if value else "0"


def _fits(rows: list[Row]) -> list[tuple[str, str, Fit]]:
    from accel.comm.bandwidth.fit import fit_line

    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        # One line an operation: the in-place form is what remains where there is no other.
        if row.time_s and (not row.in_place or not any(_outside(row, other) for other in rows)):
            series.setdefault((row.operation, row.link), []).append((row.size_bytes, row.time_s))
    return [(*key, fit_line(points)) for key, points in series.items() if len({size for size, _ in points}) > 1]


def _outside(row: Row, other: Row) -> bool:
    return other.operation == row.operation and other.link == row.link and not other.in_place


def _wrong_text(rows: list[Row]) -> str:
    measured = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in measured)
    without = len(rows) - len(measured)
    text = f"{wrong} wrong elements" if wrong else "every result exact" if measured else "nothing measured"
    return text + (f"; {_count(without, 'operation')} without a time" if without else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _write(target: str, document: dict[str, Any]) -> None:
    try:
        write_atomic(target, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InvalidArgument(
            f"--json {target} can't be written: {error.strerror or error}; name another place"
        ) from None
    click.echo(f"wrote {target}", err=True)
