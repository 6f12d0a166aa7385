"""The files that a dataset names, and when they were last written.

A dataset holds the path of an index, of an archive, or those of all its files. What it puts together while it fetches
(a folder and a name from a table) is not seen here. Of a folder nothing is said: a loop may save its results there.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from accel.dataio.dataset.reach import attributes, is_code

# Looking at one takes some 2 µs.
_MOST = 100_000
_DEPTH = 6
Written = tuple[int, int, int]
"""When a file was written, its size, and which one it is."""


def named_files(dataset: Any) -> dict[str, Written]:
    """Return the files whose paths a dataset holds, in attributes or in lists, tuples and dicts.

    Args:
        dataset: the first 100,000 things in it are looked at.
    """
    return written(dict.fromkeys(_paths(dataset)))


def written(paths: Iterable[str]) -> dict[str, Written]:
    """Return those of some paths that exist, and when they were written."""
    files = {}
    for path in paths:
        try:
            state = os.stat(path)
        except (OSError, ValueError):  # no file, or a text that can't be the name of one
            continue
        if stat.S_ISREG(state.st_mode):
            files[path] = (state.st_mtime_ns, state.st_size, state.st_ino)
    return files


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
