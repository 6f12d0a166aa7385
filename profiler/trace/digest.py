"""The summary of a traced window: which operators, how short, how fast, and what the device waited for.

Calls and kernels of the same name and the same inputs are a group, with one typical time.

An operator's time is its self time: the calls within it are subtracted. A group counts at its
median, for a call in which another process took the core is not a slow operator. Where others hold
cores all the time it counts at its lower quartile: beside a busy process on one of two cores, the
share of element-wise work in 16 windows of three steps of one script was 0.25 to 0.91 by medians,
and 0.53 to 0.66 by quartiles.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel.profiler.evidence import OpTime, SyncPoint, TraceSummary
from accel.profiler.trace import intervals, operators
from accel.profiler.trace.events import OperatorCall, Trace, Wait, Work
from accel.profiler.trace.operators import Kind, base, kernel_kind, kind

LARGEST = 12
_ENGINE = "autograd::engine::evaluate_function"
_RATED_US = 1.0
"""Least time of a call for a rate: below, the tracing overhead is as large, and a few bytes make GB/s."""


def digest(trace: Trace, steps: int, *, shared: bool = False) -> TraceSummary:
    """Return the summary of a window that held `steps` steps; `shared` if other processes hold cores."""
    parents = callers(trace.calls)
    groups = (
        call_groups(trace.calls, parents, shared=shared)
        if trace.works is None
        else kernel_groups(trace.calls, trace.works)
    )
    total = sum(group.us for group in groups) or 1.0
    model = groups
    if trace.works is None and trace.updates:
        model = call_groups([call for call in trace.calls if not _is_within(call, trace.updates)], shared=shared)
    computing = sum(group.us for group in model) or 1.0
    # Autocast's own call of an operator has the dtype before the cast; the operator that it calls computes.
    products = [group for group in groups if group.kind == "matmul" and group.dtype and group.computing]
    summary = TraceSummary(
        steps=steps,
        ops=_rows(groups, total, steps)[:LARGEST],
        ops_per_step=_operations(trace, parents) / steps,
        small_share=sum(group.us for group in model if group.small) / computing,
        matmul_share=sum(group.us for group in model if group.kind == "matmul") / computing,
        elementwise_share=sum(group.us for group in model if group.kind == "elementwise") / computing,
        operators_ms=None if trace.works is not None else sum(group.us for group in groups) / 1e3 / steps,
        dtypes=_shares((group.dtype, group.us) for group in products),
    )
    if trace.works is not None:
        _add_device(summary, trace, steps)
        summary.syncs = _syncs(trace, parents, steps)
    return summary


def _is_within(call: OperatorCall, updates: Sequence[tuple[float, float]]) -> bool:
    """Return whether an optimizer's step made the call."""
    return any(start <= call.start < end for start, end in updates)


def _rows(groups: Sequence[CallGroup], total: float, steps: int) -> list[OpTime]:
    by_name: dict[str, list[CallGroup]] = defaultdict(list)
    for group in groups:
        # The engine's call of a gradient function and that function count as one.
        by_name[base(group.name.removeprefix(f"{_ENGINE}: "))].append(group)
    rows = [_row(name, members, total, steps) for name, members in by_name.items()]
    return sorted(rows, key=lambda row: row.ms, reverse=True)


def _row(name: str, groups: Sequence[CallGroup], total: float, steps: int) -> OpTime:
    us = sum(group.us for group in groups)
    row = OpTime(
        name=name,
        calls=sum(len(group.times) for group in groups) / steps,
        ms=us / 1e3 / steps,
        share=us / total,
        kind=max(groups, key=lambda group: group.us).kind,
        small=2 * sum(group.us for group in groups if group.small) > us,
    )
    counted = [(g.flops, g.bytes, g.us) for g in groups if g.us >= _RATED_US * len(g.times)]
    if row.kind == "matmul":
        row.gflops = _rate((flops, us) for flops, _, us in counted)
        row.intensity = _rate((flops, moved) for flops, moved, _ in counted if moved)
        if row.intensity is not None:
            row.intensity *= 1e3  # a plain ratio, not FLOP per µs
    if row.kind == "elementwise":
        row.gb_per_s = _rate((moved, us) for _, moved, us in counted)
    return row


