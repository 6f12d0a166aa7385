"""Checkpoints that are there whole or not at all, and are verified before they are used.

    folder/00000012-step-3400/state.pt          tensors and plain values, by torch.save
    folder/00000012-step-3400/manifest.json     size and SHA-256 of it, step, ranks, version

The states of one, by the name of its folder:

    .saving-…  ──both files flushed──▶ 00000012-step-3400 ──more than `keep` newer ones──▶ .removing-…  ──▶ gone
        │                                    │
        └─ killed, or the disk is full       ├─ size, SHA-256 and contents are right, and it fits ──▶ loaded
           ──▶ cleared by the next save      └─ else refused, with a sentence: the one before it is judged

A new name is flushed, too, before old checkpoints are removed. So a process that is killed, or a machine that loses
power, leaves the previous ones as they were.
Nothing in a checkpoint is ever executed: it is read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary, WeakSet

import torch

from accel.elastic.saving.plain_values import check_plain
from accel.errors import AccelError, CheckpointError, InvalidArgument, OtherVersion
from accel.profiler.interruptions import ours
from accel.profiler.typed_json import decode, read

_NAME = re.compile(r"(\d{8,})-step-(\d+)")
_STATE, _MANIFEST = "state.pt", "manifest.json"
_SAVING, _REMOVING = ".saving-", ".removing-"
VERSION = 1
_LONGEST = 65536
"""Bytes of a manifest; ours have 200."""


class Disk:
    """The operations on files that a checkpoint is made of, each durable where it has to be.

    Tests let each of them fail, or stop the process there, in turn.
    """

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def open(self, path: Path) -> BinaryIO:
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return when a file's contents outlast a power failure."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder outlast a power failure."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems don't offer it
                raise
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def lock(self, folder: Path) -> FolderLock | None:
        """Keep others from saving into a folder; return None where the file system has no locks.

        Raises:
            OSError: if another one has it.
        """
        handle = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise OSError(errno.EBUSY, "another training is saved there: give each a folder") from None
            return None
        return FolderLock(handle)


class FolderLock:
    """The lock of a folder, as long as this lives.

    It is of this open file: others in this process don't get it, nor end it with files of their own. A process that is
    forked closes the file first of all, so that workers which outlive this process for a while don't hold it.

    Args:
        handle: of the file, which is locked.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        _locks.add(self)
        _keep_from_forks()

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close


_locks: WeakSet[FolderLock] = WeakSet()


@functools.cache
def _keep_from_forks() -> None:
    os.register_at_fork(after_in_child=_close_locks)


def _close_locks() -> None:
    for lock in _locks:
        lock.close()


