"""A handle that was open before is read by one process only, unless the user asked for workers."""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import logging
import os
import random
import re
import socket
import sqlite3
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from accel.dataio.dataset import handles
from accel.dataio.dataset.handles import HandleShared, check_fork, moved, positions, shared_handle
from accel.dataio.dataset.thread_safety import unsafe
from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner

# Files that are open are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

LENGTH, WIDTH = 64, 8
FILE: Any = None  # opened by a test: a module's global that the dataset reads through


class Records(Dataset[Tensor]):
    """Sample i is record i of a file; `read` gets the file's place and size."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.read = read

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self.read(index)), dtype=torch.uint8)


class OfTheClass(Records):
    file: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__(lambda index: _read(type(self).file, index))


def _read(file: Any, index: int) -> bytes:
    file.seek(index * WIDTH)
    return bytes(file.read(WIDTH))


def _read_global(index: int) -> bytes:
    return _read(FILE, index)


@functools.lru_cache
def _opened(path: Path) -> Any:
    return path.open("rb")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    content = np.arange(LENGTH, dtype=np.uint8).repeat(WIDTH).tobytes()
    (tmp_path / "records").write_bytes(content)
    return tmp_path / "records"


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    global FILE
    FILE, OfTheClass.file = None, None
    _opened.cache_clear()


def _attribute(path: Path) -> Any:
    data = Records(bytes)
    data.file = path.open("rb")  # type: ignore[attr-defined]
    data.read = functools.partial(_read, data.file)  # type: ignore[attr-defined]
    return data


def _class_attribute(path: Path) -> Any:
    OfTheClass.file = path.open("rb")
    return OfTheClass()


def _of_the_module(path: Path) -> Any:
    global FILE
    FILE = path.open("rb")
    return Records(_read_global)


def _cached(path: Path) -> Any:
    _opened(path)
    return Records(lambda index: _read(_opened(path), index))


def _closure(path: Path) -> Any:
    file = path.open("rb")
    return Records(lambda index: _read(file, index))


def _default(path: Path) -> Any:
    def read(index: int, file: Any = path.open("rb")) -> bytes:  # noqa: B008
        return _read(file, index)

    return Records(read)


def _unbuffered(path: Path) -> Any:
    file = io.FileIO(path)
    return Subset(ConcatDataset([Records(lambda index: _read(file, index))]), list(range(LENGTH)))


HOLD = [_attribute, _class_attribute, _of_the_module, _cached, _closure, _default, _unbuffered]


@pytest.mark.parametrize("hold", HOLD, ids=lambda hold: hold.__name__.strip("_"))
def test_a_file_that_is_open_is_found(hold: Any, path: Path) -> None:
    loader = DataLoader(hold(path), 4)

    assert "is an open file, whose position processes would share" in shared_handle(loader)
    with pytest.raises(HandleShared, match="is an open file"):
        check_fork(loader, "fork")


@pytest.mark.parametrize("hold", HOLD, ids=lambda hold: hold.__name__.strip("_"))
def test_auto_reads_every_record_of_it_right(hold: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _try_everything(monkeypatch)
    with ContinuousLoader(DataLoader(hold(path), 4, shuffle=True), num_workers=2) as loader:
        for _ in range(12):
            seen = torch.cat(list(loader))
            assert (seen == seen[:, :1]).all()
            assert sorted(seen[:, 0].tolist()) == list(range(LENGTH))
        assert loader.worker_processes == 0
        assert re.search(r"fork\(1\).*HandleShared", loader.explain())


def test_a_file_that_no_walk_finds_is_seen_to_move(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "reachable", lambda *roots: iter(()))
    _try_everything(monkeypatch)
    with ContinuousLoader(DataLoader(_of_the_module(path), 4), num_workers=2) as loader:
        for _ in range(12):
            assert (torch.cat(list(loader)) == torch.arange(LENGTH)[:, None]).all()
        assert "fetching reads from a file that was open before" in loader.explain()
        assert loader.setting == "inline"


def test_one_who_asked_for_workers_gets_them(path: Path) -> None:
    loader = DataLoader(_attribute(path), 4)
    engine = ProcessEngine(loader, 1, start_method="fork")
    engine.start()

    assert len(engine.processes) == 1
    engine.close()


class Lazy(Records):
    """Opens its file at the first sample, as a dataset for workers does."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda index: _read(self.file, index))
        self.path, self._file = path, None

    @property
    def file(self) -> Any:
        if self._file is None:
            self._file = self.path.open("rb")
        return self._file


