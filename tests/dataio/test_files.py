"""Files that a dataset names are looked at in turn, so many at a time as take a moment."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from accel.dataio.dataset import files
from accel.dataio.dataset.files import NamedFiles


class Listed:
    def __init__(self, folder: Path, number: int) -> None:
        self.paths = [str(folder / f"{place}.txt") for place in range(number)]
        for path in self.paths:
            Path(path).write_text("a")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were looked at."""
    seen: list[str] = []
    look = files._written

    def written(path: str) -> Any:
        seen.append(path)
        return look(path)

    monkeypatch.setattr(files, "_written", written)
    return seen


def slow_clock() -> Any:
    """Return a clock by which each look takes 20 ms."""
    return map(lambda count: 0.02 * count, itertools.count()).__next__


def test_on_slow_storage_all_are_looked_at_in_turn(
    tmp_path: Path, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at all of a hundred thousand would keep the loop waiting for minutes, each epoch."""
    monkeypatch.setattr(files, "_LEAST", 4)
    data = Listed(tmp_path, 40)
    named = NamedFiles(data, slow_clock())
    for _ in range(20):
        assert not named.changed()
    assert set(looks) == set(data.paths)
    assert 4 * 21 <= len(looks) <= 8 * 21

    Path(data.paths[17]).write_text("other")
    assert sum(named.changed() for _ in range(20)) == 1


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("other")])
def test_what_is_written_or_removed_is_seen_at_once_where_there_is_time(tmp_path: Path, change: Any) -> None:
    data = Listed(tmp_path, 40)
    named = NamedFiles([data, "no file.txt"])
    assert not named.changed()
    change(Path(data.paths[-1]))
    assert named.changed()
    assert not named.changed()
