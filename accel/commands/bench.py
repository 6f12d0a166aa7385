"""`accel bench comm`: the table of nccl-tests for any backend of torch.distributed, per link class and checked."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from accel import __version__
from accel.errors import AccelError, InvalidArgument
from accel.files import check_folder, save
from accel.report import blocks
from accel.report.terminal import Page
from accel.report.words import clean, count_text

if TYPE_CHECKING:
    from accel.comm.bandwidth import Bandwidth, Fit, Row

SCHEMA = 2
FAILED = 1
UNUSABLE = 2
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# Also the order of the table. Repeated here because the modules that define them load torch.
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read a number of bytes such as 4096, 4K or 64M, in powers of 1024 as nccl-tests does."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)(i?B)?", value.strip(), re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) < 1:
        raise click.BadParameter(f"must be a number of bytes such as 4096, 4K or 64M. Found: {value!r}")
    return int(match[1]) * UNITS[match[2].upper()]


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    dtype: str
    backend: str
    iters: int
    warmup: int
    row_s: float
    timeout_s: float
    target: str
    command: str


_option = partial(click.option, show_default=True)
_size_option = partial(_option, callback=_size, metavar="SIZE")
_choices = partial(click.option, multiple=True, help="Default: all.")


@click.group()
def bench() -> None:
    """Benchmarks."""


@bench.command()
@_choices("-o", "--operation", "operations", type=click.Choice(_OPERATIONS))
@_size_option("--min", "--min-size", "smallest", default="4K", help="Smallest size.")
@_size_option("--max", "--max-size", "largest", default="64M", help="Largest size.")
@_option("--factor", type=click.IntRange(2, 1 << 20), default=4, help="From size to size.")
@_option("--dtype", type=click.Choice(_DTYPES), default="float32")
@_choices("--link", "links", type=click.Choice(["intra", "inter", "world"]))
@click.option("--backend", default="", help="Of torch.distributed; default nccl with a GPU for each rank, else gloo.")
@click.option("--ranks", type=click.IntRange(1, 512), help="Processes to start here; default 2. Not under torchrun.")
@_option("--iters", type=click.IntRange(2, 1000), default=20, help="Timed runs at most.")
@_option("--warmup", type=click.IntRange(1, 100), default=2, help="Runs before them.")
@_option("--row-seconds", "row_s", type=click.FloatRange(0.01, 600), default=2.0, help="For timed runs.")
@_option("--timeout", "timeout_s", type=click.FloatRange(1, 3600), default=30.0, help="Seconds; then given up.")
@click.option("--report", "--json", "target", type=click.Path(dir_okay=False), default="", metavar="FILE", help="JSON.")
@click.pass_context
def comm(ctx: click.Context, /, smallest: int, largest: int, factor: int, ranks: int | None, **options: Any) -> None:
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
    if options["target"] and (not launched or os.environ["RANK"] == "0"):  # the process that writes it
        check_folder("--report", options["target"])
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    options["operations"] = options["operations"] or _OPERATIONS
    request = Request(**options, sizes=tuple(sizes), command=" ".join(["accel", *sys.argv[1:]]))
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
    """Wait for all processes; once one has failed, the others get no more time than their timeouts take."""
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
    import torch.distributed as dist

    backend = _backend(request, rank, ranks)
    try:
        timeout = timedelta(seconds=request.timeout_s)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if rank == 0:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            click.echo(f"error: the ranks did not meet: {first}; {_MEET}", err=True)
        return FAILED
    return _measured(request, rank, ranks, backend)


_MEET = "on several machines GLOO_SOCKET_IFNAME must name the interface they share; `accel doctor` looks at it"


def _backend(request: Request, rank: int, ranks: int) -> str:
    """Return the backend to be measured, with its device chosen."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local, local_ranks = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    backend = request.backend or ("nccl" if gpus >= local_ranks else "gloo")
    if not dist.is_backend_available(backend):
        known = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
        raise InvalidArgument(f"--backend must be one that this torch has ({', '.join(known)}), got {backend!r}")
    if backend == "nccl":
        if local >= gpus:
            raise InvalidArgument(
                f"nccl needs a GPU for each rank, got {gpus} for local rank {local}; use --backend gloo"
            )
        torch.cuda.set_device(local)
    return backend