def test_workers_that_the_user_asked_for_are_forked_before_the_loop_opens_anything(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _try_everything(monkeypatch)
    data = Lazy(path)
    plain = DataLoader(data, 4, shuffle=True, num_workers=2)
    own, told = re.compile(r"fork\(2\) .* ms per batch"), ""
    with ContinuousLoader(plain) as loader:
        for epoch in range(4000):
            seen = torch.cat(list(loader))
            assert (seen == seen[:, :1]).all()
            assert sorted(seen[:, 0].tolist()) == list(range(LENGTH))
            told = loader.explain()
            if epoch >= 40 and own.search(told):
                break
    data.file.close()

    assert own.search(told)
    assert re.search(r"threads .*HandleShared", told)  # workers were asked for, threads were not
    assert re.search(r"fork\(1\) .*HandleShared: the dataset._file is an open file", told)


def test_positions_are_those_of_files_open_for_reading(path: Path, tmp_path: Path) -> None:
    with path.open("rb", buffering=0) as file, (tmp_path / "log").open("w") as log:
        before = positions()
        file.read(3)
        log.write("written")
        log.flush()
        after = positions()
        name = moved(before, after)

    assert name.startswith(str(path))
    assert after[name] - before[name] == 3
    assert moved(after, positions()) == ""  # one that was closed meanwhile has not moved


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_printed_moves_no_file(number: int) -> None:
    """Standard output may be a file that is open for reading too, as under pytest, and any process may write to it."""
    kept = os.dup(number)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), number)
            before = positions()
            os.write(number, b"from another thread")
            after = positions()
    finally:
        os.dup2(kept, number)
        os.close(kept)

    assert moved(before, after) == ""


