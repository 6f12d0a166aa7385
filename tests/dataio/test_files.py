"""The files that a dataset names are looked at in turn, and what was written since is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel.dataio.passes import kept_samples
from accel.dataio.passes.kept_samples import NamedFiles


class Listed:
    def __init__(self, folder: Path, number: int) -> None:
        self.paths = [str(folder / f"{place}.txt") for place in range(number)]
        for path in self.paths:
            Path(path).write_text("a")


def test_on_slow_storage_all_are_looked_at_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all of a hundred thousand would keep the loop waiting for minutes, each epoch."""
    monkeypatch.setattr(kept_samples, "_FILES_LEAST", 4)
    monkeypatch.setattr(kept_samples, "_FILES_S", -1.0)
    data = Listed(tmp_path, 40)
    named = NamedFiles(data)
    assert not any(named.changed() for _ in range(10))
    Path(data.paths[17]).write_text("other")
    assert [named.changed() for _ in range(20)].count(True) == 1


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("other")])
def test_what_is_written_or_removed_is_seen_at_once_where_there_is_time(tmp_path: Path, change: Any) -> None:
    data = Listed(tmp_path, 40)
    named = NamedFiles([data, "no file.txt"])
    assert not named.changed()
    change(Path(data.paths[-1]))
    assert named.changed()
    assert not named.changed()
