"""Threads beside the loop's in which torch computes without a team of threads.

OpenMP gives each thread that runs a parallel operator a team of its own. Once it has more threads than there are cores
it lets none of them spin while they wait for the next operator, those of the loop neither. On two cores the steps of a
small detector took 50 in place of 25 ms, for as long as there was a thread that had once stacked a batch.
"""

from __future__ import annotations

import ctypes

import torch


def compute_alone() -> None:
    """Have torch compute with one thread in this one, before it does anything else here.

    Where that can't be said of one thread, it keeps its team: torch's own function would take the others' threads too.
    """
    torch.get_num_threads()  # the first call in a thread sets its number
    _set_number_here(1)


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
