"""Huge pages of the test processes: nothing that memory holds changes, and forks still see it."""

from __future__ import annotations

import os
import random

import numpy as np

from tests import huge_pages


def test_memory_holds_what_it_held() -> None:
    seen = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
    before = seen.copy()
    texts = [str(random.random()) for _ in range(100_000)]
    joined = "".join(texts)

    huge_pages.use()

    assert np.array_equal(seen, before)
    assert "".join(texts) == joined
    child = os.fork()
    if child == 0:
        seen[:] = 0
        os._exit(0 if not seen.any() and "".join(texts) == joined else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(seen, before)


def test_stacks_and_files_are_left_alone() -> None:
    maps = """\
55d0c0000000-55d0c0400000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000400000-7f0000600000 r--p 00000000 00:00 0
7f0000800000-7f0000a00000 rw-p 00001000 fe:00 1234                       /usr/lib/libtorch_cpu.so
7f0000c00000-7f0000e00000 rw-s 00000000 00:01 99                         /dev/shm/x (deleted)
7ffc00000000-7ffc00200000 rw-p 00000000 00:00 0                          [stack]
"""
    assert huge_pages._anonymous(maps) == [(0x55D0C0000000, 0x55D0C0400000), (0x7F0000000000, 0x7F0000200000)]
