"""`accel profile` on whole scripts, each in a process of its own: what they print and how they end is their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from accel.commands.cli import main
from tests import warm
from tests.accel.profiled import (
    accel_profile,
    causes,
    in_an_interpreter_of_its_own,
    report,
    script,
)


def test_a_slow_loader_is_named_tried_and_written_down(tmp_path: Path) -> None:
    """Also beside one step that takes a second, as one that loads a library does."""
    script(
        tmp_path,
        """
        def slow(samples):
            time.sleep(0.012)
            return torch.utils.data.default_collate(samples)

        loader.collate_fn = slow
        for epoch in range(5):
            for number, (x, y) in enumerate(loader):
                if epoch == 0 and number == 20:
                    time.sleep(1)
                loss = step(x, y)
        print("the script's own", sys.argv[1:], __name__, epoch)
        """,
    )
    done = accel_profile(tmp_path, "train.py", "--", "--lr", "3", "--json", "x")

    assert done.stdout == "the script's own ['--lr', '3', '--json', 'x'] __main__ 4\n"
    assert done.returncode == 0
    found = report(tmp_path)
    assert found.ended == "completed"
    assert found.steps >= 100
    assert found.unattributed <= 0.02
    assert causes(found)[0] == "input.collate"
    finding = found.findings[0]
    assert finding.predicted is not None and finding.measured is not None
    assert finding.measured.low <= finding.predicted.value + 0.1
    assert finding.measured.high >= finding.predicted.value - 0.1
    assert finding.measured.value > 0.7
    assert found.experiments[0].verdict == "keep"
    assert found.evidence is not None
    assert sum(child.share for child in found.evidence.children) == pytest.approx(1.0)
    assert any("of them in host" in sentence and sentence.endswith("is left out") for sentence in found.unseen)
    assert found.samples_per_s is not None
    assert found.samples_per_s * found.step_ms / 1e3 == pytest.approx(8)  # the batch
    assert "input.collate" in done.stderr
    folder = tmp_path / "accel-profile"
    assert done.stderr.count("\n") <= 50
    assert "where a step's time goes" in done.stderr and "operators, per step" not in done.stderr
    assert done.stderr.endswith("the whole report: accel report accel-profile/report.json, or -v\n")
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("target", "message"),
    [("page.html", "must be a folder or a .json file"), ("pipe", "must be a folder, a .json or a .html file")],
)
def test_reports_that_can_not_be_written_are_refused_first(
    tmp_path: Path, target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "print('ran')")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["profile", "--report", target, "train.py"])
    assert done.exit_code == 2 and done.stdout == ""
    assert message in done.stderr
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["wrong.py"], "SyntaxError"), (["-m", "not_there"], "no module named 'not_there'")],
)
def test_an_error_before_the_script_runs_is_shown_alone(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "wrong.py").write_text("def f(:\n")
    done = accel_profile(tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr and "profiler/script.py" not in done.stderr


def test_work_between_two_epochs_is_named_as_such(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        for epoch in range(12):
            for x, y in DataLoader(torch.utils.data.Subset(data, range(64)), batch_size=8):
                step(x, y)
            torch.save(model.state_dict(), "weights.pt")
            time.sleep(0.05)
        """,
    )
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.returncode == 0, done.stderr
    named = causes(report(tmp_path))
    # Where the disk takes its time, most of the pause is the checkpoint.
    assert named[0] in ("outside.periodic", "outside.checkpoint") and "host.step_code" not in named


DEPTH = """
import sys

def depth():
    frame, count = sys._getframe(1), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 2)

    def forward(self, x):
        global within
        within = depth()
        return self.inner(x)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    step(x, y)
print(depth(), within)
"""


