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
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.compile import compile_ahead, compiled_draws
from accel.compile.compile_ahead import CompileAhead, CoreUse
from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies import torch_compile
from accel.strategies.torch_compile import BLOCKS, REPEATED_SHARE, WHOLE, TorchCompile
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
from accel.compile.compile_ahead import CompileAhead
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


def make(
    monkeypatch: pytest.MonkeyPatch, cores: int = 8, others: float | None = 0.0, **loader: Any
) -> tuple[TorchCompile, Run]:
    monkeypatch.setattr(compile_ahead, "CompileAhead", FakeHelper)
    monkeypatch.setattr(CoreUse, "look", lambda self: others)
    monkeypatch.delenv("TORCHINDUCTOR_FX_GRAPH_CACHE", raising=False)
    model = Stack(2)
    data = DataLoader(TensorDataset(torch.zeros(4, 1)), **loader)
    run = Run(model, data, [], Gate(model, ["torch_compile"]), Fetching(), cores=cores)
    run.observed.call_shapes[((4, 5, WIDTH),)] = 20
    return TorchCompile(), run


def test_it_is_started_in_a_training_call_of_the_usual_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch)
    expected = strategy.compiling_s(run, BLOCKS)
    assert strategy.waits(run) == "a helper process compiles: blocks"
    helper: Any = strategy._helper
    with torch.no_grad():
        run.model(torch.randn(4, 5, WIDTH))
    run.model(torch.randn(2, 5, WIDTH))
    assert helper.is_due
    run.model(torch.randn(4, 5, WIDTH))
    assert not helper.is_due
    assert strategy.waits(run)
    assert strategy.trial_design(run).is_preparing

    helper.ended = True
    assert strategy.waits(run) == ""
    assert not strategy.trial_design(run).is_preparing
    assert not run.gate.wrapped
    assert strategy.compiling_s(run, BLOCKS) == expected
    assert strategy.waits(run) == ""  # the same setting is not compiled twice


def test_ranks_that_share_the_cores_leave_none_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch, cores=2 * torch.get_num_threads() + 1)
    run.world_size = 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not torch_compile._no_room(run)
    run.cores -= 1
    assert torch_compile._no_room(run) == "the loop uses all cores"
    assert strategy.waits(run) == ""


def test_where_it_gives_nothing_the_loop_compiles_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch)
    assert strategy.waits(run)
    helper: Any = strategy._helper
    expected = strategy.compiling_s(run, BLOCKS)
    helper.problem, helper.ended = "it ended with status 3", True
    assert strategy.waits(run) == ""
    assert strategy.compiling_s(run, BLOCKS) == pytest.approx(expected / REPEATED_SHARE)


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
    assert not strategy.trial_design(run).is_preparing


def test_after_a_change_of_the_batch_it_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch)
    run.observed.note_batch((4, 5))
    assert strategy.waits(run)
    first: Any = strategy._helper
    run.observed.note_batch((8, 5))
    run.observed.call_shapes[((8, 5, WIDTH),)] = 20
    assert strategy.waits(run) == "a helper process compiles: blocks"
    second: Any = strategy._helper
    assert first.stopped and second is not first
    run.model(torch.randn(4, 5, WIDTH))
    assert second.is_due
    run.model(torch.randn(8, 5, WIDTH))
    assert not second.is_due
    second.ended = True
    assert strategy.waits(run) == ""
    run.observed.note_batch((4, 5))
    assert strategy.waits(run) == "a helper process compiles: blocks"


def test_other_processes_may_leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(monkeypatch, cores=torch.get_num_threads() + 2, others=None)
    expected = strategy.compiling_s(run, BLOCKS)
    assert strategy.waits(run) == "whether a core is idle is being measured"
    assert not strategy.trial_design(run).is_preparing
    monkeypatch.setattr(CoreUse, "look", lambda self: 1.5)
    assert strategy.waits(run) == ""
    assert not strategy.trial_design(run).is_preparing
    assert strategy.compiling_s(run, BLOCKS) == pytest.approx(expected / REPEATED_SHARE)


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


@pytest.mark.slow
def test_the_loop_goes_on_until_the_helper_has_ended_and_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [TorchCompile])
    monkeypatch.setattr(compiled_draws, "compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))
    monkeypatch.setattr(CoreUse, "look", lambda self: 0.0)
    monkeypatch.setattr(torch_compile, "_idle_cores", lambda run: 1)
    monkeypatch.setattr(torch_compile, "_START_S", 0.01)
    monkeypatch.setattr(torch_compile, "_LAYER_S", 0.0)
    monkeypatch.setattr(torch_compile, "_REPEATED_LAYER_S", 0.0)

    def training(model: nn.Module, loader: Any, optimizer: Any) -> Iterator[None]:
        while True:
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                yield

    def begin() -> tuple[Any, Any, Any]:
        model = Stack(2)
        data = TensorDataset(torch.randn(30, 5, WIDTH, generator=torch.Generator().manual_seed(1)))
        return model, DataLoader(data, batch_size=4), torch.optim.SGD(model.parameters(), 0.01)

    torch.compiler.reset()
    model, loader, optimizer = accel.optimize(*begin(), budget=60, cache=False)
    steps, loop, deadline = 0, training(model, loader, optimizer), time.monotonic() + 300
    row = accel.explain(model).rows[0]
    while row.status == "not tried":
        assert time.monotonic() < deadline, row.why
        next(loop)
        steps += 1
        row = accel.explain(model).rows[0]
    assert row.status in ("kept", "undone", "inconclusive"), row.why
    assert not row.why.startswith("wrong")
    texts = [event.text for event in accel.explain(model).events]
    assert any(text.startswith("torch_compile was prepared beside the loop") for text in texts), texts
    assert any(text.startswith("torch_compile blocks: one-off work took") for text in texts), texts
    accel.undo(model)

    plain, plain_loader, plain_optimizer = begin()
    plain_loop = training(plain, plain_loader, plain_optimizer)
    for _ in range(steps):
        next(plain_loop)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    torch.compiler.reset()


# -- with the real compiler --------------------------------------------------------------------------------------------

COMPILES = """
import sys, time, torch
from torch._dynamo.utils import counters
from accel.compile.compile_ahead import CoreUse
from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.torch_compile import TorchCompile
from tests.accel.strategies.test_torch_compile import Stack, WIDTH

torch.set_num_threads(1)
model, x = Stack(3, drop=0.2), torch.randn(4, 5, WIDTH)
plain = torch.nn.Linear(4, 4)
for _ in range(3):  # this process has used its threads, and autograd
    model(x).sum().backward()
run = Run(model, [], [], Gate(model, ["torch_compile"]), Fetching(), cores=8)
run.observed.call_shapes[(tuple(x.shape),)] = 20
strategy = TorchCompile()
CoreUse.look = lambda self: 0.0  # whatever the machine does
expected = strategy.waits(run)
steps = 0
while strategy.waits(run):
    model(x).sum().backward()
    steps += 1
    time.sleep(0.05)
assert strategy._helped == {"blocks": ""}, strategy._helped
strategy.enable(run, "blocks")
model(x).sum().backward()
found = counters["aot_autograd"]
print(expected, steps > 0, found["autograd_cache_hit"], found["autograd_cache_miss"], sep=",")
"""


@pytest.mark.slow
def test_what_the_helper_has_compiled_is_found_in_the_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "a helper process compiles: blocks,True,1,0", done.stderr
