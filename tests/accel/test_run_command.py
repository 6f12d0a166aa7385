"""`accel run` on whole scripts, each in a process of its own: what they print and how they end is their own."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from click.testing import CliRunner

from accel import Report, strategies
from accel.commands import run as run_module
from accel.commands.cli import main
from accel.commands.run import registered_strategies
from accel.commands.script_job import after_import
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler.script import Script
from accel.script.training import ScriptTraining
from tests import warm
from tests.accel.loops import QUIET, make_loader
from tests.accel.profiled import script
from tests.accel.script_followed import OPTIONS
from tests.forks import ROOT

TRAINING = """
if __name__ == "__main__":
    for epoch in range(3):
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            loss = step(nn.functional.dropout(x), y)
        print(loss.item().hex(), torch.rand(1).item())
    with torch.no_grad():
        print(sum(nn.functional.cross_entropy(model(x), y) for x, y in loader).item().hex())
"""


def accel_run(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> CompletedProcess[str]:
    return warm.run(["-m", "accel", "run", *arguments], cwd=folder, environment=environment, before=QUIET)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_of_a_loader_are_no_training_in_child_processes(
    workers: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script whose optimizer is not torch's was told to call accel.optimize in its children."""
    monkeypatch.setattr(run_module, "training_in_children", lambda command: "accel: child processes ran")
    job = run_module.RunJob(Script("none.py", []), {})
    job._training = ScriptTraining(dict(OPTIONS), threading.get_ident(), whole="")
    job._training.loaders.epoch_begins(LoaderProxy(make_loader(num_workers=workers)))
    job.conclude()
    assert ("child processes" in capsys.readouterr().err) == (workers == 0)


def test_the_exact_level_prints_the_losses_of_the_plain_script(tmp_path: Path) -> None:
    script(tmp_path, TRAINING)
    plain = warm.run(["train.py"], cwd=tmp_path)
    options = ["--allow", "exact", "--report", "runs/one", "--budget", "60", "--no-cache"]
    done = accel_run(tmp_path, *options, "train.py", environment={"ACCEL_CACHE": str(tmp_path / "cache")})

    assert done.stdout == plain.stdout
    assert done.returncode == plain.returncode == 0
    report = Report.load(tmp_path / "runs" / "one" / "report.json")
    assert (report.model, report.allow, report.budget) == ("Sequential", "exact", "60s")
    assert report.steps >= 3 * 40 - 4
    assert report.cache == "" and not (tmp_path / "cache").exists()
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12


def test_arguments_exit_status_and_errors_are_the_script_s_own(tmp_path: Path) -> None:
    script(tmp_path, "step(*next(iter(loader)))\nprint(sys.argv[1:], __name__)\nsys.exit(3)")
    done = accel_run(tmp_path, "train.py", "--", "--lr", "3", "--allow", "x")
    assert done.stdout == "['--lr', '3', '--allow', 'x'] __main__\n"
    assert done.returncode == 3

    script(tmp_path, "raise KeyError('gone')")
    done = accel_run(tmp_path, "train.py")
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'gone'\n") and "commands/" not in done.stderr


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("print(model)", "no step of a torch optimizer was seen (0 batches from a DataLoader)"),
        ("step(*next(iter(loader)))", "the optimizer steps seen were too few (1)"),
    ],
)
def test_what_could_not_be_made_faster_is_said_in_a_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    script(tmp_path, body)
    done = accel_run(tmp_path, "train.py")
    assert done.returncode == 0
    assert done.stderr.startswith(f"accel: nothing was made faster: {sentence}")
    assert done.stderr.count("\n") == 1


def test_switched_off_it_runs_the_script_and_says_nothing(tmp_path: Path) -> None:
    script(tmp_path, "print(DataLoader.__iter__.__qualname__)" + TRAINING)
    done = accel_run(tmp_path, "train.py", environment={"ACCEL": "0"})
    assert done.stdout.startswith("DataLoader.__iter__\n")
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_spawned_child_knows_nothing_of_accel(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, sys\n"
        "def look(queue):\n    queue.put('accel' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    child = context.Process(target=look, args=(queue,))\n"
        "    child.start()\n"
        "    print('accel' in sys.modules, queue.get())\n"
        "    child.join()\n"
    )
    assert accel_run(tmp_path, "train.py").stdout == "True False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.py"], "SCRIPT must be a Python file, got 'gone.py'"),
        (
            ["--allow", "fast", "train.py"],
            "--allow must be one of 'exact', 'reordered', 'reduced', 'float8', 'lossy', got 'fast'",
        ),
        (["--budget", "much", "train.py"], "budget must be a time or a share, got 'much'"),
        (["--budget", "0.03", "train.py"], "budget without a unit must be at least 1 s, got '0.03'; did you mean"),
        (["--report", "train.py/one", "train.py"], "--report must be a folder, a .json or a .html file"),
        (["--report", "a.json", "train.py"], "--report must be a folder, a .json or a .html file"),
        (["--report", "x" * 300, "train.py"], "--report must be a place that can be written, got"),
        (["--report", "train.py", "train.py"], "--report must be a folder, a .json or a .html file"),
        (["--disable", "tf23", "train.py"], "--disable names an unknown strategy 'tf23'; did you mean 'tf32'?"),
        (
            ["--enable", "tf32", "--disable", "tf32", "train.py"],
            "--enable and --disable both name tf32; keep",
        ),
    ],
)
def test_bad_input_is_one_sentence_before_the_script_runs(
    tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "print('ran')")
    (tmp_path / "a.json").mkdir()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["run", *arguments])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_the_strategies_that_are_named_are_those_of_the_registry() -> None:
    assert registered_strategies() == set(strategies.names())


