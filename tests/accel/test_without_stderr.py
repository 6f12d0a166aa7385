"""What is said on stderr ends no run that has none, has closed it, or whose reader is gone."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.commands.script_job import say
from accel.profiler import stderr
from accel.session.journal import Announcer
from tests import warm


class Gone(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("Broken pipe")


class WritesOnly:
    """What some loggers put in place of stderr."""

    def write(self, text: str) -> int:
        return len(text)


class Broken(io.StringIO):
    """A stream whose owner has a fault."""

    def write(self, text: str) -> int:
        raise RuntimeError("no console")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [None, closed(), Gone(), WritesOnly(), Broken()],
    ids=["none", "closed", "broken pipe", "without flush", "broken"],
)
def test_a_line_goes_nowhere(stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    stderr.write("a line")
    Announcer().say("another one")
    say("a command's")
    assert capsys.readouterr().out == ""


SCRIPT = """
import sys
{leaves}
import os
import accel, torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, loader, optimizer = accel.optimize(model, loader, optimizer, cache=False, report={report!r}, budget="0.2s")
os.mkdir({report!r})
steps = 0
while steps < 200:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        steps += 1
accel.undo(model)
print("trained")
"""


@pytest.mark.parametrize("leaves", ["sys.stderr = None", "sys.stderr.close()"])
def test_a_whole_run_goes_on_and_writes_nothing_to_stdout(tmp_path: Path, leaves: str) -> None:
    """Its report can't be written either, of which there is a line, too."""
    (tmp_path / "script.py").write_text(SCRIPT.format(leaves=leaves, report=str(tmp_path / "report.json")))
    done = warm.run(["script.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
