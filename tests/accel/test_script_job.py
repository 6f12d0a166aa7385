"""A script that a command runs finds what it would find under Python itself, and ends as it would there."""

from __future__ import annotations

import gc
import os
import py_compile
import signal
import subprocess
import sys
import zipapp
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import FrameType
from typing import Any

import pytest

from accel.commands.script_job import ScriptJob, check_script
from accel.elastic.save_policy import Termination
from accel.errors import InvalidArgument
from accel.profiler import script as script_module
from accel.profiler.script import Script
from tests import warm
from tests.accel.loops import QUIET
from tests.accel.profiled import ROOT, accel_profile, report, script
from tests.accel.sigterm import send

NEVER_IMPORTED = "from accel.commands import script_job\nscript_job.after_import = lambda name, then: None\n"


def under(command: str, folder: Path, body: str, before: str = "") -> CompletedProcess[str]:
    """Run a script that imports nothing of torch's under `accel run` or `accel profile`."""
    (folder / "own.py").write_text(body)
    return warm.run(["-m", "accel", command, "own.py"], cwd=folder, before=before)


def in_an_interpreter_of_its_own(folder: Path, *arguments: str) -> CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


# -- SIGTERM -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_script_that_saves_when_it_is_terminated_has_its_checkpoint(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, signal
        import accel
        elastic = accel.Elastic(checkpoint="saved")
        model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic, allow="exact")
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            if number == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            loss.backward()
            optimizer.step()
            print(number)
        """,
    )
    command = ["-m", "accel", "run", "train.py"]
    done = warm.run(command, cwd=tmp_path, before=QUIET)

    assert done.stdout.splitlines() == [str(number) for number in range(6)], done.stderr
    assert done.returncode == 143
    assert [path.parent.name for path in tmp_path.glob("saved/*/state.pt")] == ["00000001-step-6"]


def test_switched_off_the_script_ends_by_the_signal_at_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(9)\n"
        "finally:\n    print('unwound', flush=True)\n"
    )
    command = ["-m", "accel", "run", "own.py"]
    plain, off = (warm.run(words, cwd=tmp_path, environment={"ACCEL": "0"}) for words in (command[-1:], command))
    assert (off.returncode, off.stdout) == (plain.returncode, plain.stdout) == (-signal.SIGTERM, "")


@pytest.mark.usefixtures("default_handler")
def test_a_handler_of_the_script_s_own_may_call_the_one_before() -> None:
    """As frameworks do, which let the step under way end."""
    seen: list[str] = []
    with Script("none.py", []) as own:
        before = signal.getsignal(signal.SIGTERM)

        def chained(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)
            seen.append("handled")

        signal.signal(signal.SIGTERM, chained)
        send()
        seen.append("went on")
        signal.signal(signal.SIGTERM, before)
        send()
        seen.append("not reached")

    assert seen == ["handled", "went on"]
    assert own.ending.text == "terminated"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_a_signal_that_was_noted_ends_the_script_once_nobody_notes_it() -> None:
    seen: list[str] = []
    with Script("none.py", []) as own:
        with Termination() as termination:
            send()
            seen.append(f"requested: {termination.requested}")
        send()
        seen.append("not reached")
    assert seen == ["requested: True"]
    assert own.ending.text == "terminated"


@pytest.mark.usefixtures("default_handler")
def test_closed_under_a_later_handler_the_end_of_the_script_is_not_lost() -> None:
    seen: list[str] = []
    with Script("none.py", []) as own:
        termination = Termination()
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        termination.close()
        send()
        seen.append("not reached")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert seen == []
    assert own.ending.text == "terminated"


def ended_by_sigterm(act: Callable[[], Any]) -> bool:
    """Return whether a forked child that does this is ended by the signal."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("noted", [False, True])
def test_a_forked_child_ends_by_the_signal(noted: bool) -> None:
    with Script("none.py", []):
        termination = Termination() if noted else None
        assert ended_by_sigterm(send)
        if termination is not None:
            termination.close()


@pytest.mark.usefixtures("default_handler")
def test_a_handler_that_is_put_back_after_the_script_ends_the_process() -> None:
    with Script("none.py", []):
        kept = signal.getsignal(signal.SIGTERM)

    def put_back() -> None:
        signal.signal(signal.SIGTERM, kept)
        send()

    assert ended_by_sigterm(put_back)