@dataclass(frozen=True)
class Manifest:
    """The facts that are checked before a checkpoint is loaded."""

    size_bytes: int
    sha256: str
    step: int
    world_size: int
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read it from text; raise InvalidArgument if it is none, or of another version."""
        values = decode(text[:_LONGEST].decode(errors="replace"))
        manifest = read(cls, values, "it", required=("version",))
        if manifest.version != VERSION:
            raise InvalidArgument(f"it has version {manifest.version}, and {VERSION} is known here")
        return manifest


class Checkpoints:
    """The checkpoints of one training, in a folder of their own.

    Args:
        folder: where they are kept; made when the first is saved. With several ranks one that all of them can read.
        keep: how many of them, the newest ones, at least 1; default 3. While one is saved there is one more.
        alone: no others of this process may save here with this until `release`, nor from the first save on those of
            other processes, until that or this one's end.

    Attributes:
        refused: one sentence for each checkpoint that the last `load_latest` did not take, and why.

    Raises:
        InvalidArgument: if `keep` is less than 1, or another one of this process saves here alone.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), keep=2)
        >>> path = checkpoints.save({"step": 3, "weights": torch.ones(2)})
        >>> path.name, checkpoints.load_latest()["step"]
        ('00000001-step-3', 3)
    """

    _disk = Disk()

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        *,
        alone: bool = False,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise InvalidArgument(f"keep must be a whole number of checkpoints, at least 1, got {keep!r}")
        self.folder, self.keep = Path(folder), keep
        self.refused: list[str] = []
        self._bad: set[int] = set()
        self._alone = alone
        self._lock: FolderLock | None = None
        if alone:
            _keep(self)

    def save(self, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint and return its folder, when it is durable and old ones are removed.

        Args:
            state: tensors and plain values (`accel.elastic.saving.plain_values`), such as `capture_state` returns. Its
                `step` and `world_size`, where it has them, go into the manifest.

        Raises:
            CheckpointError: if it can't be written, as on a full disk. Checkpoints that were there are as they were,
                and training can go on.
            InvalidArgument: if `state` holds a value that could not be loaded; nothing was written.
        """
        state = dict(state)
        check_plain(state)
        step, ranks = (_whole(state, name, default) for name, default in (("step", 0), ("world_size", 1)))
        try:
            return self._save(state, step, ranks)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error.strerror or error}; "
                f"{self._what_is_left()}"
            ) from error

    def load_latest(
        self,
        gather: Callable[[Any], list[Any]] | None = None,
        take: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any] | None:
        """Return the newest checkpoint that is whole, with its tensors on the CPU; None if there is none.

        Size and checksum are verified first. One that is damaged, or holds anything but tensors and plain values, or
        does not fit, is refused with a sentence in `refused`, and the one before it is tried.

        Args:
            gather: with several ranks, gives each the values that all of them passed, by rank. They then take the
                newest one that every rank can read. Default: this process alone.
            take: puts the training there, or raises CheckpointError and changes nothing. Default: the caller does.

        Raises:
            CheckpointError: if the folder is there, but can't be listed; if some ranks can read checkpoints, and there
                is none that all of them can; if none fits, or the newest is of another version: to begin anew, or
                before it, would cost those that there are.
        """
        self.refused = []
        problem: CheckpointError | None = None
        number, state = self._newest_of_all(None, gather)
        while state is not None and take is not None:
            why: CheckpointError | None = None
            try:
                take(state)
            except OtherVersion:
                raise
            except CheckpointError as error:
                why = error
            if not any([why is not None] if gather is None else gather(why is not None)):
                return state
            why = why or CheckpointError("another rank could not take it")
            problem = problem or why
            self._refuse(number, str(why).removesuffix(". Nothing was loaded"))
            number, state = self._newest_of_all(number - 1, gather)
        if problem is not None:
            raise problem
        return state

    def _newest_of_all(
        self, most: int | None, gather: Callable[[Any], list[Any]] | None
    ) -> tuple[int, dict[str, Any] | None]:
        """Return the newest one up to a number that every rank can read, and its number."""
        number, state = self._newest(most)
        first: list[int] | None = None
        while gather is not None:
            numbers: list[int] = gather(number)
            first = first or numbers
            if len(set(numbers)) == 1:
                break
            oldest = min(numbers)
            if number != oldest:
                number, state = self._newest(oldest)
        if state is None and first and max(first):
            raise CheckpointError(
                f"every rank must be able to read the same checkpoint in {self.folder}, but the newest ones that they "
                f"can read are {', '.join(f'{each or None} (rank {rank})' for rank, each in enumerate(first))}; mount "
                "the same folder on all hosts, or give another one to start over"
            )
        return number, state

    def release(self) -> None:
        """Let others save here."""
        _OWNERS.pop(self, None)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def are_in(self, folder: str | os.PathLike[str]) -> bool:
        """Return whether a folder is the one of these, by whatever path."""
        try:
            return self.folder.samefile(folder)
        except OSError:  # one that is still to be made
            return os.path.realpath(self.folder) == os.path.realpath(folder)

    @property
    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, by its name and size alone; None if there is none."""
        return next((path for number, path in self._listed() if self._looks_whole(number, path)), None)

    # Writing

    def _save(self, state: dict[str, Any], step: int, world_size: int) -> Path:
        _make_durably(self._disk, self.folder.absolute())
        lock = self._lock or self._disk.lock(self.folder)
        try:
            if lock is not None:  # else others may be writing what looks left over
                _clear(self._disk, self.folder)
            return self._write(state, step, world_size)
        finally:
            if self._alone:
                self._lock = lock
            elif lock is not None:
                lock.close()

    def _write(self, state: dict[str, Any], step: int, world_size: int) -> Path:
        temporary = self.folder / f"{_SAVING}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            self._disk.make_folder(temporary)
            size, digest = _write_state(self._disk, temporary / _STATE, state)
            manifest = Manifest(size, digest, step, world_size).to_json()
            with self._disk.open(temporary / _MANIFEST) as file:
                self._disk.write(file, manifest.encode())
                self._disk.sync(file)
            self._disk.sync_folder(temporary)
            number = max((number for number, _ in self._listed()), default=0) + 1
            path = self.folder / f"{number:08d}-step-{step}"
            self._disk.rename(temporary, path)
        except BaseException:
            self._disk.remove(temporary)
            raise
        self._disk.sync_folder(self.folder)
        self._remove_old()
        return path

    def _remove_old(self) -> None:
        listed = self._listed()
        whole = [number for number, path in listed if self._looks_whole(number, path)]
        oldest = whole[: self.keep][-1]
        for number, path in listed:
            if number < oldest:
                # A part of a checkpoint is never seen under its name. What can't be removed is tried again next time.
                hidden = path.with_name(f"{_REMOVING}{path.name}")
                with contextlib.suppress(OSError):
                    self._disk.rename(path, hidden)
                    self._disk.remove(hidden)

    def _what_is_left(self) -> str:
        try:
            latest = self.latest
        except CheckpointError:
            latest = None
        newest = "there is no earlier one" if latest is None else f"{latest.name} is still the newest"
        return f"training can go on, and {newest}. Free space there, or allow writing"

    # Reading

    def _listed(self) -> list[tuple[int, Path]]:
        """Return numbers and folders, the newest first."""
        try:
            names = [entry.name for entry in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self.folder} can't be listed: {error.strerror}; allow reading it, or give "
                "another folder to start over"
            ) from error
        matches = filter(None, map(_NAME.fullmatch, names))
        return sorted(((int(match[1]), self.folder / match[0]) for match in matches), reverse=True)

    def _newest(self, most: int | None) -> tuple[int, dict[str, Any] | None]:
        """Return the newest whole checkpoint up to a number, and its number; 0 and None if there is none."""
        for number, path in self._listed():
            if most is None or number <= most:
                try:
                    return number, _read(path)
                except _Refused as why:
                    self._refuse(number, str(why))
        return 0, None

    def _refuse(self, number: int, why: str) -> None:
        name = next((path.name for each, path in self._listed() if each == number), f"{number:08d}")
        self.refused.append(f"{name} was refused: {why}.")
        self._bad.add(number)

    def _looks_whole(self, number: int, path: Path) -> bool:
        """Return whether a checkpoint has its size, and was not refused."""
        try:
            return number not in self._bad and _manifest(path).size_bytes == (path / _STATE).stat().st_size
        except (OSError, _Refused):
            return False


_OWNERS: WeakKeyDictionary[Checkpoints, int] = WeakKeyDictionary()
"""Those that save alone, with their processes: one that is forked inherits them."""
_NOTING = Lock()


def _keep(checkpoints: Checkpoints) -> None:
    """Keep the folder from others of this process, which would begin with what is saved there."""
    with _NOTING:
        others = [each for each, process in _OWNERS.items() if process == os.getpid()]
        if any(other.are_in(checkpoints.folder) for other in others):
            raise InvalidArgument(
                f"each model must have a folder of its own for its checkpoints, got {checkpoints.folder}, where "
                "another model of this process saves; give it one, or to go on from there call accel.undo with that "
                "model first"
            )
        _OWNERS[checkpoints] = os.getpid()


class _Refused(AccelError):
    """Why a checkpoint is not loaded."""


class _Writer:
    """A file for torch.save, which hashes what goes through.

    torch writes from C++, which an exception must not pass through: it is kept, and nothing more is written.
    """

    def __init__(self, disk: Disk, file: BinaryIO) -> None:
        self._disk, self._file = disk, file
        self._error: BaseException | None = None
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        if self._error is None:
            try:
                self._disk.write(self._file, data)
                self.sha256.update(data)
                self.size += len(data)
            except BaseException as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is synced."""

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _make_durably(disk: Disk, folder: Path) -> None:
    """Make a folder and those above it that are missing."""
    if folder.exists():
        return
    _make_durably(disk, folder.parent)
    with contextlib.suppress(FileExistsError):  # another rank was faster
        disk.make_folder(folder)
    disk.sync_folder(folder.parent)


