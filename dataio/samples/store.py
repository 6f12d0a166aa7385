"""Memory for samples, which processes share that are forked after it was made.

Each sample has its place, by its index, so that nothing is allocated or locked when one is written: whoever writes it
writes the same bytes. A place costs memory once it is written. What each place holds is said by its state, which is
written last.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from accel.dataio.samples.layout import Bytes, SampleLayout

Places = np.ndarray[tuple[int], np.dtype[np.int64]]
UNKNOWN, SEEN, KEPT = 0, 1, 2
_ALIGNED = 64


class SampleStore:
    """Places for the samples of a dataset.

    Args:
        layout: of each sample.
        count: samples of the dataset.
        most_bytes: bytes that all may take; those with the lowest indices have a place.
        directory: where a file holds them, which has no name and is gone with the process; None for memory.

    Attributes:
        places: number of samples that have a place.
        state: of each: `UNKNOWN`, `SEEN` (its digest is known) or `KEPT`.
        digest: of each, once it is seen.

    Raises:
        OSError: if the file can't be made that large.
    """

    def __init__(self, layout: SampleLayout, count: int, most_bytes: int, directory: Path | None = None) -> None:
        self.layout = layout
        self.places = max(0, min(count, most_bytes // layout.size))
        starts, end = [], 0
        for leaf in layout.leaves:
            starts.append(end)
            end += -(-leaf.size * self.places // _ALIGNED) * _ALIGNED
        self.size = end
        self._memory = _mapped(max(end, 1), directory)
        whole = np.frombuffer(self._memory, np.uint8)
        self._columns = [
            whole[start : start + leaf.size * self.places].reshape(self.places, leaf.size)
            for leaf, start in zip(layout.leaves, starts, strict=True)
        ]
        self._notes = mmap.mmap(-1, max(9 * self.places, 1))
        self.digest = np.frombuffer(self._notes, np.int64, self.places)
        self.state = np.frombuffer(self._notes, np.uint8, self.places, 8 * self.places)

    def note(self, places: Places, rows: Sequence[Bytes], may_keep: Callable[[int], bool]) -> int | None:
        """Note a digest of samples that are new, and keep those that come again with the same one.

        Args:
            places: of the samples, each another one.
            rows: their bytes, leaf by leaf.
            may_keep: asked whether there is room for so many more.

        Returns:
            The place of one whose digest is another than before; None if there is none.
        """
        digests = np.array([hash(parts) for parts in zip(*map(_parts, rows), strict=True)], np.int64)
        keeps = may_keep(int((self.state[places] == SEEN).sum()))  # it looks at the system, and others go on meanwhile
        states = self.state[places]
        new, again = states == UNKNOWN, states == SEEN
        self.digest[places[new]] = digests[new]
        self.state[places[new]] = SEEN
        if not again.any():
            return None
        differs = again & (self.digest[places] != digests)
        if differs.any():
            return int(places[differs][0])
        if keeps:
            for column, leaf in zip(self._columns, rows, strict=True):
                column[places[again]] = leaf if again.all() else leaf[again]
            self.state[places[again]] = KEPT
        return None

    def read(self, places: Places) -> list[Bytes]:
        """Return copies of the rows of some samples, leaf by leaf."""
        return [column.take(places, axis=0) for column in self._columns]

    def holds(self, place: int, parts: Sequence[bytes]) -> bool:
        """Return whether these are the bytes that are kept."""
        return all(column[place].tobytes() == part for column, part in zip(self._columns, parts, strict=True))

    def forget(self) -> None:
        """Keep nothing of what there is."""
        self.state[:] = UNKNOWN

    def free(self) -> None:
        """Give the memory back to the system, in all processes; what is read afterwards is zeros."""
        self.forget()
        with contextlib.suppress(AttributeError, OSError):  # systems other than Linux: with the last reference
            self._memory.madvise(mmap.MADV_REMOVE)


def _parts(rows: Bytes) -> list[bytes]:
    return [row.tobytes() for row in rows]


def _mapped(size: int, directory: Path | None) -> mmap.mmap:
    if directory is None:
        return mmap.mmap(-1, size)
    file, name = tempfile.mkstemp(prefix="accel-samples-", dir=directory)
    try:
        os.unlink(name)
        os.truncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # a disk that is full must be an error here, and not a signal later
        return mmap.mmap(file, size)
    finally:
        os.close(file)