@pytest.mark.usefixtures("default_handler")
def test_what_is_done_before_the_error_goes_on_is_done() -> None:
    seen: list[str] = []
    with Script("none.py", []) as own:
        try:
            send()
        except BaseException:
            seen.append("saved")
            raise
        finally:
            gc.collect()
            seen.append("cleaned up")
    assert seen == ["saved", "cleaned up"]
    assert (own.ending.status, own.ending.text) == (143, "terminated")


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("code", [None, 0, 5])
def test_a_script_that_keeps_the_error_was_terminated_all_the_same(code: int | None) -> None:
    kept: list[BaseException] = []
    with Script("none.py", []) as own:
        try:
            send()
        except BaseException as error:
            kept.append(error)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a second signal ends the process
        raise SystemExit(code)
    assert own.ending.status == (code or 143)


# -- forked children ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["train.py"], ["-m", "accel", "run", "train.py"]])
def test_the_end_of_a_forked_child_is_not_that_of_the_run(tmp_path: Path, command: list[str]) -> None:
    script(
        tmp_path,
        """
        import os
        import accel
        model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, report="out")
        for number, (x, y) in enumerate(loader):
            step(x, y)
            if number == 4:
                child = os.fork()
                if child == 0:
                    sys.exit(3)
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists("out"))
                break
        """,
    )
    done = warm.run(command, cwd=tmp_path, before=QUIET)

    assert done.stdout == "3 False\n", done.stderr
    assert done.stderr.count("the run ended after") == 1
    assert (tmp_path / "out" / "report.json").is_file()


# -- the exit status ---------------------------------------------------------------------------------------------------


class Unclear:
    """Like a tensor of several numbers, neither equal to 0 nor not."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    def __str__(self) -> str:
        return "unclear"


@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (False, 0, ""),
        (3, 3, ""),
        (0.0, 1, "0.0\n"),
        ("", 1, "\n"),
        (Unclear(), 1, "unclear\n"),
    ],
)
def test_the_status_is_that_of_python(
    code: object, status: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Script("none.py", []) as own:
        raise SystemExit(code)
    assert (own.ending.status, capsys.readouterr().err) == (status, printed)


@pytest.mark.parametrize("command", ["run", "profile"])
def test_an_interrupt_ends_the_process_by_its_signal(tmp_path: Path, command: str) -> None:
    """As without accel: a shell's loop over runs ends too, which status 130 would not do."""
    done = under(command, tmp_path, "print('ran')\nraise KeyboardInterrupt\n", before=NEVER_IMPORTED)

    assert (done.returncode, done.stdout) == (-signal.SIGINT, "ran\n"), done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "accel/commands" not in done.stderr


