"""The line that an operator comes from, as torch's own tracer of Python sees it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from accel.profiler.trace.kineto import full_path, users_lines


@pytest.fixture(autouse=True)
def _own_profile_function() -> Iterator[None]:
    # The tracer takes the thread's profile function, and leaves none behind; a coverage tool may need it.
    before = sys.getprofile()
    yield
    sys.setprofile(before)


def lines(run: Callable[[], object], operator: str) -> list[tuple[str, int]]:
    """Return file and line, from the start of `run`, of each call of an operator."""
    with profile(use_kineto=True, with_stack=True) as traced:
        run()
    wanted = [event.correlation_id() for event in traced.kineto_results.events() if event.name() == operator]
    places = users_lines(traced.kineto_results.experimental_event_tree(), wanted, is_file=lambda file: file == __file__)
    first = inspect.getsourcelines(run)[1]
    return [(Path(file).name, line - first) for file, line in (places.get((True, id), ("", 0)) for id in wanted)]


def test_a_methods_call_has_its_own_line() -> None:
    def run() -> None:
        loss = torch.ones(3).sum()
        torch.relu(loss)
        loss.item()

    assert lines(run, "aten::item") == [("test_stacks.py", 3)]


def test_a_modules_operators_have_the_line_that_called_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def run() -> None:
        batch = torch.ones(2, 3)
        model(batch)

    assert lines(run, "aten::relu") == [("test_stacks.py", 2)]


def test_a_conversion_has_the_last_line_that_was_seen() -> None:
    def run() -> None:
        loss = torch.ones(3).sum()
        float(loss)  # goes through a slot, which the tracer does not see

    def nothing_before(loss: torch.Tensor) -> bool:
        return loss > 1  # type: ignore[return-value]

    assert lines(run, "aten::item") == [("test_stacks.py", 1)]
    assert lines(lambda: bool(nothing_before(torch.ones(()))), "aten::is_nonzero")[0][0] == "test_stacks.py"


def test_a_loop_has_the_line_of_each_turn() -> None:
    def run() -> None:
        for i in range(2):
            torch.ones(3).sum().item()
            if i:
                torch.ones(2).max().item()

    assert [line for _, line in lines(run, "aten::item")] == [2, 2, 4]


def test_what_no_file_of_the_users_called_has_no_place() -> None:
    with profile(use_kineto=True, with_stack=True) as traced:
        torch.ones(3).sum().item()
    wanted = [event.correlation_id() for event in traced.kineto_results.events()]

    assert users_lines(traced.kineto_results.experimental_event_tree(), wanted, is_file=lambda _: False) == {}


def test_a_path_that_kineto_cut_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "script.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    full_path.cache_clear()

    assert full_path("package/script.py") == str(tmp_path / "package" / "script.py")
    assert full_path("package/missing.py") == "package/missing.py"
    assert full_path("<string>") == "<string>"
    assert full_path("/a/script.py") == "/a/script.py"
