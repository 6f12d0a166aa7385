"""A run forked from the warm server is as one in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm, warm_server
from tests.forks import ForkServer

SCRIPT = """
import atexit, os, random, sys, threading
import numpy as np
print(__name__, os.path.basename(__file__), sys.argv, os.path.basename(os.getcwd()), sys.path[0] == os.getcwd())
print(threading.active_count(), os.times().children_user, os.environ.get("GIVEN"), sys.stdin.read() == "")
atexit.register(print, "left")
print("to stderr", file=sys.stderr)
print(random.random(), np.random.random(), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def plain(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["own.py", "0", "--x"], ["-m", "own", "7"]])
def test_a_script_finds_what_it_finds_in_an_interpreter_of_its_own(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    done, known = warm.run(arguments, cwd=tmp_path), plain(arguments, tmp_path)

    assert done.stdout == known.stdout
    assert done.returncode == known.returncode
    assert done.stderr.splitlines()[0] == known.stderr.splitlines()[0]
    assert done.stderr != warm.run(arguments, cwd=tmp_path).stderr  # other random numbers


def test_the_tests_own_changes_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "PIPE", "changed")
    (tmp_path / "own.py").write_text("import subprocess, sys\nprint(subprocess.PIPE, 'pytest' in sys.modules)\n")
    assert warm.run(["own.py"], cwd=tmp_path).stdout == "-1 False\n"


def test_an_error_ends_it_with_status_1_and_a_signal_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print('begun')\nraise KeyError('gone')\n")
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    done = warm.run(["own.py"], cwd=tmp_path)

    assert (done.stdout, done.returncode) == ("begun\n", 1)
    assert done.stderr.endswith("KeyError: 'gone'\n")
    assert warm.run(["killed.py"], cwd=tmp_path).returncode == -15


def test_a_run_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os, time\nprint('begun', flush=True)\nos.fork()\ntime.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired) as late:
        warm.run(["own.py"], cwd=tmp_path, timeout_s=1)
    assert late.value.output == "begun\n"
    (tmp_path / "next.py").write_text("print('next')\n")
    assert warm.run(["next.py"], cwd=tmp_path).stdout == "next\n"


def test_what_runs_before_is_in_the_same_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import accel\nprint(accel.__version__, 'fake' in globals())\n")
    done = warm.run(["own.py"], cwd=tmp_path, before="import accel\naccel.__version__ = fake = 'none'")
    assert done.stdout == "none False\n"


def test_ranks_meet_in_one_group(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print(dist.get_rank(), total.item(), torch.get_num_threads())\n"
        "dist.destroy_process_group()\n"
    )
    assert [done.stdout for done in warm.run_ranks(2, ["own.py"], cwd=tmp_path)] == ["0 3 1\n", "1 3 1\n"]


def test_processes_of_one_run_share_a_server() -> None:
    warm._server()
    second = ForkServer("scripts", warm_server.PRELOADED)
    assert second._process is None
    assert second.wait(second.fork(os._exit, status=7), 60) == (True, 7)


def test_a_server_ends_with_its_last_session_and_is_started_anew() -> None:
    first, second = ForkServer("short", ()), ForkServer("short", ())
    assert (first._process is None, second._process is None) == (False, True)
    second._end()
    assert first.wait(first.fork(os._exit, status=0), 60) == (True, 0)
    first._end()
    assert first._process is not None and first._process.returncode == 0

    third = ForkServer("short", ())
    assert third._process is not None
    third._end()


def test_one_that_ends_while_it_is_killed_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connection:
        """Hears of the end just after it was asked for."""

        def send(self, process: int) -> None: ...

        def poll(self, timeout_s: float) -> bool:
            return False

        def recv(self) -> int:
            return 3

    def gone(group: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", gone)
    server: Any = object.__new__(ForkServer)
    server._connection = Connection()
    assert server.wait(99999, 0) == (True, 3)