def _clear(disk: Disk, folder: Path) -> None:
    """Remove the remains of processes that were killed while they saved: we alone write there now."""
    for path in folder.iterdir():
        if path.name.startswith((_SAVING, _REMOVING)):
            disk.remove(path)


def _write_state(disk: Disk, path: Path, state: dict[str, Any]) -> tuple[int, str]:
    with disk.open(path) as file:
        writer = _Writer(disk, file)
        torch.save(state, writer)  # type: ignore[arg-type]  # all that it asks of a file
        writer.check()
        disk.sync(file)
    return writer.size, writer.sha256.hexdigest()


def _manifest(path: Path) -> Manifest:
    file = path / _MANIFEST
    if not file.is_file():  # a pipe would make us wait
        raise _Refused("it has no manifest")
    try:
        with file.open("rb") as text:
            return Manifest.from_json(text.read(1 << 20))
    except ValueError as error:
        raise _Refused(f"its manifest can't be read: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        manifest = _manifest(path)
        if not (path / _STATE).is_file():
            raise _Refused(f"it has no {_STATE}")
        with (path / _STATE).open("rb") as file:
            _verify(file, manifest)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        check_plain(state)
    except _Refused:
        raise
    except OSError as error:
        raise _Refused(f"it can't be read: {error.strerror or error}") from error
    except InvalidArgument as error:
        raise _Refused(str(error).partition(";")[0]) from error
    except ours() as error:  # whatever damaged or hostile bytes make of the reader
        raise _Refused(f"torch does not load it with weights_only=True ({_first_line(error)})") from error
    if type(state) is not dict:
        raise _Refused(f"it holds a {type(state).__name__} in place of a dict")
    return state


def _verify(file: BufferedReader, manifest: Manifest) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != manifest.size_bytes:
        raise _Refused(f"its {_STATE} has {size} bytes, and {manifest.size_bytes} by its manifest")
    if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
        raise _Refused(f"its {_STATE} has another SHA-256 than by its manifest")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0][:200]


def _whole(state: Mapping[str, Any], name: str, default: int) -> int:
    value = state.get(name, default)
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"{name} of a state must be a whole number, at least 0, got {value!r}")
    return value
