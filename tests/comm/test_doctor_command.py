"""`accel doctor` as it is typed: 80 columns, a file of one schema, three exit statuses, one sentence for a fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from accel.comm import doctor
from accel.comm.doctor import examination, examine
from accel.commands import doctor as doctor_command
from accel.commands.cli import main
from accel.profiler.host import usable_cores
from tests.comm.fake_host import CARD, host

ROOT = Path(__file__).resolve().parents[2]
LOG = "node1:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the good machine in the place of this one; return the folder beside it."""
    good = host(tmp_path / "root")
    monkeypatch.setattr(doctor, "Host", lambda: good)
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)], env={"COLUMNS": "80"})


@pytest.mark.parametrize("words", [[], ["network"]], ids=["alone", "network"])
def test_a_good_machine_gives_nothing_and_status_0(words: list[str], machine: Path) -> None:
    done = run(*words)
    assert done.exit_code == 0
    assert "\nnetwork: nothing found (" in f"\n{done.output}"
    assert ("torch: " in done.output) == (not words)


def test_the_environment_alone_has_what_a_bug_report_needs(tmp_path: Path) -> None:
    target = tmp_path / "environment.json"
    done = run("environment", "--report", target)
    assert done.exit_code == 0
    assert "network:" not in done.output
    facts = json.loads(target.read_text())["environment"]
    assert facts["torch"].startswith(torch.__version__)
    assert f"{usable_cores()} cores usable" in facts["cpu"]
    assert {"accel", "python", "packages", "threads", "memory", "shared memory", "plan cache", "variables"} <= set(
        facts
    )
    assert any(name.startswith("gpu") for name in facts)


def test_a_log_without_the_network_is_refused(tmp_path: Path) -> None:
    done = run("environment", "--log", tmp_path / "nccl.log")
    assert done.exit_code == 2
    assert "--log must come with the network's checks" in done.output


@pytest.mark.parametrize("words", [[], ["network"]], ids=["alone", "network"])
def test_a_log_with_a_warning_gives_status_1_and_a_file(words: list[str], machine: Path) -> None:
    log, target = machine / "nccl.log", machine / "doctor.json"
    log.write_text(LOG)
    done = run(*words, "--log", log, "--report", target)
    assert done.exit_code == 1
    assert "warn: GPUs of one node don't talk to each other directly (p2p_disabled)" in done.output
    assert "seen: log: NCCL_P2P_DISABLE=1" in done.output
    written = json.loads(target.read_text())
    assert (written["kind"], written["schema"]) == (words[0] if words else "all", 1)
    (finding,) = written["findings"]
    assert finding["check"] == "p2p_disabled"
    assert set(finding) == {"check", "level", "title", "costs", "evidence", "change"}
    assert {"p2p_disabled", *written["passed"]} == {check.name for check in (*examination.MACHINE, *examination.LOG)}
    assert not written["unseen"]


def test_information_alone_leaves_status_0(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = host(machine / "other", files={f"{CARD}/mtu": "1500"})
    monkeypatch.setattr(doctor, "Host", lambda: small)
    done = run()
    assert done.exit_code == 0
    assert "info: small packets on a fast link (mtu)" in done.output


def test_a_missing_log_is_one_sentence(machine: Path) -> None:
    done = run("--log", machine / "none.log")
    assert done.exit_code == 2
    assert done.output == f"error: --log {machine / 'none.log'} can't be read: no such file or directory\n"


def test_a_file_that_is_no_log_is_one_sentence(machine: Path) -> None:
    file = machine / "train.log"
    file.write_text("epoch 1 loss 2.3\n")
    done = run("network", "--log", file)
    assert done.exit_code == 2
    assert done.output == (
        f"error: --log {file} is not an NCCL log: it holds no line of NCCL; "
        "run with NCCL_DEBUG=INFO and give what that prints\n"
    )


def test_a_file_that_can_not_be_written_is_one_sentence(machine: Path) -> None:
    (machine / "folder").mkdir()
    assert "is a directory" in run("--report", machine / "folder").output
    done = run("--report", machine / "missing" / "doctor.json")
    assert done.exit_code == 2
    assert "--report must lie in a directory that exists" in done.output


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(width: int, tmp_path: Path) -> None:
    bad = host(tmp_path, files={"/proc/cmdline": "", "/dev/infiniband": None, f"{CARD}/mtu": "1500"})
    text = doctor_command.render(examine(bad), width=width, color=False)
    assert max(map(len, text.splitlines())) <= width
    assert text.index("error:") < text.index("warn:") < text.index("info:")


def test_the_checks_of_the_network_load_no_torch() -> None:
    code = (
        "import sys; from accel.commands.cli import main\n"
        "try: main(['doctor', 'network'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
