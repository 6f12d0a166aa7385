"""Errors and interrupts of the user's own code pass through accel as if it were not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

import accel
from accel.dataio.engine.processes import ProcessEngine
from accel.profiler.script import Script
from accel.report import Report
from accel.search.plan import Plan, fingerprint
from accel.strategies.loader_workers import LoaderWorkers
from tests import warm
from tests.accel.guard_replays import broken, same
from tests.accel.loops import (
    Net,
    Quick,
    Samples,
    advance,
    advance_until,
    assert_same,
    everything,
    in_trial,
    loss_of,
    make_loader,
    settled,
    training,
)
from tests.forks import ROOT

PLACES = ("forward", "loss", "dataset", "collate")


class BrokenSample(Exception):
    """The user's own error, with arguments of its own."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(f"{where} is broken at {number}")
        self.where = where


class Fault:
    """Where the user's code is to raise, and what."""

    where: ClassVar[str] = ""
    error: ClassVar[BaseException] = BrokenSample("nothing", 0)


def fail_if(where: str) -> None:
    if Fault.where == where:
        raise Fault.error


@pytest.fixture(autouse=True)
def _no_fault_stays() -> Iterator[None]:
    yield
    Fault.where = ""


class FaultyNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        fail_if("forward")
        return super().forward(x)


