"""How fast the ranks' links are: each operation timed per link class, its result checked, and a line fitted.

    t(S) = α + β·S          α seconds, β seconds per byte of S

`measure` is made for the start of a training run: few sizes, an end in time, and the same numbers on every rank, so
that what is decided by them is decided alike everywhere. `accel bench comm` prints the same measurement as a table.

How a row comes about: buffers are filled, one run is timed by itself, from the slowest rank's time all ranks take the
same number of runs, and these follow each other without a barrier, as nccl-tests does. The time of one run is that of
its slowest rank; the row's is the median of the runs. So α holds what a run costs that follows another: a rank that
only sends (the root of a broadcast) may already be ahead.

A probe must move more than the network lets pass unshaped: token buckets and burst credits make small probes look fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accel.comm.bandwidth.cases import (
    LINKS,
    OPERATIONS,
    Case,
    LinkClass,
    Operation,
    RankPlace,
    elements,
    groups_of,
    links_of,
    sent_bytes,
)
from accel.comm.ranks.channel import GlooChannel, own_store
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.topology import by_machine, identity
from accel.profiler.errors import AccelError, InvalidArgument, InvalidState

PROBE_SIZES = (1 << 12, 1 << 19, 1 << 21)
PROBE_OPERATIONS = ("all_reduce", "all_gather", "all_to_all")

_UNSUPPORTED = ("not support", "unsupported", "not implemented", "no backend type", "does not implement")
_FEWEST = 2  # runs of a row; sizes of a fit


class PeerLost(AccelError, RuntimeError):
    """A rank has gone, or an operation failed on some ranks only: the group can't be used any more."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation on one size over one link class."""

    link: str
    operation: str
    ranks: int
    """n: ranks of the largest group that communicates."""
    size_bytes: int
    """S."""
    count: int
    """Elements of S."""
    dtype: str
    runs: int = 0
    time_s: float | None = None
    """Median over the runs of the slowest rank's time; None if there is none."""
    time_p20_s: float | None = None
    time_p80_s: float | None = None
    wrong: int | None = None
    """Elements with a wrong result, over all ranks."""
    sent_bytes: float | None = None
    """Bytes on the wire of one run, headers included: sent by the busiest node over its network interfaces, or, for
    `intra`, sent over loopback by each rank. None where the counters can't be read or did not move."""
    problem: str = ""
    """Why there is no time."""

    @property
    def factor(self) -> float:
        """busbw / algbw."""
        return OPERATIONS[self.operation].factor(self.ranks)

    @property
    def algbw(self) -> float | None:
        """S / t in bytes per second."""
        return self.size_bytes / self.time_s if self.time_s else None

    @property
    def busbw(self) -> float | None:
        """algbw · factor(n) in bytes per second."""
        return self.algbw * self.factor if self.algbw is not None else None