@pytest.mark.parametrize("option", [["--nproc", "2"], ["--nproc=2"]])
def test_nproc_is_torchrun_s_launcher_on_the_same_command(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, started = tmp_path / "train.py", list[list[str]]()
    train.write_text("")
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    arguments = ["run", *option, "--no-cache", str(train), "--nproc", "5"]
    monkeypatch.setattr(sys, "argv", ["accel", *arguments])
    assert CliRunner().invoke(main, arguments).exit_code == 0
    own = ["run", "--no-cache", str(train), "--nproc", "5"]
    assert started == [["--standalone", "--nproc-per-node=2", "-m", "accel", *own]]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "must not be given under torchrun" in CliRunner().invoke(main, arguments).output


@pytest.mark.slow
def test_nproc_starts_ranks_with_the_script_and_its_arguments(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])")
    done = warm.run(["-m", "accel", "run", "--nproc", "2", str(train), "--", "--nproc", "5"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 ['--nproc', '5']" for rank in range(2)]


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ([True], ""),
        ([True, True], ""),
        ([False, False], ""),
        (
            [True, False, False, False],
            "the script used 1 of 4 GPUs; with DistributedDataParallel, started by accel run ",
        ),
    ],
)
def test_gpus_that_a_script_has_not_used_are_told_in_a_line(used: list[bool], said: str) -> None:
    line = run_module.unused_gpus(used)
    assert line.startswith(f"accel: {said}" if said else "") and bool(line) == bool(said)
    assert "\n" not in line


def test_ranks_follow_their_models_at_the_same_step(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        for epoch in range(2):
            for x, y in loader:
                loss = step(x, y)
        print(loss.item().hex())
        torch.distributed.destroy_process_group()
        """,
    )
    command = ["-m", "accel", "run", "--allow", "exact", "--report", "report.json", "train.py"]
    ranks = warm.run_ranks(2, command, cwd=tmp_path, before=QUIET)
    plain = warm.run_ranks(2, ["train.py"], cwd=tmp_path)

    assert [done.returncode for done in ranks] == [0, 0]
    assert [done.stdout for done in ranks] == [done.stdout for done in plain]
    assert ranks[1].stderr == ""
    assert "accel stopped" not in ranks[0].stderr
    report = Report.load(tmp_path / "report.json")
    assert (report.model, report.machine.world_size) == ("DistributedDataParallel", 2)
    assert report.steps >= 76


def test_what_waits_for_an_import_is_done_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    after_import("waited_for", lambda: seen.append(sys.modules["waited_for"].value))
    assert importlib.util.find_spec("waited_for") is not None  # as libraries ask whether there is one
    assert seen == []
    import waited_for  # type: ignore[import-not-found]

    assert seen == [1] and waited_for.value == 1
    assert type(waited_for.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(waited_for.__loader__)
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "accel.commands.script_job"]
    after_import("waited_for", lambda: seen.append(2))
    assert seen == [1, 2]
    del sys.modules["waited_for"]


def test_what_waits_for_an_import_waits_for_the_module_of_accel_s_own_that_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may import the same module, of which only a part is there yet."""
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").write_text("")
    (tmp_path / "ours" / "outer.py").write_text("from ours import inner\nlast = 3\n")
    (tmp_path / "ours" / "inner.py").write_text("import waited_for\nlast = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("accel.commands.script_job._OWN", "ours.")
    seen: list[int] = []
    after_import("waited_for", lambda: seen.append(sys.modules["ours.outer"].last))
    from ours import outer  # type: ignore[import-not-found]

    assert seen == [3] == [outer.last]
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "accel.commands.script_job"]
    for name in ("waited_for", "ours", "ours.outer", "ours.inner"):
        del sys.modules[name]


def test_a_script_that_calls_optimize_itself_hears_of_that_call_alone(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import accel
        model, loader, optimizer = accel.optimize(model, loader, optimizer)
        for x, y in loader:
            step(x, y)
        """,
    )
    done = accel_run(tmp_path, "train.py")
    assert done.returncode == 0
    assert "nothing was made faster" not in done.stderr
    assert "following a loop" in done.stderr
