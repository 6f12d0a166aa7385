"""The helper process that compiles: it gives what it can, and is out of the way whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies import compile_ahead, torch_compile
from accel.strategies.compile_ahead import CompileAhead
from accel.strategies.torch_compile import BLOCKS, WHOLE, TorchCompile
from tests.accel.strategies.test_torch_compile import WIDTH, Stack

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a helper process needs Linux")


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import no compiler in the helper process: what these tests do there compiles nothing."""
    monkeypatch.setattr(compile_ahead, "_compile_alone", lambda: None)


@pytest.fixture
def helper() -> Iterator[CompileAhead]:
    helper = CompileAhead(threads=1)
    yield helper
    helper.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] in "ZX"
    except OSError:
        return True


def test_it_works_in_another_process_and_changes_nothing_here(helper: CompileAhead, tmp_path: Path) -> None:
    model, facts = nn.Linear(4, 4), tmp_path / "facts"
    state = torch.get_rng_state()

    def work() -> None:
        with torch.no_grad():
            model.weight.zero_()
        grads = torch.autograd.grad(model(torch.randn(2, 4)).sum(), [model.weight])
        assert grads[0].shape == (4, 4)
        autocast = torch.is_autocast_enabled("cpu")
        facts.write_text(f"{os.getpid()} {os.getpgid(0)} {os.nice(0)} {autocast} {torch.get_num_threads()}")

    assert helper.is_due
    with torch.autocast("cpu", dtype=torch.bfloat16):
        helper.start(work)
    assert not helper.is_due
    process = helper._process
    wait_for(helper.has_ended)
    assert helper.problem == ""
    assert facts.read_text().split() == [str(process), str(process), "19", "True", "1"]
    assert is_gone(process)
    assert model.weight.abs().sum() > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert helper.has_ended()


def test_a_failure_there_is_a_reason_and_not_an_error(helper: CompileAhead, capfd: pytest.CaptureFixture[str]) -> None:
    helper.start(lambda: 1 / 0)
    wait_for(helper.has_ended)
    assert helper.problem == "it ended with status 3"
    assert capfd.readouterr() == ("", "")


def test_a_process_that_can_t_be_forked_is_a_reason_too(helper: CompileAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "fork", fork)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    helper.start(lambda: None)
    assert helper.has_ended()
    assert helper.problem == "it could not be started: no memory"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_stopping_ends_it_and_what_it_has_started(helper: CompileAhead, tmp_path: Path) -> None:
    child = tmp_path / "child"

    def work() -> None:
        compiler = subprocess.Popen(["sleep", "600"])
        child.with_suffix(".part").write_text(str(compiler.pid))
        child.with_suffix(".part").rename(child)
        compiler.wait()

    helper.start(work)
    process = helper._process
    wait_for(child.exists)
    assert not helper.has_ended()
    helper.stop()
    assert is_gone(process)
    wait_for(lambda: is_gone(int(child.read_text())))
    assert helper.has_ended()
    assert helper.problem == "it was ended"
    helper.stop()


def test_one_that_takes_too_long_is_ended() -> None:
    times = iter([0.0, 599.0, 601.0])
    helper = CompileAhead(threads=1, clock=lambda: next(times))
    helper.start(lambda: time.sleep(600))
    assert not helper.has_ended()
    assert helper.has_ended()
    assert helper.problem == "it took more than 600 s"


def test_a_loop_that_waits_for_all_its_children_is_no_error(helper: CompileAhead) -> None:
    helper.start(lambda: None)
    os.waitpid(helper._process, 0)
    assert helper.has_ended()
    assert helper.problem


def test_files_and_handlers_of_the_loop_are_not_its_own(helper: CompileAhead, tmp_path: Path) -> None:
    """A pipe ends when the loop closes it, and a signal to the helper does not run the loop's handler."""
    wrote = tmp_path / "wrote"
    former = signal.signal(signal.SIGTERM, lambda *_: wrote.write_text("a checkpoint"))
    reading, writing = os.pipe()
    try:
        ready = tmp_path / "ready"

        def work() -> None:
            ready.touch()
            time.sleep(600)

        helper.start(work)
        wait_for(ready.exists)
        os.close(writing)
        assert os.read(reading, 1) == b""
        os.kill(helper._process, signal.SIGTERM)
        wait_for(helper.has_ended)
        assert helper.problem == f"it ended with status {-signal.SIGTERM}"
        assert not wrote.exists()
    finally:
        os.close(reading)
        signal.signal(signal.SIGTERM, former)


