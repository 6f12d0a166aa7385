"""A folder of checkpoints is one training's: two models of a process never get each other's weights."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, startup
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.running import save_checkpoint
from accel.errors import CheckpointError, InvalidArgument


def begun(folder: Any, value: float, **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    data = TensorDataset(torch.ones(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return accel.optimize(
        model, DataLoader(data, 2), optimizer, elastic=accel.Elastic(checkpoint=folder, **options), cache=False
    )


def trained(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> None:
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("saves_first", [False, True])
def test_a_second_model_that_saves_into_the_folder_is_refused_at_its_call(tmp_path: Path, saves_first: bool) -> None:
    """It was given the weights of the first, and no checkpoint of its own was saved, or in its place."""
    first = begun(tmp_path / "one", 1.0)
    if saves_first:
        trained(*first)
        save_checkpoint(first[0])
    with pytest.raises(InvalidArgument, match="each model must have a folder of its own for its checkpoints, got "):
        begun(tmp_path / "one", 2.0)
    other = begun(tmp_path / "two", 2.0)
    trained(*first)
    trained(*other)
    for model, *_ in (first, other):
        save_checkpoint(model)
        accel.undo(model)
    assert begun(tmp_path / "one", 0.0)[0].weight[0, 0] == 1.0
    assert begun(tmp_path / "two", 0.0)[0].weight[0, 0] == 2.0


def test_what_was_refused_leaves_nothing_on(tmp_path: Path) -> None:
    first = begun(tmp_path, 1.0)
    before = list(entry.MODELS)
    with pytest.raises(InvalidArgument, match=r"accel\.undo with that model"):
        begun(tmp_path, 2.0, max_batch_size=4)
    assert list(entry.MODELS) == before
    trained(*first)
    save_checkpoint(first[0])
    accel.undo(first[0])
    assert begun(tmp_path, 2.0)[0].weight[0, 0] == 1.0


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_cell_that_is_run_again_goes_on(
    tmp_path: Path, trained_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models of one cell are refused there, too: the first has made no step."""
    monkeypatch.setattr(startup, "is_interactive", lambda: True)
    first = begun(tmp_path, 1.0)
    if not trained_before:
        with pytest.raises(InvalidArgument):
            begun(tmp_path, 2.0)
        return
    trained(*first)
    save_checkpoint(first[0])
    assert begun(tmp_path, 2.0)[0].weight[0, 0] == 1.0
    assert entry.optimized(first[0]) is None


PATHS: dict[str, Callable[[Path], Path]] = {
    "link": lambda folder: folder.parent / "link",
    "dots": lambda folder: folder / ".." / folder.name,
    "relative": lambda folder: Path(os.path.relpath(folder)),
}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_other_paths_lead_to_the_same_folder(tmp_path: Path, path: str, exists: bool) -> None:
    folder = tmp_path / "one"
    (tmp_path / "link").symlink_to(folder)
    first = Checkpoints(folder, alone=True)
    if exists:
        first.save({"step": 1})
    with pytest.raises(InvalidArgument, match="a folder of its own"):
        Checkpoints(PATHS[path](folder), alone=True)


def test_two_paths_of_a_folder_that_is_made_later_are_told_apart_at_the_first_save(tmp_path: Path) -> None:
    """As of a file system that is mounted twice."""
    one, other = (Checkpoints(tmp_path / name, alone=True) for name in ("one", "other"))
    one.save({"step": 1})
    (tmp_path / "other").symlink_to(tmp_path / "one")
    with pytest.raises(CheckpointError, match="another training is saved there"):
        other.save({"step": 2})
    assert one.latest is not None
    assert one.latest.name == "00000001-step-1"


def test_a_process_that_is_forked_lets_go_of_no_file_but_the_owner_s(tmp_path: Path) -> None:
    """The number of the file that it has closed may be another one's by then."""
    mine = Checkpoints(tmp_path, alone=True)
    mine.save({"step": 1})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            handles = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
            mine.release()
            for handle in handles:
                os.fstat(handle)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert is_locked(tmp_path)


@given(st.lists(st.tuples(st.sampled_from(["begin", "save", "release", "copy"]), st.integers(0, 2)), max_size=30))
def test_whatever_others_do_a_folder_is_its_owner_s(events: list[tuple[str, int]]) -> None:
    """One begins at a time, one saves at a time, and nothing that others do lets a third one in."""
    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name) / "one", dict[int, Checkpoints]()
        owner: int | None = None
        saves: int | None = None
        for event, number in events:
            if event == "begin" and number not in made:
                if owner is None:
                    made[number], owner = Checkpoints(folder, alone=True), number
                else:
                    with pytest.raises(InvalidArgument):
                        Checkpoints(folder, alone=True)
            elif event == "save" and number in made:
                if saves in (None, number):
                    made[number].save({"step": 1})
                    saves = number
                else:
                    with pytest.raises(CheckpointError, match="another training is saved there"):
                        made[number].save({"step": 2})
            elif event == "release" and number in made:
                made[number].release()
                owner, saves = (None if each == number else each for each in (owner, saves))
            elif event == "copy" and folder.exists():
                shutil.copytree(folder, Path(name) / "copy", dirs_exist_ok=True)
            assert is_locked(folder) == (saves is not None)
        for each in made.values():
            each.release()


def is_locked(folder: Path) -> bool:
    """Return whether others would be kept out."""
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
