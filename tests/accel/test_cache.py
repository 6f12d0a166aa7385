"""The cache folder: what stands in it is read with suspicion and written whole, by several processes at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.cache import folder as folder_module
from accel.cache.folder import MOST_BYTES, MOST_FILES, NoFolder, cache_folder, file_name, write_file
from accel.cache.remembered_plans import RememberedPlans, conditions
from accel.run import Run
from accel.run.gate import Gate
from accel.search.remembered import RememberedSearch
from tests.accel.loops import Net, make_loader

KEY = {"model": "Net", "batch": "(8, 6)"}
SEARCH = RememberedSearch(
    searched="2026-11-20T12:00:00+00:00",
    plan={"loader_workers": "threads=2", "channels_last": None, "quick": 3},
    speedup=1.25,
    lost={"slow": "0.90x, slower"},
    run_s=60.0,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CACHE", str(tmp_path / "cache"))


def plans(key: dict[str, Any] = KEY) -> RememberedPlans:
    return RememberedPlans(lambda: key)


def stored(key: dict[str, Any] = KEY, search: RememberedSearch = SEARCH) -> Path:
    """Store a result and return its file."""
    memory = plans(key)
    assert memory.recall() is None
    memory.store(search)
    return Path(memory.note)


# -- the folder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"ACCEL_CACHE": "/some/where"}, "/some/where"),
        ({"ACCEL_CACHE": "~/there"}, "HOME/there"),
        ({"ACCEL_CACHE": "here"}, "CWD/here"),
        ({"ACCEL_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/accel"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/accel"),
        ({"XDG_CACHE_HOME": "relative"}, "HOME/.cache/accel"),
        ({"ACCEL_CACHE": "1"}, "HOME/.cache/accel"),
        ({}, "HOME/.cache/accel"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the custom of Linux")
def test_where_the_folder_is(
    variables: dict[str, str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == wanted.replace("HOME", str(tmp_path)).replace("CWD", os.getcwd())


def test_the_folder_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CACHE", "0")
    with pytest.raises(NoFolder):
        cache_folder()
    memory = plans()
    assert memory.recall() is None
    memory.store(SEARCH)
    assert memory.note == ""


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ACCEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    memory = plans()
    assert memory.recall() is None
    assert "Could not determine home directory.; ACCEL_CACHE=FOLDER names one" in memory.note


def test_the_oldest_files_go_and_nothing_that_is_not_ours(tmp_path: Path) -> None:
    foreign = [tmp_path / name for name in ("notes.json", "Net-1.json", ".Net.tmp", "plan-0123456789abcdef.json")]
    names = [file_name("Net", f"{number:024x}") for number in range(MOST_FILES + 3)]
    for path in foreign:
        path.write_text("x", encoding="utf-8")
        os.utime(path, (0, 0))
    for age, name in enumerate(reversed(names)):
        (tmp_path / name).write_text("{}", encoding="utf-8")
        os.utime(tmp_path / name, (time.time() - 1e4 * age,) * 2)

    newest = file_name("Net", "f" * 24)
    write_file(tmp_path / newest, "{}")

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {path.name for path in foreign} | set(names[4:]) | {newest}


def test_a_title_of_any_kind_makes_a_file_name() -> None:
    for title in ("Net", "../../etc/passwd", "Ünïcode\0/\n", "", "x" * 300):
        name = file_name(title, "0" * 64)
        assert folder_module._OWN_NAME.fullmatch(name)


# -- one file ----------------------------------------------------------------------------------------------------------


def test_what_is_stored_comes_back_and_can_be_read_by_people() -> None:
    path = stored()
    assert path.parent.name == "plans"
    assert path.name.startswith("Net-")
    assert plans().recall() == SEARCH
    assert list(plans().recall().plan) == list(SEARCH.plan)  # type: ignore[union-attr]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["conditions"] == KEY
    assert "Delete it" in content["what"]
    assert len(path.read_text(encoding="utf-8").splitlines()) > 10


def test_another_kind_of_run_has_another_file() -> None:
    stored()
    assert plans({**KEY, "batch": "(16, 6)"}).recall() is None


def test_a_file_that_is_deleted_is_forgotten() -> None:
    path = stored()
    path.unlink()
    assert plans().recall() is None
    memory = plans()
    stored()
    assert memory.recall() == SEARCH
    memory.forget()
    memory.forget()
    assert plans().recall() is None


def change(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {**content, **fields}


def change_found(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {**content, "found": {**content["found"], **fields}}


@pytest.mark.parametrize(
    "spoil",
    [
        change(schema=1),
        change(schema=None),
        change(conditions={"model": "Other"}),
        change(found=None),
        change(found=[]),
        change_found(plan=[]),
        change_found(plan="quick"),
        change_found(searched="yesterday"),
        change_found(searched="0001-01-01T00:00:00"),
        change_found(searched="0001-01-01T00:00:00+01:00"),
        change_found(searched=5),
        change_found(speedup=float("nan")),
        change_found(speedup=float("inf")),
        change_found(run_s=-1),
        change_found(lost=["slow"]),
        change_found(lost={"slow": 0.9}),
        change_found(cost_s={"torch_compile": "soon"}),
        change_found(cost_s={"torch_compile": -1.0}),
        change_found(command="rm"),
        lambda content: [content],
        lambda content: None,
    ],
)
def test_a_file_that_holds_something_else_is_passed_over(spoil: Callable[[Any], Any]) -> None:
    path = stored()
    path.write_text(json.dumps(spoil(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    memory = plans()
    assert memory.recall() is None
    assert "is passed over: " in memory.note
    memory.store(SEARCH)
    assert plans().recall() == SEARCH


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"schema": 1', b" " * (MOST_BYTES + 1), b"\0" * 100]
)
def test_a_file_that_is_no_json_is_passed_over(content: bytes) -> None:
    path = stored()
    path.write_bytes(content)
    memory = plans()
    assert memory.recall() is None
    assert "is passed over: " in memory.note


def test_a_truncated_file_is_passed_over() -> None:
    path = stored()
    whole = path.read_bytes()
    for length in range(0, len(whole) - 3, 7):
        path.write_bytes(whole[:length])
        assert plans().recall() is None


def test_what_was_passed_over_is_still_told_once_the_file_is_written_anew() -> None:
    path = stored()
    path.write_text("{", encoding="utf-8")
    memory = plans()
    memory.recall()
    memory.store(SEARCH)
    assert memory.note.startswith(f"{path}; what it held before is passed over: ")
    again = plans()
    again.recall()
    again.store(SEARCH)
    assert again.note == str(path)


def test_a_link_in_its_place_is_replaced_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    """Where several users share the folder, one could have another's file overwritten."""
    path, other = stored(), tmp_path / "profile"
    other.write_text("precious", encoding="utf-8")
    path.unlink()
    path.symlink_to(other)
    memory = plans()
    memory.recall()
    memory.store(SEARCH)
    assert other.read_text(encoding="utf-8") == "precious"
    assert not path.is_symlink()
    assert plans().recall() == SEARCH


