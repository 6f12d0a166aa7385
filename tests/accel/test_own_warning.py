"""What accel warns of goes to stderr where warnings are made errors: the user's loop goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

import accel
from accel import entry
from accel.profiler.stderr import warn
from tests.accel.loops import loss_of, make


def fail() -> None:
    raise OSError("lost")


def test_a_failure_of_accel_s_own_ends_no_loop_whose_warnings_are_errors(
    only_quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loader, optimizer = accel.optimize(*make())
    session = entry.MODELS[model].session
    failing: Callable[[], None] = fail
    monkeypatch.setattr(session.runner, "_boundary", failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, target in loader:
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
    assert session.failed == "OSError: lost"
    assert "accel stopped and left the loop as it was: OSError: lost" in capsys.readouterr().err


def test_a_warning_is_one_of_the_caller_s_line() -> None:
    with pytest.warns(RuntimeWarning, match="^slow$") as caught:
        warn("slow", stacklevel=1)
    assert caught[0].filename == __file__
