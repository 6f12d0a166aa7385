"""The files that a dataset names, and when they were last written.

A dataset holds the path of an index, of an archive, or those of all its files. What it puts together while it fetches
(a folder and a name from a table) is not seen here. Of a folder nothing is said: a loop may save its results there.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

from accel.dataio.dataset.reach import attributes, is_code

# Looking at one takes some 2 µs, on storage far away a thousand.
_MOST = 100_000
# Of them so many are looked at each time, and more for so many seconds.
_LEAST, _MOST_S = 256, 0.05
_DEPTH = 6
Written = tuple[int, int, int]
"""When a file was written, its size, and which one it is."""


class NamedFiles:
    """The files whose paths a dataset holds, in attributes or in lists, tuples and dicts.

    They are looked at in turn, as many at a time as take a moment: on storage far away a look at all takes minutes.

    Args:
        dataset: the first 100,000 things in it are looked at.
        clock: returns seconds.

    Example:
        >>> files = NamedFiles(dataset)
        >>> files.changed()
        False
    """

    def __init__(self, dataset: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._paths = deque(dict.fromkeys(_paths(dataset)))
        self._written: dict[str, Written] = {}
        self.changed()

    def changed(self) -> bool:
        """Return whether one of the files whose turn it is has been written, made or removed since its last look."""
        until, changed = self._clock() + _MOST_S, False
        for count in range(len(self._paths)):
            if count >= _LEAST and self._clock() > until:
                break
            path = self._paths.popleft()
            before, now = self._written.get(path), _written(path)
            if now is None and before is None:
                continue  # no file: it is not asked about again
            self._paths.append(path)
            changed = changed or (before is not None and now != before)
            if now is None:
                self._written.pop(path)
            else:
                self._written[path] = now
        return changed


def _written(path: str) -> Written | None:
    """Return when a file was written; None if there is none."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # no file, or a text that can't be the name of one
        return None
    return (state.st_mtime_ns, state.st_size, state.st_ino) if stat.S_ISREG(state.st_mode) else None


def _paths(dataset: Any) -> Iterator[str]:
    waiting, seen, left = deque([(dataset, 0)]), set[int](), _MOST
    while waiting and left:
        thing, depth = waiting.popleft()
        left -= 1
        if isinstance(thing, str | PurePath):
            path = os.fspath(thing)
            if os.sep in path or "." in path:
                yield path
        elif isinstance(thing, int | float | bytes | None) or depth == _DEPTH or id(thing) in seen or is_code(thing):
            continue
        else:
            seen.add(id(thing))
            waiting.extend((part, depth + 1) for part in _parts(thing))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return [*thing, *thing.values()][:_MOST]
    if isinstance(thing, list | tuple):
        return thing[:_MOST]
    return [value for _, value in attributes(thing)]