LEFT_BEHIND = """
import os, sys, time
from accel.strategies.compile_ahead import CompileAhead
helper = CompileAhead(threads=1)
helper.start(lambda: time.sleep(600))
print(helper._process, flush=True)
if sys.argv[1] == "exit":
    sys.exit()
if sys.argv[1] == "Ctrl-C":
    raise KeyboardInterrupt
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["exit", "Ctrl-C", "killed"])
def test_it_is_never_left_behind(ending: str) -> None:
    command = [sys.executable, "-c", LEFT_BEHIND, ending]
    loop = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert loop.stdout is not None
    process = int(loop.stdout.readline())
    if ending == "killed":
        loop.kill()
    loop.wait(120)
    loop.stdout.close()
    wait_for(lambda: is_gone(process))


# -- as the strategy uses it -------------------------------------------------------------------------------------------


class FakeHelper:
    """Keeps what it is to do, and ends when it is told to."""

    def __init__(self, threads: int) -> None:
        self.work: Any = None
        self.ended = self.stopped = False
        self.problem = ""

    @property
    def is_due(self) -> bool:
        return self.work is None

    def start(self, work: Any) -> None:
        self.work = work

    def has_ended(self) -> bool:
        return self.ended

    def stop(self) -> None:
        self.stopped = True


def make(monkeypatch: pytest.MonkeyPatch, cores: int = 8, **loader: Any) -> tuple[TorchCompile, Run]:
    monkeypatch.setattr(compile_ahead, "CompileAhead", FakeHelper)
    monkeypatch.delenv("TORCHINDUCTOR_FX_GRAPH_CACHE", raising=False)
    model = Stack(2)
    data = DataLoader(TensorDataset(torch.zeros(4, 1)), **loader)
    run = Run(model, data, [], Gate(model, ["torch_compile"]), Fetching(), cores=cores)
    run.observed.call_shapes[((4, 5, WIDTH),)] = 20
    return TorchCompile(), run


def test_it_is_started_in_a_training_call_of_the_usual_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch)
    expected = strategy.expected_s(run, BLOCKS)
    assert strategy.waits(run) == "a helper process compiles: blocks"
    helper: Any = strategy._helper
    with torch.no_grad():
        run.model(torch.randn(4, 5, WIDTH))
    run.model(torch.randn(2, 5, WIDTH))
    assert helper.is_due
    run.model(torch.randn(4, 5, WIDTH))
    assert not helper.is_due
    assert strategy.waits(run)
    assert strategy.is_preparing

    helper.ended = True
    assert strategy.waits(run) == ""
    assert not strategy.is_preparing
    assert not run.gate.wrapped
    assert strategy.expected_s(run, BLOCKS) == expected
    assert strategy.repeats(BLOCKS) == 1.0
    assert strategy.waits(run) == ""  # the same setting is not compiled twice


def test_where_it_gives_nothing_the_loop_compiles_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch)
    assert strategy.waits(run)
    helper: Any = strategy._helper
    expected = strategy.expected_s(run, BLOCKS)
    helper.problem, helper.ended = "it ended with status 3", True
    assert strategy.waits(run) == ""
    assert strategy.expected_s(run, BLOCKS) == pytest.approx(expected / strategy.repeated_share)
    assert strategy.repeats(BLOCKS) == strategy.repeated_share


def test_another_setting_is_prepared_while_the_first_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch)
    strategy.enable(run, BLOCKS)
    assert strategy.waits(run) == f"a helper process compiles: {WHOLE}"
    assert run.gate.wrapped
    helper: Any = strategy._helper
    strategy.disable(run)
    assert run.gate.wrapped
    strategy.close(run)
    assert helper.stopped
    assert not run.gate.wrapped
    assert not strategy.is_preparing


@pytest.mark.parametrize("why", ["cores", "workers", "cache", "system"])
def test_without_room_there_is_none(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    options: dict[str, Any] = {"num_workers": 1} if why == "workers" else {}
    strategy, run = make(monkeypatch, cores=threads + (why != "cores"), **options)
    if why == "cache":
        monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    if why == "system":
        monkeypatch.setattr(sys, "platform", "darwin")
    assert torch_compile._no_room(run)
    assert strategy.waits(run) == ""
    assert strategy._helper is None
