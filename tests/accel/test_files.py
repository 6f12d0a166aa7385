"""Files are written whole, and only files are replaced."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from accel.errors import InvalidArgument
from accel.files import check_folder, check_report, write_atomic


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    """As does a device: root could replace /dev/null by a report."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, "Zeile ä\n")
        assert os.read(reader, 100).decode() == "Zeile ä\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_file_is_as_readable_as_any_and_the_umask_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set for an instant, it is that of another thread's files too."""
    before = os.umask(0o027)
    set_to: list[int] = []
    try:
        if sys.platform == "linux":
            monkeypatch.setattr(os, "umask", lambda mask: set_to.append(mask) or before)
        write_atomic(tmp_path / "file", "text")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert set_to == []


def test_a_file_system_without_permissions_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, mode: int) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    write_atomic(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_name_may_be_as_long_as_the_file_system_takes_it(tmp_path: Path) -> None:
    target = tmp_path / ("ä" * 125 + ".json")  # 255 bytes
    write_atomic(target, "text")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert target.read_text() == "text"


def test_a_place_of_which_nothing_can_be_told_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (tmp_path / ("x" * 300), tmp_path / "loop"):
        with pytest.raises(InvalidArgument, match=r"^--json must be a place that can be written, got .*; name another"):
            check_report("--json", place)
    with pytest.raises(InvalidArgument, match="--json must lie in a directory that exists"):
        check_folder("--json", tmp_path / ("x" * 300) / "report.json")
