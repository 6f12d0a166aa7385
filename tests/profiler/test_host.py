"""The system's word on who runs, waits and sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accel.profiler import host
from accel.profiler.host import TICK_S, CrowdMeter, ThreadMeter, ThreadTime, usable_cores

pytestmark = pytest.mark.skipif(not ThreadMeter().works, reason="this system keeps no /proc/…/schedstat")


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_thread_s_times_go_on() -> None:
    meter = ThreadMeter(tid=threading.get_native_id())
    before = meter.read()
    spin(0.01)
    after = meter.read()
    assert before is not None and after is not None
    assert after.run > before.run > 0.0
    assert after.wait >= before.wait >= 0.0
    assert after.at - before.at >= 0.01


def test_the_busy_seconds_of_this_system_are_read() -> None:
    proc, cores = Path("/proc"), frozenset(os.sched_getaffinity(0))
    before, own = host._busy_seconds(proc, cores), host._tree_seconds(proc, os.getpid())
    spin(4 * TICK_S)
    after = host._busy_seconds(proc, cores)
    assert before is not None and after is not None and after > before > 0.0
    assert host._tree_seconds(proc, os.getpid()) > own > 0.0


def test_shares_stay_within_bounds_and_need_a_millisecond() -> None:
    assert ThreadTime(0, 0, 0).share_until(ThreadTime(0.0005, 0, 0)) is None
    share = ThreadTime(0, 0, 0).share_until(ThreadTime(1.0, 1.5, 0.5))
    assert share is not None
    assert (share.run, share.wait, share.blocked) == (1.0, 0.0, 0.0)


def test_a_process_that_is_gone_reads_as_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = ThreadMeter(child.pid)
    assert meter.read() is not None
    child.communicate(b"\n")

    assert meter.read() is None
    assert ThreadMeter(child.pid).read() is None


@pytest.mark.slow
def test_another_process_s_work_is_busy_time_and_our_own_is_this_run_s() -> None:
    """Seconds on a core, not shares: whatever else runs on this machine only adds to the busy ones."""
    proc, cores = Path("/proc"), frozenset(os.sched_getaffinity(0))

    def seconds() -> tuple[float, float]:
        return host._busy_seconds(proc, cores) or 0.0, host._tree_seconds(proc, os.getpid())

    before = seconds()
    spin(0.4)
    after = seconds()
    assert after[0] - before[0] > 0.3
    assert 0.3 < after[1] - before[1] < 0.8

    # A grandchild that belongs to nobody of ours: its parent ends at once.
    orphan = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while time.process_time() < 1.0: pass\n"
        "    print(flush=True)\n"
    )
    before = seconds()
    subprocess.run([sys.executable, "-c", orphan], check=True, capture_output=True)  # until it too closes its output
    after = seconds()
    assert after[0] - before[0] > 0.9
    assert after[1] - before[1] < 0.6


class Played:
    """A machine of four cores whose clocks are written by hand; this process may use the first two."""

    def __init__(self, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._proc = proc
        self.now = 0.0
        self.mine = {0, 1}
        monkeypatch.setattr(host.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: self.mine)
        monkeypatch.setattr(host.cgroup, "quota", lambda: None)
        self.write(busy=(0, 0, 0, 0), own=0)

    def write(self, *, busy: tuple[float, ...], own: float) -> None:
        """Set seconds that each core was busy, and those of this process."""
        rows = [f"cpu{n} {round(s / TICK_S)} 0 0 5 0 0 0 0 0 0" for n, s in enumerate(busy)]
        total = f"cpu  {round(sum(busy) / TICK_S)} 0 0 20 0 0 0 0 0 0"
        (self._proc / "stat").write_text("\n".join([total, *rows, "intr 1 2 3", "ctxt 4"]) + "\n")
        pid, fields = os.getpid(), ["S", "1", *["0"] * 9, str(round(own / TICK_S)), "0", "0", "0", "0"]
        (self._proc / str(pid)).mkdir(exist_ok=True)
        (self._proc / str(pid) / "stat").write_text(f"{pid} (a name) of two) {' '.join(fields)}\n")


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_others_on_cores_that_are_not_ours_crowd_nobody(played: Played, tmp_path: Path) -> None:
    meter = CrowdMeter(proc=tmp_path)
    played.now = 10.0
    played.write(busy=(9, 0.5, 10, 10), own=9)

    assert meter.cores() == pytest.approx(0.05)


def test_others_on_our_cores_do(played: Played, tmp_path: Path) -> None:
    meter = CrowdMeter(proc=tmp_path)
    played.now = 10.0
    played.write(busy=(10, 8, 0, 0), own=9)

    assert meter.cores() == pytest.approx(0.9)


def test_a_stretch_in_which_the_cores_changed_is_not_told(played: Played, tmp_path: Path) -> None:
    meter = CrowdMeter(proc=tmp_path)
    played.now, played.mine = 10.0, {2, 3}
    played.write(busy=(0, 0, 10, 10), own=0)
    assert meter.cores() is None
    played.now = 20.0
    played.write(busy=(0, 0, 15, 10), own=0)

    assert meter.cores() == pytest.approx(0.5)


def test_under_a_quota_busy_cores_say_nothing(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's other cores are free for what a quota of one allows."""
    monkeypatch.setattr(host.cgroup, "quota", lambda: 1.0)
    meter = CrowdMeter(proc=tmp_path)
    played.now = 10.0
    played.write(busy=(10, 10, 10, 10), own=1)

    assert meter.cores() is None


def test_usable_cores_are_those_of_the_quota(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == 2
    monkeypatch.setattr(host.cgroup, "quota", lambda: 0.4)
    assert usable_cores() == 1
    monkeypatch.setattr(host.cgroup, "quota", lambda: 16.0)
    assert usable_cores() == 2


def test_usable_cores_are_those_of_the_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_the_machines_available_memory_is_no_more_than_the_control_group_leaves(tmp_path: Path) -> None:
    assert (host.available_memory(tmp_path), host.total_memory(tmp_path)) == (None, None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       4 kB\n")
    assert (host.available_memory(tmp_path), host.total_memory(tmp_path)) == (4096, 9 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("3000\n")
    (group / "memory.current").write_text("2500\n")
    (group / "memory.stat").write_text("inactive_file 100\n")
    assert (host.available_memory(tmp_path), host.total_memory(tmp_path)) == (600, 3000)


def test_how_long_this_process_has_been_running(tmp_path: Path) -> None:
    first = host.seconds_since_start()
    assert 0 < first < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert host.seconds_since_start() >= first
    assert host.seconds_since_start(tmp_path) == 0.0


@pytest.mark.parametrize(
    ("cores", "held", "free"),
    [(4, 0.02, 4), (4, 0.67, 3), (4, 1.0, 3), (4, 2.02, 2), (4, 2.2, 1), (4, 9.0, 1), (1, 0.0, 1)],
)
def test_a_core_is_free_if_others_hold_none_of_it_but_for_a_tick(cores: int, held: float, free: int) -> None:
    assert host.free_cores(cores, held) == free
