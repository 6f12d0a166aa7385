"""The summary of a traced window: which operators, how short, how fast, and what the device waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from accel.profiler.evidence import OpTime, SyncPoint, TraceSummary
from accel.profiler.trace import intervals
from accel.profiler.trace.events import OperatorCall, Trace, Wait, Work
from accel.profiler.trace.groups import CallGroup, call_groups, callers, kernel_groups
from accel.profiler.trace.operators import base

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
    model = (
        groups
        if trace.works is not None or not trace.updates
        else call_groups(_outside(trace.calls, trace.updates), shared=shared)
    )
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
        kinds=_kinds(trace, parents, shared) if trace.works is None else {},
    )
    if trace.works is not None:
        _add_device(summary, trace, steps)
        summary.syncs = _syncs(trace, parents, steps)
    return summary


def _outside(calls: Sequence[OperatorCall], updates: Sequence[tuple[float, float]]) -> list[OperatorCall]:
    """Return the calls that no optimizer's step made."""
    return [call for call in calls if not any(start <= call.start < end for start, end in updates)]


def _kinds(trace: Trace, parents: Sequence[int], shared: bool) -> dict[str, dict[str, float]]:
    """Return the shares of the kinds of operators, separately for those that autograd's engine calls and the rest."""
    in_engine: dict[int, bool] = {}
    sides: dict[str, list[OperatorCall]] = {"forward": [], "backward": []}
    for index in sorted(range(len(trace.calls)), key=lambda i: (trace.calls[i].start, -trace.calls[i].end)):
        call = trace.calls[index]
        within = call.name.startswith(_ENGINE) or in_engine.get(parents[index], False)
        in_engine[index] = within
        if not any(start <= call.start < end for start, end in trace.updates):
            sides["backward" if within else "forward"].append(call)
    return {
        side: _shares((group.kind, group.us) for group in call_groups(calls, shared=shared))
        for side, calls in sides.items()
        if calls
    }


def _rows(groups: Sequence[CallGroup], total: float, steps: int) -> list[OpTime]:
    by_name: dict[str, list[CallGroup]] = defaultdict(list)
    for group in groups:
        by_name[_display_name(group.name)].append(group)
    rows = [_row(name, members, total, steps) for name, members in by_name.items()]
    return sorted(rows, key=lambda row: row.ms, reverse=True)


def _display_name(name: str) -> str:
    """Return the name in the report: the engine's call of a gradient function and that function count as one."""
    return base(name.removeprefix("autograd::engine::evaluate_function: "))


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
    """Return waits with the lines of the script that another window has found for them.

    That window is one step that began with an idle device, and slow: it tells where the waits are, and not how long.

    Args:
        syncs: waits without lines.
        lines: waits with lines; those of one kind are divided as they are here.
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
