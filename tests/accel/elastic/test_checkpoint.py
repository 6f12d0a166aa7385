"""Checkpoints: what is kept, what is refused on loading, and what a full or forbidden disk leaves."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import resource
import signal
import stat
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.elastic.checkpoint import Checkpoints, Disk, Manifest
from accel.errors import CheckpointError, InvalidArgument
from tests.accel.elastic.crashing_disk import CountingDisk, FailingDisk
from tests.hooked import hooked


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "world_size": 2, "weights": torch.full((50,), float(step)), "history": [step, {"a": None}]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def saved(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = hooked(Checkpoints, disk=CountingDisk())(folder, keep=keep)
    for step in steps:
        checkpoints.save(state_of(step))
    return checkpoints


def step_loaded(folder: Path) -> tuple[Any, list[str]]:
    checkpoints = Checkpoints(folder)
    state = checkpoints.load_latest()
    return None if state is None else state["step"], checkpoints.refused


# Save, load, keep


def test_the_newest_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load_latest() is None and checkpoints.latest is None
    path = checkpoints.save(state_of(7))
    assert path == checkpoints.latest == tmp_path / "new" / "folder" / "00000001-step-7"
    checkpoints.save(state_of(9))
    state = checkpoints.load_latest()
    assert state is not None
    assert torch.equal(state.pop("weights"), torch.full((50,), 9.0))
    assert state == {"step": 9, "world_size": 2, "history": [9, {"a": None}]}
    assert checkpoints.refused == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    saved(tmp_path, 1, 2, 3, 3, 5, keep=keep)  # a step may come twice
    assert names(tmp_path) == ["00000003-step-3", "00000004-step-3", "00000005-step-5"][-keep:]


def test_damaged_ones_do_not_count_among_those_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "00000003-step-3" / "state.pt").write_bytes(b"short")
    saved(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["00000002-step-2", "00000003-step-3", "00000004-step-4"]
    checkpoints = Checkpoints(tmp_path, keep=2)
    content = bytearray((tmp_path / "00000004-step-4" / "state.pt").read_bytes())
    content[700] ^= 1  # of its right size: only its sum shows it
    (tmp_path / "00000004-step-4" / "state.pt").write_bytes(content)
    state = checkpoints.load_latest()
    assert state is not None and state["step"] == 2
    assert len(checkpoints.refused) == 2
    checkpoints.save(state_of(5))
    assert "00000002-step-2" in names(tmp_path)
    checkpoints.save(state_of(6))
    assert names(tmp_path) == ["00000005-step-5", "00000006-step-6"]


def test_nothing_is_removed_before_the_new_one_is_durable(tmp_path: Path) -> None:
    disk = CountingDisk()
    checkpoints = hooked(Checkpoints, disk=disk)(tmp_path, keep=1)
    checkpoints.save(state_of(1))
    disk.names.clear()
    checkpoints.save(state_of(2))
    done = [name for name in disk.names if name != "write"]
    # State and manifest, their folder, the name; then the old one.
    new = ["make_folder", "open", "sync", "open", "sync", "sync_folder", "rename", "sync_folder"]
    assert done == [*new, "rename", "remove"]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "1-step-2", "00000001-step-2.bak"):
        (tmp_path / name).write_text("mine")
    saved(tmp_path, 1, 2, keep=1)
    assert names(tmp_path) == ["00000001-step-2.bak", "00000002-step-2", "1-step-2", "notes.txt"]


def test_really_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    Checkpoints(tmp_path / "folder").save(state_of(1))
    assert flushed[0] == tmp_path.name  # that the folder is there
    assert flushed[1:3] == ["state.pt", "manifest.json"]
    assert flushed[3].startswith(".saving-") and flushed[4] == "folder"


@pytest.mark.parametrize(("error", "saves"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_folders_that_can_not_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, saves: bool
) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(error, os.strerror(error))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if saves:
        Checkpoints(tmp_path).save(state_of(1))
    else:
        with pytest.raises(CheckpointError, match="Input/output error"):
            Checkpoints(tmp_path).save(state_of(1))
    assert step_loaded(tmp_path)[0] == (1 if saves else None)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"x": object()}, r"got a object at state\['x'\]"),
        ({"step": -1}, "step of a state must be a whole number, at least 0, got -1"),
        ({"world_size": 1.0}, "world_size of a state must be a whole number"),
    ],
)
def test_what_could_not_be_loaded_is_not_written(tmp_path: Path, state: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Checkpoints(tmp_path / "new").save(state)
    assert not (tmp_path / "new").exists()


# Damage


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    saved(folder, 1, 2)
    return folder


@given(data=st.data())
def test_any_truncation_and_any_flipped_bit_are_refused(pair: Path, data: st.DataObject) -> None:
    file = pair / "00000002-step-2" / data.draw(st.sampled_from(["state.pt", "manifest.json"]))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:place]
    else:
        bit = 1 << data.draw(st.integers(0, 7))
        damaged = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
    file.write_bytes(damaged)
    try:
        step, refused = step_loaded(pair)
    finally:
        file.write_bytes(whole)
    # Blanks of the manifest may be others, and the numbers that are only told; the state is then still the right one.
    if file.name == "state.pt" or step == 1:
        assert step == 1
        assert len(refused) == 1
        assert re.fullmatch(r"00000002-step-2 was refused: its .+\.", refused[0]), refused
    else:
        assert (step, refused) == (2, [])


def put(folder: Path, content: bytes, manifest: Manifest | None = None) -> None:
    """Add a checkpoint of these bytes, with a manifest that is right for them."""
    path = folder / "00000009-step-9"
    path.mkdir()
    (path / "state.pt").write_bytes(content)
    manifest = manifest or Manifest(len(content), hashlib.sha256(content).hexdigest(), 9, 1)
    (path / "manifest.json").write_text(manifest.to_json())


def by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def script_archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("constants.pkl", "data.pkl"):
            archive.writestr(f"archive/{name}", pickle.dumps({}, protocol=2))
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
def test_code_in_a_checkpoint_never_runs(tmp_path: Path, form: str) -> None:
    saved(tmp_path, 1)
    victim = tmp_path / "victim"
    state = {"step": 9, "x": Hostile(str(victim))}
    file = io.BytesIO()
    if form == "pickle":
        pickle.dump(state, file)
    else:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
    put(tmp_path, file.getvalue())
    step, refused = step_loaded(tmp_path)
    assert step == 1
    assert not victim.exists()
    assert len(refused) == 1
    assert "does not load it with weights_only=True" in refused[0]
    assert "\n" not in refused[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "does not load it"),
        (b"PK\x03\x04 and no more", "does not load it"),
        (os.urandom(1000), "does not load it"),
        (by_torch([1, 2]), "it holds a list in place of a dict"),
        (by_torch(torch.ones(2)), "it holds a Tensor in place of a dict"),
        (by_torch({"x": {1, 2}}), r"tensors and plain values only, got a set at state\['x'\]"),
        (script_archive(), "does not load it"),
    ],
    ids=["empty", "head", "noise", "list", "tensor", "set", "script"],
)
def test_what_is_no_state_is_refused_in_a_sentence(tmp_path: Path, content: bytes, text: str) -> None:
    saved(tmp_path, 1)
    put(tmp_path, content)
    step, refused = step_loaded(tmp_path)
    assert step == 1
    assert len(refused) == 1
    assert re.search(text, refused[0]), refused
    assert refused[0].startswith("00000009-step-9 was refused: ") and refused[0].endswith(".")


def manifest_with(**fields: Any) -> str:
    return json.dumps({"size_bytes": 3, "sha256": "", "step": 1, "world_size": 1, "version": 1, **fields})


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ("", "its manifest can't be read: it must be JSON"),
        ("[" * 100_000, "its manifest can't be read: it must be JSON"),
        ("3", "its manifest can't be read: it must be an object"),
        ("\ud800".encode("utf-8", "surrogatepass"), "its manifest can't be read: it must be JSON"),
        ("{}", "its manifest can't be read: it is incomplete: it lacks sha256, size_bytes, step, version"),
        (manifest_with(version=2), "its manifest can't be read: it has version 2, and 1 is known here"),
        (manifest_with(size_bytes=True), "its manifest can't be read: it.size_bytes must be int, got"),
        (manifest_with(sha256=3), "its manifest can't be read: it.sha256 must be str, got"),
        (None, "it has no manifest"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, manifest: Any, text: str) -> None:
    saved(tmp_path, 1, 2)
    file = tmp_path / "00000002-step-2" / "manifest.json"
    if manifest is None:
        file.unlink()
    else:
        file.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    step, (refused,) = step_loaded(tmp_path)
    assert step == 1
    assert refused.startswith(f"00000002-step-2 was refused: {text}")
    assert Checkpoints(tmp_path).latest == tmp_path / "00000001-step-1"


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "00000003-step-3" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "00000003-step-3" / "manifest.json")
    (tmp_path / "00000002-step-2" / "state.pt").unlink()
    (tmp_path / "00000002-step-2" / "state.pt").symlink_to("/dev/zero")
    step, refused = step_loaded(tmp_path)
    assert step == 1
    assert refused == [
        "00000003-step-3 was refused: it has no manifest.",
        "00000002-step-2 was refused: it has no state.pt.",
    ]


# A disk that does not take it


def test_a_disk_that_is_full_at_any_moment_leaves_the_others(tmp_path: Path) -> None:
    saved(tmp_path / "count", 1, 2)
    count = CountingDisk()
    hooked(Checkpoints, disk=count)(tmp_path / "count").save(state_of(3))
    for at in range(count.count):
        folder = tmp_path / str(at)
        saved(folder, 1, 2)
        before = names(folder)
        disk = FailingDisk(at)
        with pytest.raises(CheckpointError) as caught:
            hooked(Checkpoints, disk=disk)(folder).save(state_of(3))
        assert str(caught.value).startswith(f"the checkpoint of step 3 could not be written to {folder}: No space left")
        if disk.names[-1] == "sync_folder" and "rename" in disk.names:
            assert names(folder) == [*before, "00000003-step-3"]  # whole; only its name is not known to be durable
        else:
            assert names(folder) == before
            assert "training can go on, and 00000002-step-2 is still the newest. Free space" in str(caught.value)
        assert step_loaded(folder)[1] == []
        saved(folder, 4)
        assert step_loaded(folder) == (4, [])


def test_a_folder_that_is_a_file_or_forbidden(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"of step 3 could not be written to .*file: .*there is no earlier one"):
        Checkpoints(tmp_path / "file").save(state_of(3))
    with pytest.raises(CheckpointError, match="can't be listed: Not a directory"):
        Checkpoints(tmp_path / "file").load_latest()
    with pytest.raises(CheckpointError, match="could not be written"):
        Checkpoints(tmp_path / "file" / "below").save(state_of(3))

    class Forbidden(Disk):
        def make_folder(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(
        CheckpointError, match=r"step 3 could not be written to .*: Permission denied; training can go on"
    ):
        hooked(Checkpoints, disk=Forbidden())(tmp_path).save(state_of(3))


@pytest.mark.parametrize("limit", [100, 3000, 200_000])
def test_the_systems_own_refusal(tmp_path: Path, limit: int) -> None:
    """The kernel stops a file at a length: at once, while buffers are flushed, in the middle of a tensor."""
    saved(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"of step 2 could not be written to .*: File too large; training"):
            Checkpoints(tmp_path).save({"step": 2, "weights": [torch.ones(20_000)] * 3 + [torch.ones(90_000)]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["00000001-step-1"]
    assert step_loaded(tmp_path) == (1, [])


def test_an_interrupt_while_torch_writes_comes_through(tmp_path: Path) -> None:
    class Interrupted(CountingDisk):
        def before(self, name: str) -> None:
            super().before(name)
            if self.names.count("write") == 3:
                raise KeyboardInterrupt

    saved(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        hooked(Checkpoints, disk=Interrupted())(tmp_path).save(state_of(2))
    saved(tmp_path, 3)
    assert names(tmp_path) == ["00000001-step-1", "00000002-step-3"]


# Several processes


@pytest.mark.parametrize("alone", [False, True])
def test_without_locks_nothing_of_others_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    saved(tmp_path, 1)
    (tmp_path / ".saving-1-aa").mkdir()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    mine = Checkpoints(tmp_path, alone=alone)
    mine.save(state_of(2))
    mine.save(state_of(2))
    assert step_loaded(tmp_path) == (2, [])
    assert (tmp_path / ".saving-1-aa").exists()
    monkeypatch.undo()
    saved(tmp_path, 3)
    assert not (tmp_path / ".saving-1-aa").exists()


@pytest.mark.parametrize(("readable", "expected"), [((3, 3), 3), ((3, 2), 2), ((1, 3), 1), ((0, 0), None)])
def test_ranks_take_the_newest_that_all_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: tuple[int, int], expected: int | None
) -> None:
    """Rank 1 reads another copy of the folder; the ranks' meetings are played one after the other until they agree."""
    saved(tmp_path, 1, 2, 3)
    real = Checkpoints._newest

    def newest(self: Checkpoints, most: int | None) -> tuple[int, dict[str, Any] | None]:
        can = readable[0] if most is None else min(most, readable[0])
        return real(self, can) if can else (0, None)

    monkeypatch.setattr(Checkpoints, "_newest", newest)
    state = Checkpoints(tmp_path).load_latest(gather_with(readable[1]))
    assert (None if state is None else state["step"]) == expected