def _measured(request: Request, rank: int, ranks: int, backend: str) -> int:
    import torch
    import torch.distributed as dist

    from accel.comm.bandwidth import PeerLost, Settings, measure_links

    torch.set_num_threads(1)
    table = BandwidthTable(request, backend, ranks) if rank == 0 else None
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        if table:
            table.row(row)

    settings = Settings(
        dtype=getattr(torch, request.dtype),
        warmup=request.warmup,
        runs=request.iters,
        row_s=request.row_s,
        timeout_s=request.timeout_s,
    )
    problem, result = "", None
    try:
        result = measure_links(
            request.operations,
            request.sizes,
            links=request.links or None,
            backend=backend,
            by_size=False,
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


# --- the table -------------------------------------------------------------------------------------------------------

_LEGEND = (
    "Sizes in bytes (K = 1024), bandwidths in GB/s as nccl-tests defines them. spread: "
    "p20 and p80 beside the median; sent/S: what the network interfaces counted."
)
_ROWS = blocks.columns("size>", "count>", "time us>", "spread>", "algbw>", "busbw>", "#wrong>", "sent/S>")
_FITS = blocks.columns("operation<", "link<", "alpha us>", "beta s/byte>", "1/beta GB/s>", "worst error>")
_NO_LINE = 0.5
"""Worst relative error above which no line is printed: it would predict times unlike any that were measured."""


class BandwidthTable:
    """Prints the table of each operation as soon as it is measured, so that an interrupted run has printed some."""

    def __init__(self, request: Request, backend: str, ranks: int) -> None:
        self._request, self._backend, self._ranks = request, backend, ranks
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._rows: list[Row] = []
        """Of the operation and link that are being measured."""
        page = Page()
        page.paragraph(f"accel bench comm: {count_text(ranks, 'rank')}, {backend}", "bold")
        page.paragraph(_LEGEND)
        click.echo(page.text())

    def row(self, row: Row) -> None:
        """Take one row; those before it are printed where it is of another operation or link."""
        if self._rows and (row.link, row.operation) != (self._rows[0].link, self._rows[0].operation):
            self._print()
        self._rows.append(row)

    def _print(self) -> None:
        if not self._rows:
            return
        page, first = Page(), self._rows[0]
        page.heading(f"{first.operation}, {first.link}: {count_text(first.ranks, 'rank')}, {first.dtype}")
        measured = [blocks.row(*_cells(row), tone="bad" if row.wrong else "") for row in self._rows if not row.problem]
        page.table(blocks.Table(columns=_ROWS, rows=measured))
        for row in self._rows:
            if row.problem:
                page.paragraph(f"{size_text(row.size_bytes)}: {row.problem}", "yellow")
        click.echo(page.text())
        self._rows = []

    def end(self, rows: list[Row], result: Bandwidth | None, problem: str) -> None:
        """Print the fitted lines and write the file."""
        self._print()
        fits = _fits(rows)
        page = Page()
        if fits:
            page.heading("lines t(S) = alpha + beta * S")
        lines = {key: fit for key, fit in fits.items() if fit.error <= _NO_LINE}
        cells = [
            blocks.row(
                *(*key, _us(fit.alpha_s), f"{fit.beta_s_per_byte:.3g}"),
                _gb(1 / fit.beta_s_per_byte if fit.beta_s_per_byte else None),
                f"{100 * fit.error:.0f} %",
            )
            for key, fit in lines.items()
        ]
        page.table(blocks.Table(columns=_FITS, rows=cells))
        if without := [key for key in fits if key not in lines]:
            worst = max(fits[key].error for key in without)
            page.paragraph(
                f"no line: {', '.join(map(' '.join, without))}; times are up to {100 * worst:.0f} % off the nearest "
                "one: they follow none, or the machine was busy",
                "yellow",
            )
        if result is not None:
            page.paragraph("")
            page.paragraph(f"{count_text(len(rows), 'row')} in {result.seconds:.1f} s; {_wrong_text(rows)}", "bold")
        click.echo(page.text())
        if problem:
            click.echo(f"error: {clean(problem)}", err=True)
        if target := self._request.target:
            document = self._document(rows, fits, result, problem)
            save("--report", target, json.dumps(document, indent=1, allow_nan=False) + "\n")
            click.echo(f"wrote {target}", err=True)

    def _document(
        self, rows: list[Row], fits: Mapping[tuple[str, str], Fit], result: Bandwidth | None, problem: str
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
            "fits": [{"operation": key[0], "link": key[1], **fit._asdict()} for key, fit in fits.items()],
        }


def _cells(row: Row) -> list[str]:
    median_s, low_s, high_s = row.time_s, row.time_p20_s, row.time_p80_s
    assert median_s and low_s is not None and high_s is not None  # what has none has a problem to tell
    return [
        size_text(row.size_bytes),
        str(row.count),
        _us(median_s),
        f"{100 * (low_s / median_s - 1):+.0f}/{100 * (high_s / median_s - 1):+.0f}%",
        _gb(row.algbw),
        _gb(row.busbw),
        "-" if row.wrong is None else str(row.wrong),
        "-" if row.sent_bytes is None else f"{row.sent_bytes / row.size_bytes:.2f}",
    ]


def size_text(size: int) -> str:
    """Format a number of bytes, in K, M or G where it is a whole number of them.

    Example:
        >>> size_text(65536)
        '64K'
    """
    for unit, factor in reversed(UNITS.items()):
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


def _fits(rows: list[Row]) -> dict[tuple[str, str], Fit]:
    """Return the line through what was measured of each operation over each link."""
    from accel.comm.bandwidth import fit_line

    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row.time_s:
            series.setdefault((row.operation, row.link), []).append((row.size_bytes, row.time_s))
    return {key: fit_line(points) for key, points in series.items() if len({size for size, _ in points}) > 1}


def _wrong_text(rows: list[Row]) -> str:
    measured = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in measured)
    without = len(rows) - len(measured)
    text = f"{wrong} wrong elements" if wrong else "every result exact" if measured else "nothing measured"
    return text + (f"; {count_text(without, 'operation')} without a time" if without else "")