@pytest.mark.parametrize("module", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_few_frames_lie_below_a_profiled_script(tmp_path: Path, module: bool) -> None:
    """Anomaly detection pays for each frame of the stack, in each operation; there were 12 more, 13 in the model.

    Below a script lie two of runpy's, for `python -m accel`, and the module's that runs it; a marked model's call takes
    the place of torch's own.
    """
    script(tmp_path, DEPTH)
    arguments = ["-m", "train"] if module else ["train.py"]
    done = accel_profile(tmp_path, "--no-confirm", *arguments)
    plain = warm.run(arguments, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    (outside, within), (bare_outside, bare_within) = (map(int, text.split()) for text in (done.stdout, plain.stdout))
    assert outside - bare_outside <= 3
    assert within - bare_within <= 3


def test_a_package_runs_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    body = "from . import __name__ as name\nimport sys\nprint(name, __name__, __package__, sys.argv[1:])\n"
    (tmp_path / "package" / "__main__.py").write_text(body)
    done = accel_profile(tmp_path, "-m", "package", "--", "x")

    assert done.stdout == "package __main__ package ['x']\n", done.stderr
    assert done.returncode == 0


RAISES = """
for epoch in range(3):
    for x, y in loader:
        step(x, y)
def last():
    raise KeyError("gone")
last()
"""


def test_a_crash_is_reported_where_the_command_was_given(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    script(tmp_path, "import os\nos.chdir('elsewhere')" + RAISES)
    done = accel_profile(tmp_path, "--no-confirm", "train.py")

    assert done.returncode == 1
    assert "in last\n    raise KeyError(\"gone\")\nKeyError: 'gone'\n" in done.stderr
    assert "profiler/script.py" not in done.stderr
    assert report(tmp_path).ended == "raised KeyError"
    assert report(tmp_path).steps > 50
    assert not list((tmp_path / "elsewhere").iterdir())
    assert all(line.source for line in report(tmp_path).lines if line.file == "train.py")


@pytest.mark.slow
def test_a_crash_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script(tmp_path, RAISES)
    done = in_an_interpreter_of_its_own(tmp_path, "-m", "accel", "profile", "train.py")
    plain = in_an_interpreter_of_its_own(tmp_path, "train.py")

    assert done.returncode == plain.returncode == 1
    shown = done.stderr[done.stderr.index("Traceback") :]
    assert shown.startswith(plain.stderr.strip())


@pytest.mark.parametrize(
    ("leave", "status", "ended"),
    [("sys.exit(7)", 7, "exited with 7"), pytest.param("sys.exit()", 0, "completed", marks=pytest.mark.slow)],
)
def test_the_exit_status_is_the_script_s(tmp_path: Path, leave: str, status: int, ended: str) -> None:
    script(tmp_path, f"\nfor x, y in loader:\n    step(x, y)\n{leave}\n")
    done = accel_profile(tmp_path, "train.py")

    assert done.returncode == status
    assert report(tmp_path).ended == ended


UNTIL_STOPPED = """
from pathlib import Path
count = 0
while True:
    for x, y in loader:
        step(x, y)
        count += 1
        if count == 100:
            Path("ready").touch()
"""


def test_an_interrupted_script_leaves_a_report(tmp_path: Path) -> None:
    script(tmp_path, UNTIL_STOPPED)
    running = warm.Running(["-m", "accel", "profile", "train.py"], cwd=tmp_path)
    try:
        warm.wait_for(tmp_path / "ready")
        os.kill(running.pid, signal.SIGINT)
        done = running.wait()
    finally:
        running.kill()

    assert done.returncode == -signal.SIGINT, done.stderr
    assert report(tmp_path).ended == "interrupted"
    assert report(tmp_path).steps > 50


def test_too_few_steps_refuse_a_verdict(tmp_path: Path) -> None:
    script(tmp_path, "\nfor number, (x, y) in zip(range(12), loader):\n    step(x, y)\n")
    done = accel_profile(tmp_path, "train.py")

    assert done.returncode == 0
    assert "steps were seen, 20 are needed" in report(tmp_path).refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone.py"], "SCRIPT must be a Python file, got 'gone.py'"),
        (["--report", f"{'x' * 300}.json", "train.py"], "--report must be a place that can be written, got"),
        (["--json", "train.py/x.json", "train.py"], "--report must be a folder, a .json or a .html file, got"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["profile", *arguments])

    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_and_a_plain_iterator(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        def batches():
            for number in range(100):
                time.sleep(0.01)
                yield torch.randn(8, 64), torch.zeros(8, dtype=torch.long)

        for x, y in batches():
            step(x, y)
        """,
    )
    done = accel_profile(tmp_path, "-v", "--report", "out/one.json", "-m", "train")

    found = report(tmp_path, "out/one.json")
    assert done.returncode == 0, done.stderr
    assert causes(found)[0] == "input.iterator"
    assert any("train.py:" in sentence for sentence in found.findings[0].why)