class Fit(NamedTuple):
    """The line t(S) = alpha_s + beta_s_per_byte · S."""

    alpha_s: float
    beta_s_per_byte: float
    error: float
    """Largest relative distance of a measured time from the line: 0.5 means that no line describes the operation."""
    largest_bytes: int
    """Largest S measured."""

    def seconds(self, size_bytes: float) -> float:
        """Predict the time of one operation on `size_bytes`."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes


def fit_line(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit t = α + β·S with α, β ≥ 0 by least squares of the relative error.

    The relative error gives small sizes, which hold α, the same say as large ones, which hold β. Where that would make
    α negative it is 0, and β follows from the absolute errors, hence from the largest sizes.

    Args:
        points: (S in bytes, t in seconds), two different sizes at least.

    Raises:
        InvalidArgument: if there are fewer than two sizes.

    Example:
        >>> fit_line([(1000, 0.002), (2000, 0.003)])[:2]
        (0.001, 1e-06)
    """
    sizes = np.array([size for size, _ in points], dtype=float)
    times = np.array([seconds for _, seconds in points], dtype=float)
    if len(set(sizes)) < 2:
        raise InvalidArgument(f"a line needs two different sizes, got {sorted(set(sizes))}; measure another size")
    matrix = np.stack([1 / times, sizes / times], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(matrix / matrix.max(0), np.ones(len(times)), rcond=None)[0] / matrix.max(0), 0
    if alpha < 0:
        # Small sizes that were faster than the rate of large ones (a token bucket let them pass): the large ones count.
        alpha, beta = 0.0, float(times @ sizes / (sizes @ sizes))
    elif beta < 0:
        alpha, beta = float(matrix[:, 0].sum() / (matrix[:, 0] @ matrix[:, 0])), 0.0
    error = float(np.abs(matrix @ np.array([alpha, beta]) - 1).max())
    return Fit(float(alpha), float(beta), error, int(sizes.max()))


@dataclass(frozen=True)
class Bandwidth:
    """The result of `measure`, the same on every rank."""

    nodes: tuple[tuple[int, ...], ...]
    """Ranks of each node."""
    rows: tuple[Row, ...]
    seconds: float
    """Wall time of the measurement on its slowest rank."""
    links: tuple[str, ...]
    """Link classes measured."""

    def link(self, name: str) -> str:
        """Return the measured class that stands for `name`.

        On one node `world` and `inter` are `intra`, with one rank a node `world` and `intra` are `inter`.
        """
        if name not in LINKS:
            raise InvalidArgument(f"link must be one of {', '.join(LINKS)}, got {name!r}")
        return name if name in self.links else self.links[0]

    def fit(self, operation: str, link: str = "world") -> Fit:
        """Return the line of `operation` over `link`.

        Raises:
            InvalidArgument: if the operation was not measured there on two sizes.
        """
        name = self.link(link)
        rows = [row for row in self.rows if row.link == name and row.operation == operation]
        return fit_line([(row.size_bytes, row.time_s) for row in rows if row.time_s])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How rows are measured."""

    dtype: torch.dtype = torch.float32
    warmup: int = 1
    """Runs before the timed ones, the one that sets their number included; at least 1."""
    runs: int = 10
    """Timed runs at most; at least 2 are made."""
    row_s: float = 0.04
    """Time for the timed runs of one row."""
    budget_s: float = math.inf
    """Time for everything; each operation gets its two smallest sizes all the same."""
    timeout_s: float = 30.0
    """Time after which an operation that does not end has failed."""

    def __post_init__(self) -> None:
        for name, least in (("warmup", 1), ("runs", _FEWEST), ("row_s", 0), ("budget_s", 0), ("timeout_s", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise InvalidArgument(f"{name} must be at least {least}, got {value}")


def measure_links(
    operations: Sequence[str] = PROBE_OPERATIONS,
    sizes: Sequence[int] = PROBE_SIZES,
    *,
    links: Sequence[str] | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    by_size: bool = True,
    on_row: Callable[[Row], None] | None = None,
    settings: Settings | None = None,
) -> Bandwidth:
    """Measure operations over each link class; all ranks of the initialised default group call this together.

    It ends soon after `settings.budget_s` (default 1.5 s): a size is left out, on all ranks alike, if the time of the
    size before says that it would not fit; the two smallest sizes of each operation are always measured.

    Args:
        operations: names from `OPERATIONS`.
        sizes: S in bytes, increasing; rounded down to whole elements, equal on all ranks.
        links: link classes to measure; default those that differ (see `LinkClass`).
        backend: of the measured groups; default that of the default group.
        device: where the buffers are; default the current CUDA device for NCCL, else the CPU.
        by_size: all operations at the smallest size first, so that time that runs out is missing at the largest;
            False finishes one operation before the next.
        on_row: called with each row as it is measured, on every rank.
        settings: how rows are measured.

    Returns:
        Rows and, through `Bandwidth.fit`, lines. The same on every rank.

    Raises:
        InvalidArgument: if an argument is out of range.
        InvalidState: if there is no process group.
        PeerLost: if a rank has died, or an operation failed on some ranks only or timed out.

    Example:
        >>> speed = measure_links()
        >>> speed.fit("all_reduce", "inter").seconds(25 << 20)
    """
    settings = settings or Settings(budget_s=1.5)
    _check(operations, sizes, links)
    if not dist.is_initialized():
        raise InvalidState("measure_links needs a process group: call torch.distributed.init_process_group first")
    began = time.perf_counter()
    objects = _object_group(settings.timeout_s)
    try:
        nodes = by_machine(objects.gather(identity())).hosts
        classes = [link for link in links_of(nodes) if links is None or link.name in links]
        if not classes:
            there = ", ".join(link.name for link in links_of(nodes))
            raise InvalidArgument(f"links must hold one that is there ({there}), got {', '.join(links or ())}")
        name = backend or dist.get_backend()
        groups = groups_of(classes, name, timedelta(seconds=settings.timeout_s))
        sweep = _Sweep(objects, groups, nodes, _device(name, device), settings, began)
        rows = sweep.all(_plan(classes, operations, sizes, by_size), on_row)
        seconds = objects.decide(time.perf_counter() - began, max)
        for group in filter(None, groups.values()):
            dist.destroy_process_group(group)
    finally:
        objects.close()
    return Bandwidth(nodes, tuple(rows), seconds, tuple(link.name for link in classes))


def _check(operations: Sequence[str], sizes: Sequence[int], links: Sequence[str] | None) -> None:
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or not operations:
        raise InvalidArgument(f"operations must be among {', '.join(OPERATIONS)}, got {', '.join(unknown) or 'none'}")
    if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        raise InvalidArgument(f"sizes must be increasing numbers of bytes, got {list(sizes)}")
    if strange := [name for name in links or () if name not in LINKS]:
        raise InvalidArgument(f"links must be among {', '.join(LINKS)}, got {', '.join(strange)}")


def _device(backend: str, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


class _SweepStep(NamedTuple):
    link: LinkClass
    operation: Operation
    size_bytes: int


def _plan(
    links: Sequence[LinkClass], operations: Sequence[str], sizes: Sequence[int], by_size: bool
) -> list[_SweepStep]:
    steps = [_SweepStep(link, OPERATIONS[name], size) for link in links for name in operations for size in sizes]
    return sorted(steps, key=lambda step: step.size_bytes) if by_size else steps


def _object_group(timeout_s: float) -> ObjectGroup:
    """Return the group for small objects beside the measurement."""
    world = dist.group.WORLD
    assert world is not None
    # Ranks that wait for an operation to time out come late to the next exchange.
    timeout = timedelta(seconds=2 * timeout_s + 5)
    channel = GlooChannel(own_store(world, "bandwidth"), range(world.size()), world.rank(), timeout)
    return ObjectGroup(channel, lambda error: PeerLost(f"a rank no longer answers ({_brief(error)})"))


def _brief(error: BaseException) -> str:
    """Return what an error of torch says, without the place in its source and its stack."""
    text = str(error).strip().split("\n", 1)[0]
    text = text.rsplit("] ", 1)[-1] if text.startswith("[") else text
    return text.split(". ", 1)[0][:200].rstrip(". ") or type(error).__name__


@dataclass
class _Sweep:
    objects: ObjectGroup
    groups: dict[str, Any]
    nodes: tuple[tuple[int, ...], ...]
    device: torch.device
    settings: Settings
    began: float
    spent_s: float = 0.0
    """What the slowest rank has spent so far: the same on all ranks."""

    def all(self, steps: Iterable[_SweepStep], on_row: Callable[[Row], None] | None) -> list[Row]:
        rows: list[Row] = []
        kept: dict[tuple[str, str], list[Row]] = {}
        for step in steps:
            before = kept.setdefault((step.link.name, step.operation.name), [])
            if (before and before[-1].problem) or self._too_late(step, before):
                continue  # what did not work will not with larger buffers either
            try:
                row = self._row(step, before)
            except PeerLost as error:
                raise PeerLost(f"{step.operation.name} of {step.size_bytes} bytes was cut off: {error}") from None
            before.append(row)
            rows.append(row)
            if on_row is not None:
                on_row(row)
            if row.problem and not _supported(row.problem):
                raise PeerLost(f"{row.operation} of {row.size_bytes} bytes failed: {row.problem}")
        return rows

    def _too_late(self, step: _SweepStep, before: list[Row]) -> bool:
        if len(before) < _FEWEST:
            return False
        guess = _expected(before, step.size_bytes) * (self.settings.warmup + _FEWEST)
        return self.spent_s + guess > self.settings.budget_s

    def _row(self, step: _SweepStep, before: list[Row]) -> Row:
        rank, name = dist.get_rank(), step.link.name
        ranks, place, case = step.link.own(rank), None, None
        count = elements(step.operation, step.size_bytes, self.settings.dtype, step.link.size)
        row = Row(
            link=name,
            operation=step.operation.name,
            ranks=step.link.size,
            size_bytes=count * self.settings.dtype.itemsize,
            count=count,
            dtype=str(self.settings.dtype).removeprefix("torch."),
        )
        if step.link.size == 1 and not step.operation.alone:
            return replace(row, problem="not supported: it needs two ranks")
        first = _Timed()
        if ranks:
            place = RankPlace(self.groups[name], ranks, ranks.index(rank), self.device)
            # Nodes may have different numbers of ranks; blocks are those of each node's own.
            own = elements(step.operation, step.size_bytes, self.settings.dtype, place.size)
            try:
                case = step.operation.make(place, own, self.settings.dtype)
                case.fill()
            except (RuntimeError, MemoryError) as error:
                first = _Timed(f"buffers can't be made: {_brief(error)}")
        # Nobody starts before all have their buffers, or one rank's lack of memory would be the others' timeout.
        if problem := _problem(self.objects.gather(first)):
            return replace(row, problem=f"not supported here: {problem}")
        return self._timed(row, case, before)

    def _timed(self, row: Row, case: Case | None, before: list[Row]) -> Row:
        first = _Timed() if case is None else _series(case, 1, self.device)
        if len(before) < _FEWEST:
            everyone = self.objects.gather(first)
            if problem := _problem(everyone):
                return replace(row, problem=problem)
            single = max(max(other.times, default=0.0) for other in everyone)
        else:  # the line through the sizes before says it without an exchange, and a burst can't flatter it as much
            single = _expected(before, row.size_bytes)
        runs = min(max(int(self.settings.row_s / max(single, 1e-9)), _FEWEST), self.settings.runs)
        last = first if case is None or first.problem else self._main(row, case, runs)
        last.elapsed_s = time.perf_counter() - self.began
        everyone = self.objects.gather(last)
        self.spent_s = max(other.elapsed_s for other in everyone)
        if problem := _problem(everyone):
            return replace(row, problem=problem)
        return _merged(row, everyone, self.nodes)

    def _main(self, row: Row, case: Case, runs: int) -> _Timed:
        wrong = 0 if case.repeatable else case.wrong()
        warm = _series(case, self.settings.warmup - 1, self.device)
        before = sent_bytes(row.link == "intra")
        timed = warm if warm.problem else _series(case, runs, self.device)
        after = sent_bytes(row.link == "intra")
        if not timed.problem:
            timed.wrong = case.wrong() if case.repeatable else wrong
            if before is not None and after is not None:
                timed.sent = (after - before) / runs
        return timed


def _expected(before: Sequence[Row], size_bytes: int) -> float:
    """Predict the time at a larger size from the line through the last two; never less than the last."""
    (small, early), (large, late) = ((row.size_bytes, row.time_s or 0.0) for row in before[-2:])
    return late + max(late - early, 0.0) / max(large - small, 1) * (size_bytes - large)


@dataclass
class _Timed:
    """What one rank reports of one series."""

    problem: str = ""
    times: list[float] = field(default_factory=list)
    wrong: int = 0
    sent: float | None = None
    elapsed_s: float = 0.0


def _series(case: Case, runs: int, device: torch.device) -> _Timed:
    times = []
    try:
        start = time.perf_counter()
        for _ in range(runs):
            case.run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            end = time.perf_counter()
            times.append(end - start)
            start = end
    except RuntimeError as error:  # a backend may lack the operation; the row says so
        return _Timed(problem=_brief(error))
    return _Timed(times=times)


def _supported(problem: str) -> bool:
    """Return whether the backend only lacks the operation, so the next can be measured; else the group is broken."""
    return any(word in problem.lower() for word in _UNSUPPORTED)


def _problem(everyone: Sequence[_Timed]) -> str:
    """Return what went wrong on the first rank where something did."""
    return next((f"rank {rank}: {timed.problem}" for rank, timed in enumerate(everyone) if timed.problem), "")


def _merged(row: Row, everyone: Sequence[_Timed], nodes: Sequence[tuple[int, ...]]) -> Row:
    slowest = np.max([timed.times for timed in everyone if timed.times], axis=0)
    p20, median, p80 = np.quantile(slowest, [0.2, 0.5, 0.8])
    sent = [_of_node([everyone[rank] for rank in ranks], row.link) for ranks in nodes]
    counted = [nbytes for nbytes in sent if nbytes]
    return replace(
        row,
        runs=len(slowest),
        time_s=float(median),
        time_p20_s=float(p20),
        time_p80_s=float(p80),
        wrong=sum(timed.wrong for timed in everyone),
        sent_bytes=max(counted) if counted else None,
    )


def _of_node(ranks: Sequence[_Timed], link: str) -> float | None:
    """Return one node's bytes; its ranks read the same counter, the one that read it over the longest time counts."""
    counted = [timed.sent for timed in ranks if timed.sent is not None]
    if not counted:
        return None
    return max(counted) / (len(ranks) if link == "intra" else 1)
