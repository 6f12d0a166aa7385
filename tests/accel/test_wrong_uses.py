"""Wrong uses that people make: each is refused at once, with what must hold, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn

import accel
from accel import entry
from accel.commands.cli import main
from accel.errors import AccelError
from tests.accel.loops import Net, advance, make, training

model, loader, optimizer = make()


@pytest.mark.parametrize(
    ("use", "invariant", "value", "remedy"),
    [
        (lambda: accel.optimize([model, Net()], loader), "model must be a torch.nn.Module", "a list", "for each"),
        (lambda: accel.optimize(model.parameters(), loader), "a torch.nn.Module", "a generator", "pass the module"),
        (lambda: accel.optimize(model, "train"), "an iterable of batches", "a str", "pass the DataLoader"),
        (lambda: accel.optimize(model, {"train": loader}), "an iterable of batches", "a dict", "pass the DataLoader"),
        (lambda: accel.optimize(model, loader, loader), "a torch.optim.Optimizer", "a DataLoader", "leave it out"),
        (lambda: accel.optimize(nn.Linear(2, 2), loader, optimizer), "parameters of the model", "none of", "make it"),
        (lambda: accel.optimize(model, loader, budget="10 minutes"), "a time or a share", "'10 minutes'", '"2m"'),
        (lambda: accel.optimize(model, loader, budget="1:30"), "a time or a share", "'1:30'", '"90s"'),
        (lambda: accel.optimize(model, loader, report=3), "report must be a path", "got 3", "None for"),
        (lambda: accel.optimize(model, loader, report=__file__ + "/a.json"), "a folder, a .json", "a.json", "another"),
        (lambda: accel.optimize(model, loader, report="run.txt"), "a folder, a .json or a .html", "run.txt", "another"),
        (lambda: accel.optimize(model, loader, cache="runs"), "True or False", "'runs'", "ACCEL_CACHE=FOLDER"),
        (lambda: accel.optimize(model, loader, steps=9, epochs=1), "be given once", "steps=9 and epochs=1", "once"),
        (lambda: accel.explain(Net()), "passed to accel.optimize", "Net", "Pass the object"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_with_invariant_value_and_remedy(
    use: Callable[[], Any], invariant: str, value: str, remedy: str
) -> None:
    with pytest.raises(AccelError) as caught:
        use()
    assert all(part in str(caught.value) for part in (invariant, value, remedy)), caught.value
    assert entry.optimized(model) is None


@pytest.mark.parametrize(
    ("arguments", "invariant", "value", "remedy"),
    [
        ("run gone.py", "must be a Python file", "'gone.py', which is not there", "-m takes a module name"),
        ("run .", "must be a Python file", "'.', which is a folder", "use -m"),
        ("run --epochs 3 train.py", "must be a Python file", "'--epochs', which is no option", "go after it"),
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
    (tmp_path / "train.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments.split(), prog_name="accel")
    assert done.exit_code == 2 and "ran" not in done.stdout
    assert all(part in done.stderr for part in (invariant, value, remedy)), done.stderr


def test_an_iterator_that_is_exhausted_is_named_when_the_run_ends(
    only_quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own, batches, stepped = make()
    iterator = iter(batches)
    list(iterator)
    _, loop, _ = accel.optimize(own, iterator, stepped, budget=60)
    assert list(loop) == []
    entry._at_exit()
    told = capsys.readouterr().err
    assert "no training step of Net was seen; iterate the loader that optimize returned" in told


def test_a_loader_passed_twice_is_the_same_loader(only_quick: None) -> None:
    own, batches, stepped = make()
    _, once, _ = accel.optimize(own, batches, stepped, budget=60)
    assert accel.optimize(own, once, stepped, budget=60)[1] is once
    advance(training(own, once, stepped), 2)
    accel.undo(own)
