"""The system's word on who runs, waits and sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from accel.profiler.host import CrowdMeter, ThreadMeter, ThreadTime, usable_cores

pytestmark = pytest.mark.skipif(not ThreadMeter().works, reason="this system keeps no /proc/…/schedstat")


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_sleeping_is_told_from_running() -> None:
    meter = ThreadMeter(tid=threading.get_native_id())
    before = meter.read()
    time.sleep(0.2)
    middle = meter.read()
    spin(0.2)
    after = meter.read()
    assert before is not None and middle is not None and after is not None
    slept, ran = before.share_until(middle), middle.share_until(after)

    assert slept is not None and slept.blocked > 0.9
    assert ran is not None and ran.blocked < 0.1  # whatever else runs on this machine only makes it wait
    for share in (slept, ran):
        assert share.run + share.wait + share.blocked == pytest.approx(1.0)


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


def test_another_process_s_work_is_seen_and_our_own_is_not() -> None:
    meter = CrowdMeter()
    spin(0.5)
    quiet = meter.cores()
    # A grandchild that belongs to nobody of ours: its parent ends at once.
    orphan = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    end = time.time() + 1.5\n"
        "    while time.time() < end: pass\n"
    )
    subprocess.run([sys.executable, "-c", orphan], check=True)
    meter.cores()
    time.sleep(0.8)
    crowded = meter.cores()

    assert quiet is not None and crowded is not None
    assert crowded > quiet + 0.3


def test_usable_cores_are_those_of_the_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
