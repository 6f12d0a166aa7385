"""The command line: exit statuses, one-line errors, and no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from accel import __version__
from accel.commands.cli import main
from accel.report import Report
from tests.accel import profile_reports

ROOT = Path(__file__).parents[2]
_NODE = '{"name": "part", "ms": 1, "share": 1, "children": ['
_NODES = f'{{"kind": "profile", "schema": 2, "evidence": {_NODE * 400}{"]}" * 400}}}'


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _save(path: Path, accel_ms: float | None) -> Path:
    speedup = None if accel_ms is None else 20.0 / accel_ms
    Report(state="done", plain_ms=20.0, accel_ms=accel_ms, speedup=speedup, plan={"x": {}}).save(path)
    return path


@pytest.mark.parametrize(("command", "expands"), [("run", False), ("profile", False), ("compare", True)])
def test_only_accel_s_own_arguments_are_expanded_on_windows(
    monkeypatch: pytest.MonkeyPatch, command: str, expands: bool
) -> None:
    """Where no shell does so, click does: a script would get other arguments than were typed."""
    seen: list[bool] = []
    monkeypatch.setattr(
        click.Group, "main", lambda self, *args, windows_expand_args=True, **kwargs: seen.append(windows_expand_args)
    )
    monkeypatch.setattr(sys, "argv", ["accel", command, "own.py", "*.txt"])
    main.prepared(prog_name="accel")
    assert seen == [expands]


def test_report_prints_the_terminal_report_and_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.htm"
    for path, verdict in (
        (_save(tmp_path / "a.json", 10.0), "2.00x: 20 → 10 ms per step"),
        (_profile(tmp_path / "b.json"), "input-bound: reading files takes 67 % of the step"),
    ):
        result = _run("report", path, "--html", page)
        assert result.exit_code == 0
        assert verdict in result.stdout.splitlines()[0] and "\x1b" not in result.stdout
        assert f"<h1>{verdict}" in page.read_text(encoding="utf-8")
        assert result.stderr == f"wrote {page}\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("a.json", "--html must name another file"),
        ("folder", "can't be written"),
        ("out/page.html", "--html must lie in a directory that exists"),
        ("a.json/page.html", "--html must lie in a directory that exists"),
    ],
)
def test_a_page_that_has_no_place_is_an_error(tmp_path: Path, page: str, message: str) -> None:
    path = _save(tmp_path / "a.json", 10.0)
    (tmp_path / "folder").mkdir()
    result = _run("report", path, "--html", tmp_path / page)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "folder"]
    assert Report.load(path).accel_ms == 10.0


@pytest.mark.parametrize(
    ("new_ms", "options", "status", "verdict"),
    [
        (10.0, (), 0, "no regression"),
        (10.4, (), 0, "no regression"),
        (10.6, (), 1, "regression"),
        (10.6, ("--threshold", "7%"), 0, "no regression"),
        (10.6, ("--threshold", "0.07"), 0, "no regression"),
        (10.6, ("--threshold", " 5.5 % "), 1, "regression"),
        (10.1, ("--threshold", "0"), 1, "regression"),
        (19.0, ("--threshold", "100%"), 0, "no regression"),
    ],
)
def test_compare_exit_status(
    tmp_path: Path, new_ms: float, options: tuple[str, ...], status: int, verdict: str
) -> None:
    old, new = _save(tmp_path / "a.json", 10.0), _save(tmp_path / "b.json", new_ms)
    result = _run("compare", old, new, *options)
    assert result.exit_code == status
    assert result.stdout.startswith(f"{verdict}: 10 → ")


@pytest.mark.parametrize("threshold", ["5", "1", "-1", "five", "", "nan", "5%%", "1e-2"])
def test_threshold_that_could_be_misread_is_refused(tmp_path: Path, threshold: str) -> None:
    path = _save(tmp_path / "a.json", 10.0)
    result = _run("compare", path, path, f"--threshold={threshold}")
    assert result.exit_code == 2
    assert f"e.g. 5% or 0.05. Found: '{threshold}'" in result.stderr


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize("content", [None, "{", '{"schema": 99}'], ids=["missing", "corrupt", "other schema"])
def test_unusable_file_is_one_line_on_stderr(tmp_path: Path, command: str, content: str | None) -> None:
    path = tmp_path / "two\nlines.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = _run(command, path, *([path] if command == "compare" else []))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def _profile(path: Path, **fields: object) -> Path:
    path.write_text(profile_reports.full(**fields).to_json(), encoding="utf-8")
    return path


@pytest.mark.parametrize("profile_first", [True, False])
def test_reports_of_two_kinds_are_not_compared(tmp_path: Path, profile_first: bool) -> None:
    paths = [_profile(tmp_path / "a.json"), _save(tmp_path / "b.json", 10.0)]
    kinds = ["accel profile", "accel.optimize"]
    order = slice(None, None, 1 if profile_first else -1)
    result = _run("compare", *paths[order])
    assert result.exit_code == 2
    assert result.stdout == ""
    one, other = kinds[order]
    assert result.stderr == f"error: A and B must be reports of one kind, got one of {one} and one of {other}.\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"kind": "profile", "schema": 99}', "its schema must be 2, got 99"),
        ('{"kind": "profile", "schema": 2, "steps": "many"}', "report.steps must be int, got 'many'"),
        ('{"kind": "profile", "schema": 2, "findings": [{"cause": "x"}]}', "report.findings[0] is incomplete"),
        ('{"kind": "profile", "schema": 2, "surprise": 1}', "without ['surprise']"),
        ('{"kind": "profile", "schema": 2, "step_ms": 1' + "0" * 400 + "}", "is not a whole profile report"),
        ("[" * 100_000, "can't be read as a report"),
        (
            '{"kind": "profile", "schema": 2, "evidence": ' + _NODE * 400 + "]}" * 400 + "}",
            "is not a whole profile report",
        ),
        ('{"kind": "weather", "schema": 1}', "is not a whole report"),
    ],
    ids=["schema", "type", "lack", "surplus", "number", "depth", "parts", "kind"],
)
def test_profile_that_is_not_whole_is_one_line_with_a_remedy(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    result = _run("report", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {path} ")
    assert reason in result.stderr
    assert "ake" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--version"], 0, f"accel, version {__version__}\n"),
        (["compare", "--help"], 0, "1 if it is, and 2 if a report can't be used"),
        (["frobnicate"], 2, "No such command 'frobnicate'."),
        (["optimize", "train.py"], 2, "No such command 'optimize'. Did you mean `accel run`?"),
        (["train.py"], 2, "No such command 'train.py'. Did you mean `accel run train.py`?"),
        (["comapre", "a.json", "b.json"], 2, "Did you mean `accel compare`?"),
        (["run", "--epochs", "3", "train.py"], 2, "options of the script go after it: train.py -- --epochs 3"),
    ],
)
def test_what_click_answers(arguments: list[str], status: int, text: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == status
    assert " ".join(text.split()) in " ".join(result.output.split())


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_import_loads_no_torch() -> None:
    done = _python("-c", "import sys, accel.commands.cli; print('torch' in sys.modules, 'jinja2' in sys.modules)")
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize("command", ["run", "report", "compare", "doctor", "profile", "bench"])
def test_a_command_imports_what_it_needs(command: str) -> None:
    code = (
        "import sys; from accel.commands.cli import main; main([sys.argv[1], '--help'], standalone_mode=False);"
        "print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    done = _python("-c", code, command)
    assert done.stdout.splitlines()[-1] == f"False {command not in ('run', 'profile')}", done.stderr


@pytest.mark.parametrize("command", ["report", "compare"])
def test_profile_is_read_without_torch(tmp_path: Path, command: str) -> None:
    path = str(_profile(tmp_path / "a.json"))
    arguments = (
        [command, path, path] if command == "compare" else [command, path, "--html", str(tmp_path / "page.html")]
    )
    code = (
        "import sys; from accel.commands.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    done = _python("-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")


def test_module_runs_and_survives_an_ascii_stream(tmp_path: Path) -> None:
    done = _python("-m", "accel", "report", str(_save(tmp_path / "a.json", 10.0)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accel: 2.00x: 20 -> 10 ms per step\n")