class FaultySamples(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        fail_if("dataset")
        return super().__getitem__(index)


def faulty_collate(samples: list[Any]) -> Any:
    fail_if("collate")
    return default_collate(samples)


def faulty_loss(outputs: Tensor, target: Tensor) -> Tensor:
    fail_if("loss")
    return loss_of(outputs, target)


def make_faulty() -> tuple[FaultyNet, Any, torch.optim.SGD]:
    torch.manual_seed(0)
    model = FaultyNet()
    loader = make_loader(FaultySamples(), collate_fn=faulty_collate)
    return model, loader, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def go_to(phase: str, loop: Iterator[list[int]], model: FaultyNet) -> int:
    if phase == "observe":
        return len(advance(loop, 3))
    return advance_until(loop, in_trial if phase == "trial" else settled(model))


@pytest.mark.sample(3)
@pytest.mark.parametrize("phase", ["observe", "trial", "hold"])
@pytest.mark.parametrize("where", PLACES)
def test_an_error_passes_through_as_it_is(only_quick: None, phase: str, where: str) -> None:
    model, loader, optimizer = accel.optimize(*make_faulty(), allow="exact", budget=60)
    loop = training(model, loader, optimizer, loss=faulty_loss)
    steps = go_to(phase, loop, model)
    Fault.where, Fault.error = where, BrokenSample(where, 3)

    with pytest.raises(BrokenSample) as caught:
        advance(loop, 1)

    assert caught.value is Fault.error
    assert str(caught.value) == f"{where} is broken at 3"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    frames = [Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail_if"
    assert frames[-1] == frames[-2] == Path(__file__)  # what raised, and the user's function that called it
    assert accel.explain(model).rows[0].status in ("not tried", "kept")  # no strategy is to blame

    # A loop that leaves the broken batch out goes on, and so does the search.
    Fault.where = ""
    loop = training(model, loader, optimizer, loss=faulty_loss)
    advance_until(loop, settled(model), limit=600) if phase != "hold" else advance(loop, 20)
    assert accel.explain(model).plan == {"quick": None}
    assert steps > 0


def test_an_error_in_a_worker_process_is_the_dataset_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loader_workers` fetches in other processes; the loop still sees the error where it belongs."""
    monkeypatch.setattr(LoaderWorkers, "refusal", lambda *_: "")  # on one core, too

    class Broken(Samples):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == 330:
                raise BrokenSample("sample", index)
            return super().__getitem__(index)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plan = Plan(fingerprint=fingerprint(model), model="Net", strategies={"loader_workers": 1})
    model, loader, optimizer = accel.optimize(model, make_loader(Broken(400), shuffle=False), optimizer, plan=plan)
    loop = training(model, loader, optimizer)
    numbers = advance(loop, 41)
    assert accel.explain(model).plan == {"loader_workers": 1}

    with pytest.raises(BrokenSample, match=r"^sample is broken at 330$") as caught:
        next(loop)

    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "__getitem__"
    assert caught.value.__context__ is None
    assert numbers == [list(range(i, i + 8)) for i in range(0, 328, 8)]


def test_a_time_limit_while_the_loop_waits_for_a_worker_process_is_no_fault_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop gets it, and goes on with the very batch that it has waited for."""

    def handle(signum: int, frame: Any) -> None:
        raise TimeoutError("out of time")

    def waits(engine: ProcessEngine, serial: int) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(LoaderWorkers, "refusal", lambda *_: "")  # on one core, too
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plan = Plan(fingerprint=fingerprint(model), model="Net", strategies={"loader_workers": 1})
    data = make_loader(Samples(400), shuffle=False)
    model, loader, optimizer = accel.optimize(model, data, optimizer, plan=plan)
    numbers, batches, before = list[int](), iter(loader), signal.signal(signal.SIGUSR1, handle)
    try:
        for number in range(50):
            if number == 30:
                monkeypatch.setattr(ProcessEngine, "_await", waits)
                with pytest.raises(TimeoutError, match="out of time") as caught:
                    next(batches)
                assert caught.value.__context__ is None
            x, target = next(batches)
            numbers += target.tolist()
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert numbers == list(range(400))
    assert accel.explain(model).plan == {"loader_workers": 1}


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_an_interrupt_in_the_middle_of_a_trial_leaves_a_loop_that_goes_on(only_quick: None) -> None:
    def run(optimized: bool, steps: int = 0) -> tuple[int, dict[str, Tensor]]:
        model, loader, optimizer = make_faulty()
        if optimized:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
        loop = training(model, loader, optimizer)
        steps = len(advance(loop, steps)) or advance_until(loop, in_trial)
        Fault.where, Fault.error = "forward", KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            next(loop)
        Fault.where = ""
        advance(training(model, loader, optimizer), 30)
        accel.undo(model)
        assert not Quick.on
        advance(training(model, loader, optimizer), 30)
        return steps, everything(model, optimizer)

    steps, interrupted = run(True)
    assert_same(interrupted, run(False, steps)[1])


def test_an_interrupt_in_a_replay_leaves_no_trace(only_quick: None) -> None:
    """The guard calls the model between two steps; an interrupt there must not leave a half-made replay behind."""
    model, _, optimizer = make_faulty()
    model, loader, optimizer = accel.optimize(
        model, make_loader(Samples(400), shuffle=False), optimizer, allow="exact", budget=60
    )
    batches, seen, interrupts = iter(loader), [], 0
    for _ in range(40):
        before = everything(model, optimizer)
        Fault.where, Fault.error = "forward", KeyboardInterrupt()  # calls here are not the loop's own
        try:
            x, target = next(batches)
        except KeyboardInterrupt:
            interrupts += 1
            assert_same(everything(model, optimizer), before)
            assert not Quick.on
            continue
        finally:
            Fault.where = ""
        seen += target.tolist()
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()

    assert interrupts >= 1
    assert seen == list(range(len(seen)))  # no batch was lost
    accel.undo(model)
    assert "_compiled_call_impl" not in vars(model)


def test_the_same_call_begins_anew_after_an_interrupt_while_accel_decided(only_quick: None) -> None:
    """As where a cell of a notebook is run again."""
    model, loader, optimizer = make_faulty()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    session = accel.entry.MODELS[model].session  # type: ignore[attr-defined]

    def interrupt() -> Any:
        raise KeyboardInterrupt
        yield

    session.runner.make_decisions = interrupt
    with pytest.raises(KeyboardInterrupt):
        advance(training(model, loader, optimizer), 10)
    assert not session.alive
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    advance(training(model, loader, optimizer), 30)
    assert accel.entry.MODELS[model].session.alive  # type: ignore[attr-defined]
    accel.undo(model)


_SCRIPT = """
import sys, torch, accel
from pathlib import Path
from accel import strategies
from tests.accel.loops import Net, Quick, Samples, in_trial, make, training
strategies.REGISTRY[:] = [Quick]
model, loader, optimizer = make()
model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, report="out")
go_on = sys.argv[1] == "go on"
try:
    for _ in training(model, loader, optimizer):
        if in_trial():
            Path("trial").touch()
            while in_trial():
                torch.nn.functional.mse_loss(model(torch.zeros(8, 6)), torch.ones(8, 3)).backward()
except KeyboardInterrupt:
    if not go_on:
        raise
before = model.head.weight.detach().clone()
loop = training(model, loader, optimizer)
for _ in range(20):
    next(loop)
print("trained" if model.head.weight.isfinite().all() and not torch.equal(before, model.head.weight) else "stuck")
"""


@pytest.mark.parametrize("way", ["end", "go on"])
def test_a_run_that_is_interrupted_writes_its_report(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    running = warm.Running(["train.py", way], cwd=tmp_path)
    try:
        warm.wait_for(tmp_path / "trial")
        os.kill(running.pid, signal.SIGINT)
        done = running.wait()
    finally:
        running.kill()
    code, out, err = done.returncode, done.stdout, done.stderr

    if way == "go on":
        assert code == 0, err
        assert out == "trained\n"
    else:
        assert code == -signal.SIGINT, err
        *_, error, told = err.rstrip().splitlines()
        assert error == "KeyboardInterrupt"
        assert "before the search for Net had a verdict" in told
    assert "Exception ignored" not in err
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "report.html", "report.json"]
    report = Report.load(folder / "report.json")
    assert report.state == "interrupted"
    assert report.steps > 10
    assert (folder / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    plan = Plan.load(folder / "plan.json")
    assert plan.strategies == report.plan == {}
    plan.check(Net())


def test_an_interpreter_that_was_interrupted_and_went_on_ends_as_it_would() -> None:
    """With Ctrl-D, long after Ctrl-C in one statement."""
    typed = "import accel.entry\nraise KeyboardInterrupt\nprint('went on')\n"
    done = subprocess.run(
        [sys.executable, "-i"], input=typed, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.stdout == "went on\n"
    assert done.returncode == 0, done.stderr


def test_a_script_that_fails_in_its_model_shows_no_frames_of_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise BrokenSample("forward", 3)

    gate, watch, _ = broken(Fails(), same)
    with Script("none.py", []):
        watch.call(gate.call, (torch.randn(8, 6),), {})
    printed = capsys.readouterr().err
    assert printed.count("in forward") == printed.count("forward is broken at 3") == 1
    assert not any(os.path.join("accel", folder, "") in printed for folder in ("guard", "run", "profiler"))
