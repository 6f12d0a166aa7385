"""Commands that people mistype: each is refused at once, with what must hold, what was found, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import accel
from accel.commands.cli import main


@pytest.mark.parametrize(
    ("arguments", "invariant", "value", "remedy"),
    [
        ("run gone.py", "must be a Python file", "'gone.py', which is not there", "-m takes a module name"),
        ("run .", "must be a Python file", "'.', which is a folder", "use -m"),
        ("run python train.py", "must be a Python file", "'python', which is not there", "without python or torchrun"),
        ("profile -m train.py", "-m takes a module's name", "'train.py', a file's name", "leave out -m, or '.py'"),
        ("run train.ipynb", "must be Python source", "'train.ipynb'", "call accel.optimize in the notebook"),
        ("profile train.sh", "must be Python source", "'train.sh'", "before the script that it starts"),
        ("run --epochs 3 train.py", "must be a Python file", "'--epochs', which is no option", "go after it"),
        ("run --alow=exact train.py", "must be a Python file", "'--alow=exact'", "did you mean --allow?"),
        ("run --nproc 0 train.py", "not in the range x>=1", "'--nproc': 0", "accel run --help"),
        ("run --allow bf16 train.py", "--allow must be one of 'exact'", "'bf16'", "did you mean 'reduced'?"),
        ("run --enable compile train.py", "an unknown strategy", "'compile'", "did you mean 'torch_compile'?"),
        ("run --enable tf32 --disable tf32 train.py", "--enable and --disable", "tf32", "keep it in one"),
        ("run --budget soon train.py", "must be a time or a share", "'soon'", '"90s"'),
        ("run --until 5x train.py", "--until must be a time", "'5x'", "such as '90s'"),
        ("run --patch no/out.diff train.py", "must lie in a directory that exists", "'no/out.diff'", "make it first"),
        ("run --report run.log train.py", "a folder, a .json or a .html file", "run.log'", "name another one"),
        ("profile --report a.html train.py", "a folder or a .json file", "'a.html'", "is written beside that"),
        ("report none.json", "can't be read as a report", "none.json", "Make one with"),
        ("runn train.py", "No such command", "'runn'", "Did you mean `accel run`?"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_refused_with_invariant_value_and_remedy(
    arguments: str, invariant: str, value: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.py", "train.ipynb", "train.sh"):
        (tmp_path / name).write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments.split(), prog_name="accel")
    assert done.exit_code == 2 and "ran" not in done.stdout
    assert all(part in done.stderr for part in (invariant, value, remedy)), done.stderr


@pytest.mark.parametrize("value", ["off", "false", "no"])
def test_accel_is_off_by_each_word_for_it(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL", value)
    done = CliRunner().invoke(main, ["run", "train.py"], prog_name="accel")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "ran\n", "")
    model, loader = nn.Linear(1, 1), [torch.ones(1)]
    assert accel.optimize(model, loader) == (model, loader)
    assert accel.entry.optimized(model) is None


def test_the_place_of_a_report_can_be_read_back(tmp_path: Path) -> None:
    report = accel.Report(state="done", model="Net", plain_ms=8.0, accel_ms=4.0)
    report.save(tmp_path / "report.json")
    for command, word in (
        (["report", str(tmp_path)], "Net"),
        (["compare", str(tmp_path), str(tmp_path)], "no regression"),
    ):
        done = CliRunner().invoke(main, command, prog_name="accel")
        assert done.exit_code == 0 and word in done.stdout, done.stderr
