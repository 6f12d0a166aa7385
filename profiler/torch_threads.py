"""Threads beside the loop's in which torch computes without a team of threads.

OpenMP gives each thread that runs a parallel operator a team of its own. Once it has more threads than there are cores
it lets none of them spin while they wait for the next operator, those of the loop neither. On two cores the steps of a
small detector took 50 in place of 25 ms, for as long as there was a thread that had once stacked a batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")
_starting = threading.Lock()


def compute_alone() -> None:
    """Have torch compute with one thread in this one, before it does anything else here."""
    with _starting:
        # torch sets the number for this thread, and for those that begin later: they get theirs back.
        others = _in_another_thread(torch.get_num_threads)
        torch.get_num_threads()  # the first call in a thread sets its number
        torch.set_num_threads(1)
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
