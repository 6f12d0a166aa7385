"""Threads beside the loop's in which torch computes without a team of threads.

OpenMP gives each thread that runs a parallel operator a team of its own. Once it has more threads than there are cores
it lets none of them spin while they wait for the next operator, those of the loop neither. On two cores the steps of a
small detector took 50 in place of 25 ms, for as long as there was a thread that had once stacked a batch.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")
_starting = threading.Lock()


def compute_alone() -> None:
    """Have torch compute with one thread in this one, before it does anything else here."""
    torch.get_num_threads()  # the first call in a thread sets its number
    if not _set_number_here(1):
        _set_number_everywhere_and_back(1)


def set_number(threads: int) -> None:
    """Have torch compute with so many threads in this one; where only its own function can do that, everywhere."""
    torch.get_num_threads()  # the first call in a thread sets its number
    if not _set_number_here(threads):
        torch.set_num_threads(threads)


def _set_number_here(threads: int) -> bool:
    """Return whether the number of this thread alone could be set, by the runtimes that torch was linked with."""
    try:
        symbols = ctypes.CDLL(torch._C.__file__)
        symbols.omp_set_num_threads(threads)
        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            symbols.MKL_Set_Num_Threads_Local(threads)
    except (AttributeError, OSError, TypeError):  # another runtime, or its symbols are not exported
        return False
    return torch.get_num_threads() == threads


def _set_number_everywhere_and_back(threads: int) -> None:
    """Set the number with torch's own function: for a moment also that of threads which begin just then."""
    with _starting:
        others = _in_another_thread(torch.get_num_threads)
        torch.set_num_threads(threads)
        _in_another_thread(lambda: torch.set_num_threads(others))


def _in_another_thread(function: Callable[[], _T]) -> _T:
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join()
    return results[0]


def _begin_in_child() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_child)
