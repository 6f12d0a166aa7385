"""allocator: keep the memory that a step frees, instead of returning it to the system and faulting it in again.

glibc serves a large request by `mmap`, and returns it by `munmap` when it is freed; of its heap it returns what lies
free at the end. A training step on the CPU frees its activations at each step, so the next step faults the same pages
in again, each zeroed by the kernel first. With these thresholds out of the way, freed memory stays with the process.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.trial import Arm, TrialConfig, Verdict
from accel.profiler.trial_driver import Block, Comparing, Steps, TrialResult, before_and_after, drive
from accel.run import Run
from accel.strategies.base import Exactness
from accel.strategies.process_setting import ProcessSetting, ProcessSwitch
from accel.strategies.trial_design import Terms, TrialDesign

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # Windows
    getrusage = None  # type: ignore[assignment]


# Parameters of mallopt and glibc's own limits, from malloc.h and malloc/malloc.c.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULT_MMAP_MAX = 65536
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)
_NEVER = 2**31 - 1
# The second word before a block is its size; this bit of it says that it was mapped on its own.
_IS_MAPPED = 2
_PAGE = 4096


def mmap_threshold() -> int:
    """Return the size in bytes from which on glibc maps a request on its own now, to a page.

    glibc doesn't tell; it is found by requests, whose pages are never touched.
    """
    libc = _libc()
    blocks: list[int] = []
    low, high = 1, _LARGEST_MMAP_THRESHOLD // _PAGE  # in pages: `low` is not mapped, `high` is
    try:
        while high - low > 1:
            middle = (low + high) // 2
            blocks.append(libc.malloc(middle * _PAGE))
            if blocks[-1] and _is_mapped(blocks[-1]):
                high = middle
            else:
                low = middle
    finally:
        for block in blocks:
            libc.free(block)
    return high * _PAGE


def _is_mapped(block: int) -> bool:
    word = ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(block - word).value & _IS_MAPPED)


def _refusal() -> str:
    if platform.libc_ver()[0] != "glibc":
        return "the C library is not glibc"
    tuned = [name for name in os.environ if name.startswith("MALLOC_") and name.endswith("_")]
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        tuned.append("GLIBC_TUNABLES")
    if tuned:
        return f"{', '.join(sorted(tuned))} set the allocator's thresholds already"
    if _address(ctypes.CDLL(None)) != _address(_libc()):
        return "another allocator has been put in the place of glibc's (LD_PRELOAD)"
    return ""


def _address(library: ctypes.CDLL) -> int | None:
    return ctypes.cast(library.malloc, ctypes.c_void_p).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    return libc


def _set(parameter: int, value: int) -> None:
    if not _libc().mallopt(parameter, value):
        raise OSError(f"mallopt({parameter}, {value}) was refused")


_thresholds: list[tuple[int, int]] = []
"""The thresholds of mapping and trimming as the first user found them: a heap that has grown would hide them."""


def _keep_freed(keep: bool) -> None:
    if keep:
        if not _thresholds:
            threshold = mmap_threshold()
            _thresholds.append((threshold, 2 * threshold))  # glibc moves both together, as it frees mapped memory
        _set(_MMAP_MAX, 0)
        _set(_TRIM_THRESHOLD, _NEVER)
    elif _thresholds:
        mmap, trim = _thresholds[0]
        _set(_MMAP_THRESHOLD, mmap)
        _set(_TRIM_THRESHOLD, trim)
        _set(_MMAP_MAX, _DEFAULT_MMAP_MAX)


class Allocator(ProcessSwitch):
    """Raise glibc's thresholds by `mallopt`: no `mmap` for single requests, no trimming of the heap.

    The numbers are the same bits. The process keeps its largest memory use instead of returning it between steps.

    Source: `mallopt(3)`; glibc manual, section Malloc Tunable Parameters.
    """

    name = "allocator"
    summary = "freed memory stays with the process (mallopt)"
    treats = frozenset({Bottleneck.MEMORY, Bottleneck.COMPUTE, Bottleneck.OPTIMIZER})
    exactness = Exactness.EXACT
    touches = frozenset()
    switch = ProcessSetting(lambda: False, _keep_freed)

    def __init__(self) -> None:
        super().__init__()
        self._looked: tuple[int | None, float] = None, 0.0
        self._times_in_a_row = 0

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: a GPU, on already, another allocator, or thresholds that the user has set."""
        if run.device.type != "cpu":
            return f"the model's memory is not the CPU's but that of {run.device.type}"
        if self.switch.is_used_beside(self):
            return "it is on already, for another model of this process"
        return _refusal()

    def trial_design(self, run: Run) -> TrialDesign:
        """Judge it by page faults, too; the heap grows to what a step needs while it settles."""
        return ByPageFaults(settle_steps=2, has_come_back=self._faults_again)

    def _faults_again(self) -> bool:
        """Return whether page faults took some of the time twice in a row: an evaluation has some, too."""
        (before, since), now = self._looked, (fault_count(), time.monotonic())
        self._looked = now
        counted = before is not None and now[0] is not None
        faults = counted and (now[0] - before) * _FAULT_S >= _COME_BACK * (now[1] - since)  # type: ignore[operator]
        self._times_in_a_row = self._times_in_a_row + 1 if faults else 0
        return self._times_in_a_row >= _IN_A_ROW

    def close(self, run: Run) -> None:
        """Return what lies free, unless it is on."""
        if _thresholds and not self.switch.is_used():
            _libc().malloc_trim(0)


