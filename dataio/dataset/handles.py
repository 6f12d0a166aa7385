"""Does a fetch read through something that a forked process would share with the loop: an open file, a socket?

A forked process has the descriptors that were open before, and their positions in common with the
loop: two that read on from the same place get each other's bytes, and no measurement shows it.
Neither may a database connection or an HDF5 file be used on both sides. So as long as nobody asked
for processes, none is forked when

- such a handle can be reached from the dataset, the collate function, or the globals and closures of their code,
- something is reached of which that is not known, or that gives what comes next (an iterator),
- or a file that was open before a fetch was seen to stand elsewhere after it.
"""

from __future__ import annotations

import collections.abc
import contextlib
import io
import os
import socket
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.dataio.dataset.reach import MOST, is_code, native, native_base, reachable
from accel.profiler.errors import AccelError
from accel.profiler.interruptions import ours


class HandleShared(AccelError, RuntimeError):
    """A forked process would read through a handle that the loop has open."""


# Packages whose objects hold files, sockets or native threads that don't bear a fork.
_HANDLES = frozenset(
    {
        *("h5py", "sqlite3", "_sqlite3", "lmdb", "tables", "netCDF4", "zmq", "psycopg", "psycopg2", "pymysql"),
        *("MySQLdb", "redis", "pymongo", "sqlalchemy", "duckdb", "dbm", "_dbm", "_gdbm", "leveldb", "rocksdb"),
        *("rasterio", "av", "decord", "torchcodec", "soundfile", "boto3", "botocore", "s3fs", "gcsfs", "fsspec"),
        *("plyvel", "aiohttp", "requests", "urllib3", "http", "grpc", "multiprocessing", "subprocess"),
        *("tensorflow", "jaxlib"),
    }
)
# Their objects compute with native threads, and wait in a forked process for ever for those that are not there.
_OWN_THREADS = frozenset({"polars"})
# Packages whose classes of C code hold memory alone.
_HARMLESS = frozenset(
    {
        *("builtins", "types", "typing", "abc", "_abc", "collections", "_collections", "functools", "_functools"),
        *("operator", "_operator", "re", "_sre", "enum", "datetime", "decimal", "_decimal", "fractions", "uuid"),
        *("pathlib", "string", "_struct", "array", "weakref", "_weakref", "_thread", "threading", "contextvars"),
        *("random", "_random", "ctypes", "_ctypes", "mmap", "logging", "zoneinfo", "_io", "io", "codecs", "_codecs"),
        *("numpy", "torch", "torchvision", "torchaudio", "PIL", "pandas", "pyarrow", "datasets", "tokenizers"),
        *("transformers", "sentencepiece", "regex", "_regex", "scipy", "sklearn", "skimage", "cv2", "albumentations"),
        *("tiktoken", "_tiktoken", "simplejpeg", "xxhash", "ml_dtypes", "accel", "__future__"),
    }
)


def shared_handle(loader: DataLoader[Any]) -> str:
    """Return '' if forked processes may fetch as well as the loop, else the reason why that is not known."""
    count = 0
    for name, thing in reachable(("the dataset", loader.dataset), ("the collate function", loader.collate_fn)):
        count += 1
        reason = _handle(name, thing)
        if reason:
            return reason
    return "" if count < MOST else f"the dataset reaches {MOST:,} things and more, too many to look for open files"


def check_fork(loader: DataLoader[Any], start_method: str, *, accepted: str = "") -> None:
    """Raise `HandleShared` if processes that nobody asked for may not be started.

    `accepted` is what `shared_handle` said when the user's own workers would have been forked.
    """
    if start_method != "fork":
        raise HandleShared(
            f"a process by {start_method} imports the script that is run, whose body may not be guarded; name "
            f"mode={start_method!r} for it"
        )
    reason = shared_handle(loader)
    if reason and reason != accepted:
        raise HandleShared(reason)


def _handle(name: str, thing: Any) -> str:
    kind = type(thing)
    if is_handle(thing):
        if isinstance(thing, io.IOBase):
            return f"{name} is an open file, whose position processes would share"
        return f"{name} is a {kind.__module__}.{kind.__qualname__}, which processes may not share"
    if isinstance(thing, io.IOBase):
        return ""
    if _package(kind) in _OWN_THREADS:
        return f"{name} is a {kind.__module__}.{kind.__qualname__}, whose native threads don't come along with a fork"
    if isinstance(thing, collections.abc.Iterator) and not isinstance(thing, torch.nn.Module):
        return f"{name} is a {kind.__qualname__}, an iterator, which each process would advance on its own"
    if is_code(thing) or not native(kind):
        return ""
    owner = native_base(kind).__module__.partition(".")[0]
    if owner in _HARMLESS and kind.__qualname__ != "VideoCapture":
        return ""
    return f"{name} is a {kind.__module__}.{kind.__qualname__}, not known to be safe to share between processes"


def is_handle(thing: Any) -> bool:
    """Return whether a thing is an open file, a socket, or of a package whose objects hold such."""
    if isinstance(thing, io.IOBase):
        return _is_open_file(thing)
    return isinstance(thing, socket.socket) or (_package(type(thing)) in _HANDLES and _is_live(thing))


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_open_file(thing: Any) -> bool:
    try:
        return not thing.closed and thing.fileno() > 2 and thing.readable()
    except (OSError, ValueError):  # it lies in memory
        return False


def _is_live(thing: Any) -> bool:
    """Return whether an object of a package of handles is more than a class, a function or a closed file."""
    if isinstance(thing, type):
        return False
    try:
        return bool(thing)
    except ours():
        return True


# -- what is seen of the system ----------------------------------------------------------------------------------------


def positions() -> dict[str, int]:
    """Return where each file that is open for reading stands; nothing where the system doesn't tell (/proc).

    Where standard output and errors go is left out: whoever writes to it moves it, other threads and processes too.
    """
    open_at: dict[str, int] = {}
    with contextlib.suppress(OSError):
        printed_to = ("/proc/self/fd/1", "/proc/self/fd/2")
        written = {os.readlink(each) for each in printed_to if os.path.lexists(each)}
        for number in os.listdir("/proc/self/fdinfo"):
            with contextlib.suppress(OSError, ValueError):
                path = os.readlink(f"/proc/self/fd/{number}")
                if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")) and path not in written:
                    position, writes_only = _place(number)
                    if not writes_only:
                        open_at[f"{path} ({number})"] = position
    return open_at


def _place(number: str) -> tuple[int, bool]:
    with open(f"/proc/self/fdinfo/{number}") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return int(lines["pos"]), int(lines["flags"], 8) & os.O_ACCMODE == os.O_WRONLY


def moved(before: dict[str, int], after: dict[str, int]) -> str:
    """Return a file that was open on both sides and has another position, '' if there is none."""
    return next((name for name, at in before.items() if after.get(name, at) != at), "")