def _try_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every setting tried at once, as if there were always something to be won, and two cores."""
    for name, value in {"_NEGLIGIBLE": -1.0, "_BLOCK_S": 0.0, "_FIRST_S": 0.0, "usable_cores": lambda: 2}.items():
        monkeypatch.setattr(tuner, name, value)


class Holds(Dataset[Any]):
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return 1


SHARED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text file": (lambda path: path.open(), "an open file"),
    "gzip": (lambda path: gzip.GzipFile(path), "an open file"),
    "zip": (lambda path: zipfile.ZipFile(_zip(path)), "thing.fp is an open file"),
    "member of a zip": (lambda path: _member(path), "an open file"),
    "database": (lambda path: sqlite3.connect(":memory:"), "a sqlite3.Connection"),
    "cursor": (lambda path: sqlite3.connect(":memory:").cursor(), "a sqlite3.Cursor"),
    "socket": (lambda path: socket.socket(), "a socket.socket"),
    "iterator": (lambda path: iter([1, 2]), "a list_iterator"),
    "generator": (lambda path: (i for i in range(3)), "a generator"),
    "count": (lambda path: itertools.count(), "a count"),
    "nested": (lambda path: {"a": [({"b": path.open("rb")},)]}, "an open file"),
    "in objects": (lambda path: np.array([path.open("rb")], dtype=object), "an open file"),
}


def _member(path: Path) -> Any:
    return zipfile.ZipFile(_zip(path)).open("a")


def _zip(path: Path) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as file:
        file.writestr("a", "b")
    return path.with_suffix(".zip")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", SHARED)
def test_what_processes_may_not_share(kind: str, path: Path) -> None:
    make, told = SHARED[kind]

    assert told in shared_handle(DataLoader(Holds(make(path))))


HARMLESS: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda path: [torch.ones(2), torch.nn.Linear(2, 2), torch.Generator()],
    "arrays": lambda path: [np.ones(3), np.memmap(path, mode="r"), np.random.default_rng(1), np.dtype("f4")],
    "numbers": lambda path: {"a": (1, 2.0, "b", None, True, 3j, b"c")},
    "in memory": lambda path: [io.BytesIO(b"a"), io.StringIO("b")],
    "closed file": lambda path: _closed(path),
    "log": lambda path: [logging.getLogger("any"), (path.parent / "log").open("w")],
    "code": lambda path: [re.compile("a"), len, functools.partial(int, "1"), threading.Lock(), random.Random(1)],
    "paths": lambda path: [path] * 1000,
    "range": lambda path: [range(9), slice(1), frozenset({1})],
}


def _closed(path: Path) -> Any:
    with path.open("rb") as file:
        return file


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_they_may(kind: str, path: Path) -> None:
    assert shared_handle(DataLoader(Holds(HARMLESS[kind](path)))) == ""


def test_too_much_to_look_through_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MOST", 5)

    assert "too many to look for open files" in shared_handle(DataLoader(Holds([[1.0], [2.0], [3.0]])))


def test_start_methods_that_import_the_script_are_for_those_who_chose_them() -> None:
    loader = DataLoader(Holds(1))
    engine = ProcessEngine(loader, 1, start_method="spawn", check=functools.partial(check_fork, loader))

    with pytest.raises(HandleShared, match="a process by spawn imports the script that is run"):
        engine.start()


def test_threads_know_of_globals_too(path: Path) -> None:
    data = _of_the_module(path)
    loader = ContinuousLoader(DataLoader(data, 4))

    assert "the global FILE" in unsafe(data)
    with pytest.raises(HandleShared, match="the global FILE is an open file"):
        loader._core.engines.get(tuner.Setting("threads", 2))


def test_a_table_that_computes_with_threads_of_its_own_is_not_forked() -> None:
    """In a forked process they are not there, and it waits for them for ever."""

    class Frame:
        pass

    Frame.__module__ = "polars.dataframe.frame"
    data = Records(bytes)
    data.table = Frame()  # type: ignore[attr-defined]
    assert "polars.dataframe.frame" in shared_handle(DataLoader(data, 4))
    assert "native threads don't come along with a fork" in shared_handle(DataLoader(data, 4))
    data.table = Frame  # type: ignore[attr-defined]
    assert shared_handle(DataLoader(data, 4)) == ""


# Threads may share a dataset only if all it holds is known to be harmless


class Things(Dataset[Any]):
    def __init__(self, *things: Any) -> None:
        self.things = things

    def __len__(self) -> int:
        return 1

    def first(self) -> Any:
        return self.things[0]


def with_closure(thing: Any) -> Callable[[], Any]:
    return lambda: thing


SAFE = {
    "tensor": torch.ones(3),
    "array": np.ones(3),
    "paths": [Path("a")] * 1000,
    "module": nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
    "function": with_closure([1, 2]),
    "partial": functools.partial(with_closure, {"a": 1}),
    "class": dict,
    "subset": Subset(ConcatDataset([TensorDataset(torch.ones(3))]), [0, 1]),
    "range": range(10),
}
UNSAFE = {
    "file": io.BytesIO(b"abc"),
    "generator": torch.Generator(),
    "random": random.Random(1),
    "numpy_generator": np.random.default_rng(1),
    "iterator": iter([1]),
    "database": sqlite3.connect(":memory:"),
    "objects": np.array([object()]),
    "lock": threading.Lock(),
    "in_closure": with_closure(io.BytesIO()),
    "in_partial": functools.partial(with_closure, io.BytesIO()),
    "in_method": Things(io.BytesIO()).first,
    "in_dict": {"a": [{"b": iter([1])}]},
}


@pytest.mark.parametrize("name", SAFE)
def test_what_is_read_by_indexing_alone(name: str) -> None:
    assert unsafe(Things(SAFE[name])) == ""


@pytest.mark.parametrize("name", UNSAFE)
def test_what_has_a_state_of_its_own(name: str) -> None:
    assert ("thing of" if name == "in_closure" else "the dataset.things[0]") in unsafe(Things(UNSAFE[name]))


def test_a_class_written_in_c_may_hide_anything() -> None:
    class Sneaky(io.BytesIO):
        pass

    assert "is a Sneaky, which is not known to be safe to share between threads" in unsafe(Things(Sneaky()))


def test_a_dataset_may_say_so_itself() -> None:
    data = Things(io.BytesIO())
    data.thread_safe = True  # type: ignore[attr-defined]
    assert unsafe(data) == ""
    data.thread_safe = False  # type: ignore[attr-defined]
    assert "the dataset declares" in unsafe(data)


SHARED_RANDOM = random.Random(1)


class NamesARandom(Things):
    def __getitem__(self, index: int) -> Any:
        return SHARED_RANDOM.random()


def test_what_its_code_names_counts() -> None:
    assert "the global SHARED_RANDOM is a Random" in unsafe(NamesARandom())


def test_circles() -> None:
    data = Things([])
    data.things[0].append(data)
    assert unsafe(data) == ""