# -- how it is judged --------------------------------------------------------------------------------------------------

SAVES_NONE = "it saves no page faults as things are, so that what it gives can't be seen; left off"
_LOOK = 12
_BLOCKS, _BLOCK_S = 10, 0.3
"""Blocks before, and after, the switch. Each of them lasts at least so long: fast steps are disturbed for many at a
time."""
_FAULT_S = 3e-6
"""What a page fault takes at most: on two virtual cores it took 2.7 µs, most of them the zeroing of the page."""
_COME_BACK, _IN_A_ROW = 0.05, 2
"""Share of the time from which on page faults are worth another look, if it is seen so often."""
_BEYOND_S = 1.0
"""What the trial may cost where the budget allows for less: it can't be repeated, so no brief stall may end it."""
_SAVED = 0.2
"""Share of the plain steps' page faults from which on it saves some; else the heap had grown before it."""


@dataclass(frozen=True, kw_only=True)
class ByPageFaults(TrialDesign):
    """Steps before it are compared with those after it, their page faults too; blocks in turns would compare nothing.

    What is allocated at the end of a heap that has grown keeps glibc from trimming it: then steps of a small network
    took 59 ms before, 43 ms with it, and 44 ms after it. A comparison by the guard can make the heap grow, too, so this
    trial comes first of all, and can't be repeated.
    """

    order: ClassVar[int] = -1
    stands: ClassVar[bool] = True

    def trial(self, terms: Terms) -> Comparing:
        """Return the trial, which ends after a few plain steps where these have no page faults worth saving."""
        config = replace(terms.config, more_looks=())  # all others wait for it
        counted = _Counted()
        plain = yield from counted.run(Block(arm="A", steps=_LOOK))
        share = _faulting(counted.faults["A"], statistics.median(plain.seconds))
        if share is not None and share < config.drop_gain:
            return TrialResult(None, why=f"page faults take {share:.1%} of the step at most: too little to win")
        steps = _BLOCKS * max(config.block_steps, round(_BLOCK_S / terms.step_s))
        comparison = before_and_after(
            config,
            before=plain.seconds,
            steps=steps - _LOOK,
            settle=terms.settle,
            reduce=terms.reduce,
            limit_s=lambda: max(_BEYOND_S, terms.limit_s()),
        )
        result = yield from drive(comparison, counted.run)
        if share is None:
            return result
        return _judged(result, share, counted.saved, config)


class _Counted:
    """Counts the page faults of a step in the newest block of each arm."""

    def __init__(self) -> None:
        self.faults: dict[Arm, float | None] = {"A": None, "B": None}

    def run(self, block: Block) -> Generator[Block, Steps, Steps]:
        """Run a block."""
        before = fault_count()
        steps = yield block
        after = fault_count()
        self.faults[block.arm] = None if before is None or after is None else (after - before) / block.steps
        return steps

    @property
    def saved(self) -> float:
        """Page faults that steps of B have less than those of A; 0 for few of them."""
        plain, with_it = self.faults["A"], self.faults["B"]
        if plain is None or with_it is None:
            return 0.0
        return plain - with_it if plain - with_it > _SAVED * plain else 0.0


def _faulting(faults: float | None, step_s: float) -> float | None:
    """Return the share of a step that page faults take at most; None if they are not counted."""
    return None if faults is None else min(1.0, faults * _FAULT_S / step_s)


def _judged(result: TrialResult, share: float, saved: float, config: TrialConfig) -> TrialResult:
    """Return what both the times and the page faults show.

    No gain is larger than what all page faults take: what seems more is a disturbance of the steps before, so those
    after set the level. And a drift of the machine does not cancel here, but page faults know of none: where it saves
    some, it stays if it looks faster. It moves no number, and costs nothing but memory that the process has had at its
    peak anyway. If it saves none, that it gives nothing is no verdict on it.

    Args:
        share: of the plain step that page faults take at most.
        saved: page faults of a step that it saves.
    """
    outcome = result.outcome
    assert outcome is not None
    most = 1 / (1 - share) if share < 1 else math.inf
    if outcome.gain > most:
        low, high = (end * most / outcome.gain for end in (outcome.low, outcome.high))
        verdict: Verdict = "keep" if low > 1 + config.keep_gain else "drop"
        outcome = replace(outcome, verdict=verdict, gain=most, low=low, high=high, before_ms=outcome.after_ms * most)
    if outcome.verdict == "keep":
        return result._replace(outcome=outcome)
    if not saved:
        return result._replace(outcome=replace(outcome, verdict="inconclusive"), why=SAVES_NONE)
    if outcome.gain >= 1 and outcome.high > 1 + config.drop_gain:
        why = f"looks faster than the steps before it, and saves {saved:,.0f} page faults in each"
        return result._replace(outcome=replace(outcome, verdict="keep"), why=why)
    return result._replace(outcome=outcome)


def fault_count() -> int | None:
    """Return the page faults of this process so far that needed no disk; None where the system doesn't count them.

    Memory that is touched for the first time since the system gave it faults, page by page, and is zeroed then.
    """
    return None if getrusage is None else getrusage(RUSAGE_SELF).ru_minflt
