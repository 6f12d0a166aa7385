"""How a profiled script ends: by signals at an awkward moment, and in children it has forked."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.accel.profiled import accel_profile, report, script

SIGNAL_WITHIN_A_COLLECTION = """
import _thread, functools, gc, signal

class Arriving(int):
    stop = property(_thread.interrupt_main)

for epoch in range(2):
    for x, y in loader:
        step(x, y)
gc.callbacks.insert(0, functools.partial(getattr, Arriving(signal.{name})))
try:
    gc.collect()
    print("went on")
finally:
    del gc.callbacks[0]
"""


@pytest.mark.parametrize(
    ("name", "status", "ended"),
    [pytest.param("SIGINT", -signal.SIGINT, "interrupted", marks=pytest.mark.slow), ("SIGTERM", 143, "terminated")],
)
def test_a_signal_within_a_garbage_collection_ends_the_script(
    tmp_path: Path, name: str, status: int, ended: str
) -> None:
    script(tmp_path, SIGNAL_WITHIN_A_COLLECTION.format(name=name))
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert "Exception ignored" not in done.stderr
    assert report(tmp_path).ended == ended


FORKED = """
import os, multiprocessing

def fill():
    for x, y in loader:
        step(x, y)

def leaves():
    print("marked in the child:", hasattr(torch.autograd.backward, "__wrapped__"), flush=True)
    raise SystemExit(3)

def sleeps():
    print("sleeps", flush=True)
    started.set()
    time.sleep(60)

fill()
fill()
child = os.fork()
if child == 0:
    leaves()
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
started = multiprocessing.get_context("fork").Event()
process = multiprocessing.get_context("fork").Process(target=sleeps)
process.start()
started.wait()
process.terminate()
process.join()
print("status", process.exitcode, flush=True)
"""


def test_a_forked_child_is_no_longer_the_profiler_s(tmp_path: Path) -> None:
    """It leaves through the frames of its parent, and made a report in the parent's place."""
    script(tmp_path, FORKED)
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.stdout.splitlines() == ["marked in the child: False", "status 3", "sleeps", "status -15"], done.stderr
    assert done.stderr.count("accel: wrote") == 1
    assert "Traceback" not in done.stderr
    assert report(tmp_path).ended == "completed"
    assert report(tmp_path).steps >= 60
