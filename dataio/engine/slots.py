"""Shared memory that a batch travels in: written once by a worker process, read in place, used again when dropped.

A slot is an anonymous file in memory (`memfd_create`), mapped by the worker that fills it and by the loop's process.
The loop's tensors lie in the slot itself. When the last of them is gone the worker is notified and reuses the slot.
So a batch costs one message and no fresh page: the pages of a slot are touched once, not once per batch, and nothing
lies in /dev/shm, whose size a container limits. The file has no name and goes with the last process that maps it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from typing import Any

# Slots that one worker may have in the hands of the loop; a loop that keeps more batches than that gets copies.
MOST_IN_USE = 64
_PAGE = 4096


def supported() -> bool:
    """Return whether this system has anonymous files in memory."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


def map_memory(file: int, size: int) -> memoryview:
    """Map `size` bytes of a file; the memory stays until the last view of it is gone. The file may be closed at once.

    An `mmap.mmap` would hold a descriptor of its own for each slot: with 16 workers more than the usual 1,024.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at the interpreter's end: there may be tensors still.
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B")


class SharedSlot:
    """One piece of shared memory, as the worker sees it."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.file: int | None = os.memfd_create(f"accel-batch-{number}", os.MFD_CLOEXEC)
        """Its descriptor, until the other process has it."""
        try:
            # Reserved now: without it a machine out of memory would answer with SIGBUS in the middle of a copy.
            os.posix_fallocate(self.file, 0, size)
            self.memory = map_memory(self.file, size)
        except OSError:
            os.close(self.file)
            raise

    def close_file(self) -> None:
        """Close the file once the other process has it; the mapping stays."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class SlotWriter:
    """A worker's slots: those in the hands of the loop, and those that are free.

    Args:
        most_free: free slots that are kept, at least 1.
    """

    def __init__(self, most_free: int) -> None:
        self._most_free = max(1, most_free)
        self._free: list[SharedSlot] = []
        self._in_use: dict[int, SharedSlot] = {}
        self._made = 0
        self.dropped: list[int] = []
        """Numbers of slots given up since the loop was last notified."""

    def acquire(self, size: int) -> SharedSlot:
        """Return a slot of at least `size` bytes; raises OSError when there is no memory."""
        fitting = [slot for slot in self._free if slot.size >= size]
        if fitting:
            slot = min(fitting, key=lambda each: each.size)
            self._free.remove(slot)
        else:
            while self._free:  # all too small: batches have grown
                self.dropped.append(self._free.pop().number)
            # An eighth more than asked for, so that batches of varying length settle on a size.
            slot = SharedSlot(self._made, -(-(size + size // 8) // _PAGE) * _PAGE)
            self._made += 1
        self._in_use[slot.number] = slot
        return slot

    def release(self, number: int, *, again: bool = True) -> None:
        """Take back a slot that the loop is done with; it is filled anew only if `again`."""
        slot = self._in_use.pop(number, None)
        if slot is None:
            return
        if not again:
            self.dropped.append(number)
            return
        self._free.append(slot)
        if len(self._free) > self._most_free:
            smallest = min(self._free, key=lambda each: each.size)
            self._free.remove(smallest)
            self.dropped.append(smallest.number)


class SlotReader:
    """The loop's view of one worker's slots."""

    def __init__(self) -> None:
        self._memory: dict[int, memoryview] = {}
        self._in_use: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[int] = deque()
        self._forked: set[int] = set()
        _READERS.add(self)

    def add(self, number: int, file: int) -> None:
        """Map a slot that the worker made; closes the file."""
        try:
            self._memory[number] = map_memory(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def drop(self, number: int) -> None:
        """Forget a slot that the worker gave up."""
        self._forked.discard(number)
        del self._memory[number]

    @property
    def in_use(self) -> int:
        """Slots whose batches the loop still holds."""
        return len(self._in_use)

    def view(self, number: int) -> Any:
        """Return the slot's memory; the slot is free again when the view and all tensors and arrays on it are gone.

        Not a memoryview, of which a numpy array would keep the memory alive and not the view.
        """
        memory = self._memory[number]
        view = (ctypes.c_ubyte * memory.nbytes).from_buffer(memory)

        def gone(_: object, number: int = number) -> None:
            self._in_use.pop(number, None)
            self._freed.append(number)

        self._in_use[number] = weakref.ref(view, gone)
        return view

    def free_at_once(self, number: int) -> None:
        """Give a slot back whose batch was not wanted."""
        self._freed.append(number)

    def take_freed(self) -> tuple[list[int], list[int]]:
        """Return the slots that came free since the last call: those to fill anew, and those to give up."""
        again: list[int] = []
        spent: list[int] = []
        while self._freed:
            number = self._freed.popleft()
            (spent if number in self._forked else again).append(number)
        return again, spent

    def forked(self) -> None:
        """Never fill again what the loop holds now: a process that was just forked holds the same batches."""
        self._forked.update(list(self._in_use))


_READERS: weakref.WeakSet[SlotReader] = weakref.WeakSet()


def _after_fork() -> None:
    for reader in list(_READERS):
        reader.forked()


os.register_at_fork(after_in_parent=_after_fork)