def test_a_folder_that_cannot_be_written_is_told_and_nothing_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("ACCEL_CACHE", str(blocked))
    memory = plans()
    assert memory.recall() is None
    memory.store(SEARCH)
    memory.begin_check()
    memory.forget()
    assert memory.note.startswith(f"nothing is remembered: {blocked}")
    assert "can't be written" in memory.note


def test_a_setting_that_json_does_not_know_is_told() -> None:
    memory = plans()
    memory.recall()
    memory.store(RememberedSearch(searched=SEARCH.searched, plan={"own": object()}))
    assert "can't be written: " in memory.note


def test_conditions_that_cannot_be_told_are_no_error() -> None:
    memory = RememberedPlans(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert memory.recall() is None
    memory.store(SEARCH)
    memory.begin_check()
    assert "ZeroDivisionError" in memory.note


# -- several processes -------------------------------------------------------------------------------------------------


def _store_many(number: int) -> bool:
    whole = True
    for turn in range(30):
        memory = plans()
        search = memory.recall()
        whole &= "passed over" not in memory.note and (search is None or len(search.plan) == 200)
        memory.store(
            RememberedSearch(searched=SEARCH.searched, plan={f"s{n}": [number, turn] for n in range(200)}, run_s=1.0)
        )
    return whole


def test_several_processes_never_see_half_a_file() -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_store_many, range(3)) == [True] * 3
    folder = Path(os.environ["ACCEL_CACHE"]) / "plans"
    assert len(list(folder.iterdir())) == 1


def _checks_and_dies(number: int) -> None:
    from accel.cache import remembered_plans

    remembered_plans._PROCESS = "another"
    memory = plans()
    memory.recall()
    memory.begin_check()
    os._exit(1)


