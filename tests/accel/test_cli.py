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


def test_report_prints_the_terminal_report(tmp_path: Path) -> None:
    result = _run("report", _save(tmp_path / "a.json", 10.0))
    assert result.exit_code == 0
    assert result.stdout.startswith("accel: 2.00x: 20 → 10 ms per step\n")
    assert "\x1b" not in result.stdout


def test_report_writes_the_page_beside_it(tmp_path: Path) -> None:
    page = tmp_path / "page.htm"
    result = _run("report", _save(tmp_path / "a.json", 10.0), "--html", page)
    assert result.exit_code == 0
    assert result.stdout.startswith("accel: 2.00x")
    assert "<h1>2.00x: 20 → 10 ms per step</h1>" in page.read_text(encoding="utf-8")
    assert result.stderr == f"wrote {page}\n"


def test_page_never_replaces_the_report(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.json", 10.0)
    result = _run("report", path, "--html", path)
    assert result.exit_code == 2
    assert "error: --html must name another file" in result.stderr
    assert Report.load(path).accel_ms == 10.0


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.json", 10.0)
    (tmp_path / "page.html").mkdir()
    result = _run("report", path, "--html", tmp_path / "page.html")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "can't be written" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("folder", ["out", "a.json"])
def test_no_folder_is_made_for_a_page(tmp_path: Path, folder: str) -> None:
    result = _run("report", _save(tmp_path / "a.json", 10.0), "--html", tmp_path / folder / "page.html")
    assert result.exit_code == 2
    assert "error: --html must lie in a directory that exists" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


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


def test_compare_without_a_step_time_is_unusable(tmp_path: Path) -> None:
    result = _run("compare", _save(tmp_path / "a.json", 10.0), _save(tmp_path / "b.json", None))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the second report has no accelerated step time")
    assert result.stdout == ""


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


def test_report_prints_a_profile(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = _run("report", _profile(tmp_path / "a.json"), "--html", page)
    assert result.exit_code == 0
    assert result.stdout.startswith("accel profile: input-bound: reading files takes 67 % of the step")
    assert "<h1>input-bound: reading files takes 67 % of the step" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("new_ms", "status", "verdict"), [(104.0, 0, "no regression"), (106.0, 1, "regression")])
def test_compare_of_two_profiles(tmp_path: Path, new_ms: float, status: int, verdict: str) -> None:
    old = _profile(tmp_path / "a.json", step_ms=100.0)
    result = _run("compare", old, _profile(tmp_path / "b.json", step_ms=new_ms))
    assert result.exit_code == status
    assert result.stdout.startswith(f"{verdict}: 100 → {new_ms:.0f} ms per step")


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
        ('{"kind": "weather", "schema": 1}', "is not a whole report"),
    ],
    ids=["schema", "type", "lack", "surplus", "number", "depth", "kind"],
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


def test_profile_with_endless_parts_is_unusable(tmp_path: Path) -> None:
    node = '{"name": "part", "ms": 1, "share": 1, "children": ['
    path = tmp_path / "a.json"
    path.write_text(f'{{"kind": "profile", "schema": 2, "evidence": {node * 400}{"]}" * 400}}}', encoding="utf-8")
    result = _run("report", path)
    assert result.exit_code == 2
    assert "is not a whole profile report" in result.stderr


def test_version() -> None:
    result = _run("--version")
    assert result.exit_code == 0
    assert result.output == f"accel, version {__version__}\n"


def test_help_names_the_exit_statuses() -> None:
    text = " ".join(_run("compare", "--help").output.split())
    assert "1 if it is, and 2 if a report can't be used" in text


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


def test_an_unknown_command_is_named() -> None:
    result = _run("repeat")
    assert result.exit_code == 2 and "No such command 'repeat'" in result.output


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
