"""Threads in which torch computes with one thread, while all others keep theirs."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from accel.profiler import torch_threads

T = TypeVar("T")


needs_openmp = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads"),
    reason="torch's threads are not those of an OpenMP runtime whose symbols can be looked up",
)


@needs_openmp
def test_a_thread_that_computes_alone_leaves_the_others_theirs() -> None:
    with threads_of_torch(3):

        def alone() -> tuple[int, str]:
            torch_threads.compute_alone()
            return torch.get_num_threads(), torch.__config__.parallel_info()

        number, info = _in_a_new_thread(alone)
        assert number == 1
        assert "mkl_get_max_threads() : 3" not in info  # what MKL computes too
        assert _in_a_new_thread(torch.get_num_threads) == torch.get_num_threads() == 3


@needs_openmp
def test_no_other_thread_sees_the_number_of_one_that_computes_alone() -> None:
    with threads_of_torch(3):
        end, seen = threading.Event(), set()

        def begin_all_the_time() -> None:
            while not end.is_set():
                _in_a_new_thread(torch_threads.compute_alone)

        beside = threading.Thread(target=begin_all_the_time)
        beside.start()
        try:
            seen = {_in_a_new_thread(torch.get_num_threads) for _ in range(100)}
        finally:
            end.set()
            beside.join()
        assert seen == {3}


@contextlib.contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_a_new_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