def test_a_check_in_which_a_process_died_is_seen() -> None:
    stored()
    memory = plans()
    memory.recall()
    memory.begin_check()
    again = plans()
    assert again.recall() == SEARCH
    assert again.interrupted == ""  # this process checks it: a fold of a cross validation, say

    process = multiprocessing.get_context("fork").Process(target=_checks_and_dies, args=(0,))
    process.start()
    process.join()
    assert again.recall() == SEARCH
    assert again.interrupted == "the last run that checked it was killed"
    again.store(SEARCH)
    assert plans().recall() == SEARCH
    assert again.recall() is not None
    assert again.interrupted == ""


@pytest.mark.parametrize(
    ("checking", "is_interrupted"),
    [
        ({"host": "elsewhere", "process": 10**7}, False),  # may well run there
        ({"process": 10**9}, True),
        ({"process": 10**30}, True),
        ({"process": 1}, False),  # runs, whoever it belongs to
        ({"process": "1"}, False),
        ({"process": -1}, False),
        ({}, False),
        ("something else", False),
        (None, False),
    ],
)
def test_which_checks_count_as_interrupted(checking: Any, is_interrupted: bool) -> None:
    import platform

    path = stored()
    content = json.loads(path.read_text(encoding="utf-8"))
    content["checking"] = {"host": platform.node(), **checking} if isinstance(checking, dict) else checking
    path.write_text(json.dumps(content), encoding="utf-8")
    memory = plans()
    assert memory.recall() == SEARCH
    assert bool(memory.interrupted) == is_interrupted


# -- conditions --------------------------------------------------------------------------------------------------------


def conditions_of(model: nn.Module | None = None, loader: Any = None, **changes: Any) -> dict[str, Any]:
    model = model or Net()
    optimizer = changes.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    run = Run(model, loader or make_loader(), [optimizer], Gate(model, []), None)  # type: ignore[arg-type]
    run.observed.batch = changes.pop("batch", ((8, 6), (8,)))
    run.observed.input_dtypes = changes.pop("dtypes", {"torch.float32"})
    run.cores, run.threads = changes.pop("cores", 2), 1
    run.world_size = changes.pop("ranks", 1)
    return conditions(run, {"allow": changes.pop("allow", "exact"), **changes})


def frozen() -> Net:
    model = Net()
    model.head.weight.requires_grad_(False)
    return model


class Other(Net):
    pass


def test_equal_runs_have_equal_conditions() -> None:
    one = conditions_of()
    assert one == conditions_of()
    assert json.loads(json.dumps(one)) == one
    for name in ("device", "cores", "python", "torch", "accel", "ranks", "loader_workers"):
        assert one[name] not in ("", None)


def test_a_batch_that_is_chosen_while_training_is_none_of_the_conditions() -> None:
    """The search began at 45 samples in one run and at 64 in the next, which then knew nothing."""
    shapes = [((torch.Size([n, 6]), torch.Size([n]), torch.Size([]))) for n in (45, 64)]
    one, other = (conditions_of(batch=shape, max_batch_size=256) for shape in shapes)
    assert one == other and one["batch"] == "(('*', 6), ('*',), ())"
    assert one != conditions_of(batch=((torch.Size([64, 7]), torch.Size([64]), torch.Size([]))), max_batch_size=256)
    assert conditions_of(batch=shapes[0]) != conditions_of(batch=shapes[1])


@pytest.mark.parametrize(
    "changed",
    [
        lambda: conditions_of(Other()),
        lambda: conditions_of(Net().double()),
        lambda: conditions_of(frozen()),
        lambda: conditions_of(nn.Conv2d(3, 4, 3, stride=2)),
        lambda: conditions_of(loader=make_loader(num_workers=1)),
        lambda: conditions_of(loader=[1, 2]),
        lambda: conditions_of(batch=((16, 6), (16,))),
        lambda: conditions_of(dtypes={"torch.float64"}),
        lambda: conditions_of(optimizer=torch.optim.Adam),
        lambda: conditions_of(allow="reduced"),
        lambda: conditions_of(cores=4),
        lambda: conditions_of(ranks=2),
    ],
)
def test_what_a_plan_depends_on_tells_runs_apart(changed: Callable[[], dict[str, Any]]) -> None:
    assert changed() != conditions_of()
    strided, plain = conditions_of(nn.Conv2d(3, 4, 3, stride=2)), conditions_of(nn.Conv2d(3, 4, 3))
    assert strided != plain