def test_an_interrupt_ends_the_installed_command_by_its_signal(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "accel.script").write_text(
        "import sys\nfrom accel.commands.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    done = in_an_interpreter_of_its_own(tmp_path, "accel.script", "run", "own.py")

    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.count("Traceback") == 1


# -- tracebacks --------------------------------------------------------------------------------------------------------


def test_a_traceback_has_the_hints_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    with Script("none.py", []):
        exec("value = 1\nvalu\n", {})
    assert "Did you mean: 'value'?" in capsys.readouterr().err


def test_a_traceback_has_no_frames_of_ours_in_between(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch is asked for through a proxy, and a dataset may raise."""
    ours = str(Path(script_module.__file__ or "").parents[1] / "script" / "loaders.py")
    passing: dict[str, Any] = {}
    exec(compile("def on(call):\n    return call()\n\n\ndef fail():\n    return {}['ours']\n", ours, "exec"), passing)

    def broken() -> None:
        raise KeyError("the script's")

    with Script("none.py", []):
        passing["on"](lambda: passing["on"](broken))
    printed = capsys.readouterr().err
    assert ours not in printed and printed.count(", in <lambda>") == printed.count(", in broken") == 1
    with Script("none.py", []):
        passing["on"](passing["fail"])
    assert capsys.readouterr().err.count(ours) == 2  # what fails in accel itself is shown whole


def test_a_traceback_is_shown_though_a_line_of_it_is_not_known() -> None:
    """Ctrl-C may come at an instruction that belongs to no line."""

    def broken() -> None:
        raise KeyError

    broken.__code__ = broken.__code__.replace(co_linetable=b"\xff" * 8)
    trace = None
    try:
        broken()
    except KeyError as error:
        trace = error.__traceback__
    shown = script_module._own_frames_removed(trace)
    assert shown is not None and shown.tb_frame.f_code is broken.__code__


# -- the path ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["link.py"], ["-m", "own"], ["-P", "link.py"]])
def test_the_path_is_that_of_the_plain_script(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    for file in (tmp_path / "elsewhere" / "real.py", tmp_path / "own.py"):
        file.write_text("import sys\nprint(sys.path, __file__, sys.argv)\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "elsewhere" / "real.py")
    options = [word for word in arguments if word == "-P"]
    if options and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brings -P")
    command = [*options, "-m", "accel", "run", *arguments[len(options) :]]
    done, plain = (in_an_interpreter_of_its_own(tmp_path, *words) for words in (command, arguments))

    assert done.stdout == plain.stdout != "", done.stderr
    assert done.returncode == 0


def test_what_is_no_source_is_refused_in_a_sentence(tmp_path: Path) -> None:
    source, compiled, archive = tmp_path / "own.py", tmp_path / "own.pyc", tmp_path / "own.pyz"
    (tmp_path / "package").mkdir()
    source.write_text("print('ran')\n")
    (tmp_path / "package" / "__main__.py").write_text("print('ran')\n")
    py_compile.compile(str(source), cfile=str(compiled))
    zipapp.create_archive(tmp_path / "package", archive, interpreter="/usr/bin/env python3")
    for place in (compiled, archive):
        with pytest.raises(
            InvalidArgument, match=r"^SCRIPT must be Python source, got '.*', which is compiled or an a"
        ):
            check_script(str(place), module=False)
    with pytest.raises(InvalidArgument, match=r"^SCRIPT must be a Python file, got '.*', which is a folder; name its "):
        check_script(str(tmp_path / "package"), module=False)
    check_script(str(source), module=False)


# -- torch -------------------------------------------------------------------------------------------------------------


def test_torch_is_imported_when_a_profiled_script_imports_it(tmp_path: Path) -> None:
    """What the script sets before holds: the number of threads, the GPUs that are visible."""
    (tmp_path / "own.py").write_text(
        "import os, sys\n"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))\n"
        "os.environ['OMP_NUM_THREADS'] = '1'\n"
        "import torch\n"
        "print(torch.get_num_threads(), hasattr(torch.autograd.backward, '__wrapped__'))\n"
    )
    done = in_an_interpreter_of_its_own(tmp_path, "-m", "accel", "profile", "own.py")

    assert done.stdout == "[]\n1 True\n", done.stderr
    assert done.returncode == 0
    assert "no optimizer step seen in" in done.stderr and "Traceback" not in done.stderr


def test_names_of_strategies_are_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nprint(sorted({'numpy', 'torch'} & set(sys.modules)))\n")
    options = ["--enable", "gradient_half", "--disable", "tf32"]
    done = in_an_interpreter_of_its_own(tmp_path, "-m", "accel", "run", *options, "own.py")

    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_profiled_script_without_torch_is_told_what_was_not_seen(tmp_path: Path) -> None:
    done = under("profile", tmp_path, "print('ran')\n", before=NEVER_IMPORTED)

    assert (done.stdout, done.returncode) == ("ran\n", 0)
    nothing = "0 batches from a DataLoader, 0 backward passes, 0 updates, 0 whole steps"
    assert f"no optimizer step seen in 0.0 s ({nothing})" in done.stderr


def test_torch_in_a_forked_child_or_after_the_script_is_left_alone() -> None:
    begun: list[int] = []

    class Job(ScriptJob):
        def start(self) -> None:
            begun.append(1)

        def leave_alone(self) -> None:
            pass

        def conclude(self) -> None:
            pass

    job = Job(Script("none.py", []))
    child = os.fork()
    if child == 0:
        try:
            job.begin_after_torch()
        finally:
            os._exit(len(begun))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.begin_after_torch()
    job.__exit__(None, None, None)
    job.begin_after_torch()
    assert begun == [1]


# -- closed streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()"])
def test_a_script_may_leave_its_streams_closed(tmp_path: Path, leaves: str) -> None:
    done = under("run", tmp_path, f"import sys\nprint('ran', flush=True)\n{leaves}\n")

    assert (done.stdout, done.returncode) == ("ran\n", 0), done.stderr
    assert "Traceback" not in done.stderr


def test_a_forked_child_may_leave_its_streams_closed(tmp_path: Path) -> None:
    body = """
import os, sys
child = os.fork()
if child == 0:
    sys.stdout = None
    raise SystemExit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = under("run", tmp_path, body)
    assert done.stdout == "3\n", done.stderr


def test_what_ends_a_script_goes_nowhere_without_stderr(tmp_path: Path) -> None:
    for last in ("sys.exit('gone')", "raise KeyError('gone')"):
        done = under("run", tmp_path, f"import sys\nsys.stderr = None\n{last}\n")
        assert (done.stdout, done.stderr, done.returncode) == ("", "", 1)


@pytest.mark.parametrize("leaves", ["sys.stdout.close()", "sys.stderr.close()", "sys.stderr.detach()"])
def test_a_report_is_made_although_the_streams_are_closed(tmp_path: Path, leaves: str) -> None:
    script(tmp_path, f"\nfor x, y in loader:\n    step(x, y)\n{leaves}\n")
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert report(tmp_path).steps > 20