def _rate(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Return Σ first ÷ Σ second ÷ 1,000 over the pairs that have both: per µs becomes 10⁹ per second."""
    complete = [(amount, per) for amount, per in pairs if amount is not None and per is not None]
    per = sum(per for _, per in complete)
    return sum(amount for amount, _ in complete) / per / 1e3 if per > 0 else None


def _operations(trace: Trace, parents: Sequence[int]) -> int:
    """Count the kernels; without a GPU, the operators that no other operator called."""
    if trace.works is not None:
        return sum(piece.kind == "kernel" for piece in trace.works)
    outer = 0
    for index, call in enumerate(trace.calls):
        parent = parents[index]
        # Gradient functions and the engine around them have no namespace of operators.
        while parent >= 0 and not _is_operator(trace.calls[parent].name):
            parent = parents[parent]
        outer += parent < 0 and _is_operator(call.name)
    return outer


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::"))


def _shares(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, amount in pairs:
        sums[name] += amount
    total = sum(sums.values())
    return {name: amount / total for name, amount in sums.items()} if total > 0 else {}


# -- the device --------------------------------------------------------------------------------------------------------


def _add_device(summary: TraceSummary, trace: Trace, steps: int) -> None:
    works, window, copying = trace.works or [], trace.window, _copying(trace.works or [])
    kernels = ((w.start, w.end) for w in works if w.kind in ("kernel", "memory") and not w.name.startswith("nccl"))
    running = intervals.clip(kernels, window)
    copies = intervals.clip(((w.start, w.end) for w in works if w.kind == "copy in"), window)
    reads_us = launches_us = 0.0
    for began, ended in intervals.starved(works, window):
        waits = [wait for wait in trace.waits if wait.start <= began <= wait.end]
        reads_us += (ended - began) * bool(waits and not any(wait.operator in copying for wait in waits))
        launches_us += (ended - began) * (not waits)
    summary.busy_ms = intervals.length(running) / 1e3 / steps
    summary.copy_ms = intervals.length(intervals.minus(copies, running)) / 1e3 / steps
    summary.read_ms, summary.launch_ms = reads_us / 1e3 / steps, launches_us / 1e3 / steps


def _copying(works: Sequence[Work]) -> set[int]:
    """Return the operators that copy to the device; their names can't tell, since `cpu` is `to` as well."""
    return {work.operator for work in works if work.kind == "copy in"} - {0}


def located(syncs: Sequence[SyncPoint], lines: Sequence[SyncPoint]) -> list[SyncPoint]:
    """Return waits with the lines of the script that another window has found for them; those of one kind in its parts.

    That window is one step that began with an idle device, and slow: it tells where the waits are, and not how long.
    """
    placed = []
    for sync in syncs:
        same = [line for line in lines if (line.name, line.copies) == (sync.name, sync.copies)]
        ms, calls = sum(line.ms for line in same), sum(line.calls for line in same)
        placed += [
            replace(line, ms=sync.ms * line.ms / ms, calls=sync.calls * line.calls / calls) for line in same if ms > 0
        ] or [sync]
    return sorted(placed, key=lambda point: point.ms, reverse=True)


def _syncs(trace: Trace, parents: Sequence[int], steps: int) -> list[SyncPoint]:
    """Return the waits, those of one operator at one line together, the longest first."""
    index_of = {call.id: index for index, call in enumerate(trace.calls) if call.id}
    copying = _copying(trace.works or [])
    points: dict[tuple[str, str, int, bool], SyncPoint] = {}
    for group in _by_operator(trace.waits):
        first = group[0]
        name = first.name
        index = index_of.get(first.operator, -1)
        while index >= 0:  # the outermost operator is the one that the line calls
            name = base(trace.calls[index].name) if _is_operator(trace.calls[index].name) else name
            index = parents[index]
        key = (name, first.file, first.line, first.operator in copying)
        made = SyncPoint(name=name, file=first.file, line=first.line, calls=0.0, ms=0.0, copies=key[-1])
        point = points.setdefault(key, made)
        point.calls += 1 / steps
        point.ms += intervals.length((wait.start, wait.end) for wait in group) / 1e3 / steps
    return sorted(points.values(), key=lambda point: point.ms, reverse=True)


def _by_operator(waits: Sequence[Wait]) -> list[list[Wait]]:
    """Return the waits grouped by operator: `item` copies and then synchronises, which is one wait."""
    groups: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for index, wait in enumerate(waits):
        groups[wait.operator, 0 if wait.operator else index].append(wait)
    return list(groups.values())


# A call this short costs about as much to launch. On the host: operators on 8×32 elements take 1 to 5 µs (torch 2.13,
# Zen 4, one thread), and Python, autograd and their share of the engine as much again. On a GPU a kernel must outlast
# the launch of the next to keep the queue full (not measured on a GPU).
_HOST_LAUNCH_US = 12.0
_DEVICE_LAUNCH_US = 8.0
# A slow or busy host stretches the dispatch beyond that; a call with this little work is small however long it took.
# The rates are those of a slow core, so that the work is rather overestimated.
_TINY_US = 2.0
_BYTES_PER_US, _FLOPS_PER_US = 10e3, 20e3
# The profiler's own work around a call lands in its caller's time: 0.15 to 0.3 µs with shapes, torch 2.13, Zen 4.
_PROFILER_US = 0.25


@dataclass(slots=True, kw_only=True)
class CallGroup:
    """Calls or kernels of one name with the same inputs."""

    name: str
    kind: Kind
    dtype: str
    call: OperatorCall | None
    times: list[float] = field(default_factory=list)
    computing: int = 0
    """How many of them did the operator's work themselves, instead of delegating it to a call or launch."""
    us: float = 0.0
    small: bool = False

    @property
    def flops(self) -> float | None:
        """Of all that computed."""
        return self._all(self.call.flops if self.call else None)

    @property
    def bytes(self) -> float | None:
        """Read and written by all that computed."""
        return self._all(self.call.moved_bytes if self.call else None)

    def _all(self, each: float | None) -> float | None:
        return None if each is None or not self.computing else each * self.computing


def callers(calls: Sequence[OperatorCall]) -> list[int]:
    """Return the index of each call's caller, -1 for none; calls of other threads call nothing here."""
    parents = [-1] * len(calls)
    threads: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        threads[call.thread].append(index)
    for members in threads.values():
        spans = [(calls[index].start, calls[index].end) for index in members]
        for index, parent in zip(members, intervals.parents(spans), strict=True):
            parents[index] = members[parent] if parent >= 0 else -1
    return parents


def call_groups(
    calls: Sequence[OperatorCall], parents: Sequence[int] | None = None, *, shared: bool = False
) -> list[CallGroup]:
    """Return the calls on the host in groups."""
    parents = callers(calls) if parents is None else parents
    own = [call.end - call.start for call in calls]
    delegated = [False] * len(calls)
    for index, parent in enumerate(parents):
        if parent >= 0:
            own[parent] -= calls[index].end - calls[index].start + _PROFILER_US
        if operators.has_flops(calls[index].name):
            while parent >= 0 and not delegated[parent]:
                delegated[parent] = True
                parent = parents[parent]
    groups: dict[Any, CallGroup] = {}
    for call, us, passed_on in zip(calls, own, delegated, strict=True):
        group = _group(groups, call.name, kind(call.name), call)
        group.times.append(max(us, 0.0))
        # relu delegates everything to clamp_min, sum a hundredth to fill_; for products delegation is known exactly.
        group.computing += not passed_on and (group.kind == "matmul" or 2 * us > call.end - call.start)
    usual = _lower_quartile if shared else statistics.median
    return _settled(groups.values(), usual, lambda group, us: us < _HOST_LAUNCH_US or _is_tiny(group))


def kernel_groups(calls: Sequence[OperatorCall], works: Sequence[Work]) -> list[CallGroup]:
    """Return the device's work in groups, by its name and the inputs of the operator that launched it."""
    by_id = {call.id: call for call in calls if call.id}
    kinds = [_work_kind(piece, by_id.get(piece.operator)) for piece in works]
    main = _main(works, kinds, by_id)
    groups: dict[Any, CallGroup] = {}
    for index, piece in enumerate(works):
        group = _group(groups, piece.name, kinds[index], by_id.get(piece.operator))
        group.times.append(piece.end - piece.start)
        group.computing += index in main
    return _settled(groups.values(), statistics.median, lambda group, us: us < _DEVICE_LAUNCH_US)


def _main(works: Sequence[Work], kinds: Sequence[Kind], by_id: dict[int, OperatorCall]) -> set[int]:
    """Return the index of each operator's longest piece of its own kind, to which its FLOPs and bytes are assigned."""
    longest: dict[int, int] = {}
    for index, piece in enumerate(works):
        call = by_id.get(piece.operator)
        if call is not None and kinds[index] == kind(call.name):
            best = longest.setdefault(piece.operator, index)
            if piece.end - piece.start > works[best].end - works[best].start:
                longest[piece.operator] = index
    return set(longest.values())


def _work_kind(piece: Work, call: OperatorCall | None) -> Kind:
    if piece.kind == "kernel":
        return kernel_kind(piece.name, call.name if call else "")
    return "elementwise" if piece.kind == "memory" else "other"


def _group(groups: dict[Any, CallGroup], name: str, of_kind: Kind, call: OperatorCall | None) -> CallGroup:
    """Return the group that a call or a kernel belongs to, a new one if it is the first."""
    inputs = call and (call.name, tuple(map(tuple, call.shapes)), tuple(call.dtypes))
    group = groups.get((name, inputs))
    if group is None:
        dtype = operators.dtype(call.dtypes) if call else ""
        group = groups[name, inputs] = CallGroup(name=name, kind=of_kind, dtype=dtype, call=call)
    return group


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def _settled(
    groups: Iterable[CallGroup],
    typical_of: Callable[[Sequence[float]], float],
    is_small: Callable[[CallGroup, float], bool],
) -> list[CallGroup]:
    settled = list(groups)
    for group in settled:
        typical = typical_of(group.times)
        group.us = typical * len(group.times)
        group.small = is_small(group, typical)
    return settled


def _is_tiny(group: CallGroup) -> bool:
    """Return whether a call of a known operator has next to nothing to do, judging by its inputs."""
    call = group.call
    if group.kind == "other" or call is None:
        return False
    moved, flops = call.moved_bytes, call.flops or 0.0
    return moved is not None and moved / _BYTES_PER_US + flops / _FLOPS_PER_US < _TINY_US
