"""What only shaped links show: bytes of an uplink, a link that is cut; and the lab itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.comm import lab as lab_module
from benchmarks.comm.lab import Lab, why_not
from benchmarks.comm_hooks import COMPRESSORS, Setting, launch_all, measure

pytestmark = [pytest.mark.net, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def namespaces(prefix: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(prefix)]


@pytest.mark.slow
def test_uplink_carries_what_the_formula_says() -> None:
    # Headers are 0.2 %; beside the few bytes of DGC acknowledgements count more.
    most = {"hierarchical exact": 1.02, "hierarchical int8": 1.02, "dgc": 1.1, "hierarchical dgc": 1.1}
    found = {row["method"]: row for row in measure(Setting(2, 2, "1gbit", tuple(most)), rounds=1, depth=8)}
    assert found["ddp"]["sent_mb"] == pytest.approx(1.5 * 33.6, rel=0.02)
    for method, bound in most.items():
        # Less than the formula would mean that something was not sent.
        assert 1.0 <= found[method]["of_theory"] < bound
        assert found[method]["replicas_equal"]
    # By hosts a quarter, but for the biases, of which a host sends half as much.
    assert 3.2 < found["dgc"]["sent_mb"] / found["hierarchical dgc"]["sent_mb"] < 4


@pytest.mark.slow
def test_link_cut_in_the_middle_of_a_bucket_is_told_on_both_sides(tmp_path: Path) -> None:
    with Lab(2, "10mbit") as lab:
        lab.start(["-m", "tests.comm.cut_worker", str(tmp_path)], 1, folder=tmp_path)
        wait_for([tmp_path / f"{rank}.ready" for rank in range(2)], 60, tmp_path)
        before = lab.sent_bytes(0)
        time.sleep(0.5)
        assert lab.sent_bytes(0) > before + 200_000  # a bucket is on its way
        lab.cut(1)
        wait_for([tmp_path / f"{rank}.said" for rank in range(2)], 30, tmp_path)
    for rank in range(2):
        seconds, said = (tmp_path / f"{rank}.said").read_text().split(" ", 1)
        assert said.startswith(f"rank {rank} stopped at step 2, bucket ")
        # The store is on the first host.
        assert ("because rank 1 has ended, hangs outside", "the store of the process group does not")[rank] in said
        assert float(seconds) < 0.5 + 4 + 5 + 8


def wait_for(paths: list[Path], timeout_s: float, folder: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        logs = "".join(path.read_text() for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.05)


def test_labs_live_side_by_side_and_leave_nothing() -> None:
    with Lab(2) as one, Lab(2, "100mbit") as other:
        names = {lab.namespace(host) for lab in (one, other) for host in range(2)}
        assert len(names) == 4
        assert names <= set(namespaces("al"))
        for lab in (one, other):
            ping = ["ip", "netns", "exec", lab.namespace(0), sys.executable, "-c", REACH, lab.address(1)]
            assert subprocess.run(ping, capture_output=True, text=True, check=True).stdout == "refused\n"
    assert not names & set(namespaces("al"))


# A refused connection came back from the other host; one that nobody routes would time out.
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 5)
except ConnectionRefusedError:
    print("refused")
"""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_lab_is_taken_down_and_its_processes_end_whatever_happens(kind: type[BaseException], tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(600)\n")
    lab = Lab(1)
    started = []

    def start_and_raise() -> None:
        with lab:
            started.extend(lab.start([str(script)], 1))
            time.sleep(0.2)
            raise kind

    with pytest.raises(kind):
        start_and_raise()
    (process,) = started
    assert process.poll() is not None
    assert not namespaces(lab._prefix)


def test_lab_that_breaks_while_it_is_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(2)
    real = lab_module._do

    def breaks(*command: str) -> str:
        if "addr" in command and lab.address(1) + "/24" in command:
            raise RuntimeError("no address for you")
        return real(*command)

    monkeypatch.setattr(lab_module, "_do", breaks)
    with pytest.raises(RuntimeError, match="no address"):
        lab.__enter__()
    assert not namespaces(lab._prefix)


@pytest.mark.slow
def test_ranks_that_outlast_their_time_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\nprint('still here', flush=True)\ntime.sleep(600)\n")
    with Lab(1) as lab, pytest.raises(TimeoutError, match="still ran after 6 s"):
        lab.run([str(script)], 1, timeout_s=6)


@pytest.mark.slow
def test_every_hook_ends_well_in_each_of_five_launches() -> None:
    ended = launch_all(5)
    assert len(ended["hooks"]) == 2 * len(COMPRESSORS)  # flat and by hosts
    assert ended["good"] == ended["launches"] == 5


def test_a_lab_that_is_asked_to_end_cleans_up() -> None:
    code = (
        "import time\nfrom benchmarks.comm.lab import Lab\n"
        "with Lab(1) as lab:\n    print(lab._prefix, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        prefix = process.stdout.readline().strip()
        assert namespaces(prefix)
        process.terminate()
        assert process.wait(120) == 143
    assert not namespaces(prefix)
