"""Calls and kernels in groups: the same name, the same inputs, one typical time.

An operator's time is its self time: the calls within it are subtracted. A group counts at its median, for a call in
which another process took the core is not a slow operator. Where others hold cores all the time it counts at its lower
quartile: beside a busy process on one of two cores, the share of element-wise work in 16 windows of three steps of one
script was 0.25 to 0.91 by medians, and 0.53 to 0.66 by quartiles.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.profiler.trace import intervals, work
from accel.profiler.trace.events import OperatorCall, Work
from accel.profiler.trace.operators import Kind, kernel_kind, kind

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
        return self._all(work.flops(self.call.name, self.call.shapes, self.call.scalars) if self.call else None)

    @property
    def bytes(self) -> float | None:
        """Read and written by all that computed."""
        return self._all(work.moved_bytes(self.call.name, self.call.shapes, self.call.dtypes) if self.call else None)

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
    """Return the calls on the host in groups.

    Args:
        calls: of all threads.
        parents: as from `callers`, if they are known already.
        shared: other processes hold cores.
    """
    parents = callers(calls) if parents is None else parents
    own = [call.end - call.start for call in calls]
    delegated = [False] * len(calls)
    for index, parent in enumerate(parents):
        if parent >= 0:
            own[parent] -= calls[index].end - calls[index].start + _PROFILER_US
        if work.has_flops(calls[index].name):
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
        dtype = work.dtype(call.dtypes) if call else ""
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
    moved = work.moved_bytes(call.name, call.shapes, call.dtypes)
    flops = work.flops(call.name, call.shapes, call.scalars) or 0.0
    return moved is not None and moved / _BYTES_PER_US + flops / _FLOPS_PER_US < _TINY_US
