"""Training in another process or thread than the script's own is not seen, and that is said with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accel.profiled import accel_profile, script

IN_A_THREAD = """
import threading

def train():
    for x, y in loader:
        step(x, y)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""

IN_A_CHILD = """
import multiprocessing

def train():
    until = time.process_time() + 1.2
    while time.process_time() < until:
        pass

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
"""

EVALUATION = "\nfor x, y in loader:\n    model(x)\n"

ONE_UPDATE = "\nstep(*next(iter(loader)))\n"


@pytest.mark.parametrize(
    ("body", "sentences"),
    [
        (IN_A_THREAD, ["no optimizer step seen", "40 updates ran in other threads", "thread that runs the script"]),
        (IN_A_CHILD, ["no optimizer step seen", "child processes ran for", "torchrun --nproc-per-node"]),
        (EVALUATION, ["no optimizer step seen", "40 batches from a DataLoader, 0 backward passes, 0 updates"]),
        (ONE_UPDATE, ["no whole step seen", "1 backward passes, 1 updates, 0 whole steps"]),
    ],
)
def test_what_could_not_be_seen_is_told(tmp_path: Path, body: str, sentences: list[str]) -> None:
    script(tmp_path, body)
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.returncode == 0, done.stderr
    for sentence in sentences:
        assert sentence in done.stderr
    for other, hint in ((IN_A_THREAD, "other threads"), (IN_A_CHILD, "child processes")):
        assert (hint in done.stderr) == (body is other)
    assert not (tmp_path / "accel-profile" / "report.json").exists()
