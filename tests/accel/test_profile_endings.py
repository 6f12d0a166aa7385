"""How a profiled script ends: by signals at an awkward moment, and in children it has forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accel.test_profile_command import accel_profile, report, script

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


@pytest.mark.parametrize(("name", "status", "ended"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_within_a_garbage_collection_ends_the_script(
    tmp_path: Path, name: str, status: int, ended: str
) -> None:
    script(tmp_path, SIGNAL_WITHIN_A_COLLECTION.format(name=name))
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert "Exception ignored" not in done.stderr
    assert report(tmp_path).ended == ended
