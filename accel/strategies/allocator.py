"""allocator: keep the memory that a step frees, instead of returning it to the system and faulting it in again.

glibc serves a large request by `mmap`, and returns it by `munmap` when it is freed; of its heap it returns what lies
free at the end. A training step on the CPU frees its activations at each step, so the next step faults the same pages
in again, each zeroed by the kernel first. With these thresholds out of the way, freed memory stays with the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.process_setting import ProcessSetting


class Allocator(Strategy):
    """Raise glibc's thresholds by `mallopt`: no `mmap` for single requests, no trimming of the heap.

    The numbers are the same bits. The process keeps its largest memory use instead of returning it between steps.

    Source: `mallopt(3)`; glibc manual, section Malloc Tunable Parameters.
    """

    name = "allocator"
    summary = "freed memory stays with the process (mallopt)"
    treats = frozenset({Bottleneck.MEMORY, Bottleneck.COMPUTE, Bottleneck.OPTIMIZER})
    exactness = Exactness.EXACT
    touches = frozenset()
    settle_steps = 2  # the heap grows to what a step needs
    # What is allocated at the end of a heap that has grown keeps glibc from trimming it: then steps of a small network
    # took 59 ms before, 43 ms with it, and 44 ms after it. Where the end is free, they fault as before.
    lasting = True

    def __init__(self) -> None:
        self._has_been_on = False

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: a GPU, on already, another allocator, or thresholds that the user has set."""
        if run.device.type != "cpu":
            return f"the model's memory is not the CPU's but that of {run.device.type}"
        if _KEEPING.is_used_beside(self):
            return "it is on already, for another model of this process"
        return _refusal()

    def enable(self, run: Run, setting: Any) -> None:
        """Raise the thresholds."""
        self._has_been_on = True
        _KEEPING.use(self, True)

    def disable(self, run: Run) -> None:
        """Set the thresholds as they were, unless another model wants them so; glibc no longer moves them."""
        _KEEPING.leave(self)

    def close(self, run: Run) -> None:
        """Return what lies free, unless it is on."""
        if self._has_been_on and not _KEEPING.is_used():
            _libc().malloc_trim(0)


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
    """Put the thresholds out of the way, or back."""
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


_KEEPING = ProcessSetting(lambda: False, _keep_freed)