def gather_with(other: int) -> Callable[[Any], list[Any]]:
    """Return how rank 0 meets rank 1, which can read up to a checkpoint."""

    def gather(number: int) -> list[int]:
        nonlocal other
        met = [number, other]
        other = min(met)  # what rank 1 goes on to
        return met

    return gather


@pytest.mark.parametrize("other", [0, 1])
def test_a_folder_that_not_all_ranks_see_ends_no_training(tmp_path: Path, other: int) -> None:
    """It began anew without a word, and what it saved then removed the checkpoints that were there."""
    saved(tmp_path, *range(1, 5), keep=2)
    with pytest.raises(CheckpointError, match=rf"are 4 \(rank 0\), {other or None} \(rank 1\); mount the same"):
        Checkpoints(tmp_path, keep=2).load_latest(gather_with(other))
    assert len(names(tmp_path)) == 2


def saves_and_stays(folder: Path, told: Path) -> None:
    """Save into a folder of its own, and say so; in a process that is killed."""
    try:
        mine = Checkpoints(folder, alone=True)
        mine.save(state_of(1))
        told.touch()
        time.sleep(60)
    finally:
        os._exit(1)


def test_a_folder_is_one_trainings_until_its_process_ends(tmp_path: Path) -> None:
    """Between their saves two jobs shared it, and each removed what the other had saved."""
    mine = Checkpoints(tmp_path, alone=True)
    told = tmp_path / "told"
    other = os.fork()
    if other == 0:
        saves_and_stays(tmp_path, told)
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="another training is saved there: give each a folder"):
        mine.save(state_of(2))
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    mine.save(state_of(3))
    assert step_loaded(tmp_path) == (3, [])
    mine.release()
    mine.save(state_of(4))


def test_a_worker_that_outlives_its_loop_keeps_no_folder(tmp_path: Path) -> None:
    loop = os.fork()
    if loop == 0:
        try:
            mine = Checkpoints(tmp_path, alone=True)
            mine.save(state_of(1))
            if os.fork() == 0:
                (tmp_path / "new").write_text(str(os.getpid()))
                (tmp_path / "new").rename(tmp_path / "worker")
                time.sleep(60)
            while not (tmp_path / "worker").exists():  # by then it has given up what it inherited
                time.sleep(0.01)
        finally:
            os._exit(0)
    os.waitpid(loop, 0)
    Checkpoints(tmp_path, alone=True).save(state_of(2))
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)
