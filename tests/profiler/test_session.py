"""What a profiled run remembers of its steps once they are over."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel.profiler.diagnose import device_time
from accel.profiler.evidence import LoaderFacts, SyncPoint, TraceSummary
from accel.profiler.gather import Exchange
from accel.profiler.loop.device import Backlog
from accel.profiler.loop.facts import Trained
from accel.profiler.phases import Measurement
from accel.profiler.session import WARM_UP, ProfileSession
from accel.profiler.system.sampler import _Sample


def train(
    session: ProfileSession, *, around: Any, within: Any = nullcontext, threads: int = 1, after: Any = lambda: None
) -> None:
    """Take twelve steps."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = torch.randn(48, 4)
    before = torch.get_num_threads()
    session.start()
    torch.set_num_threads(threads)
    try:
        with around():
            for x in DataLoader(rows, batch_size=4):
                optimizer.zero_grad()
                with within():
                    model(x).square().sum().backward()
                optimizer.step()
        after()
    finally:
        torch.set_num_threads(before)
        session.stop()


def profiled(**options: Any) -> ProfileSession:
    session = ProfileSession(confirm=False, trace_file=None, exchange=Exchange())
    train(session, **options)
    return session


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("where", ["around", "within"])
def test_anomaly_mode_of_the_steps_outlives_its_context(where: str) -> None:
    contexts: dict[str, Any] = {"around": nullcontext, where: torch.autograd.detect_anomaly}

    assert profiled(**contexts).evidence().anomaly_mode
    assert not torch.is_anomaly_enabled()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_outside_of_the_steps_is_none_of_theirs() -> None:
    session = profiled(around=nullcontext)
    with torch.autograd.detect_anomaly():
        assert not session.evidence().anomaly_mode


def test_what_was_trained_is_known_once_the_script_has_let_go_of_it() -> None:
    session = profiled(around=nullcontext)
    gc.collect()

    assert len(session.recorder.optimizers) == 0
    trained = session.evidence().optimizer
    assert (trained.name, trained.tensors, trained.elements) == ("SGD", 2, 10)


def test_threads_are_those_of_the_steps() -> None:
    before = torch.get_num_threads()

    assert profiled(around=nullcontext, threads=before + 2).evidence().threads == before + 2
    assert torch.get_num_threads() == before


def test_cuda_is_not_started_before_the_script_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start on, ranks that use it can't be forked, and the script can't choose its GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("this starts CUDA"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: pytest.fail("this starts CUDA"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    session = profiled(around=nullcontext)
    assert session.recorder.events is not None and session.recorder.events.taken == {}
    assert len(session.steps) == 12 - WARM_UP


def begun(stage: str, monkeypatch: pytest.MonkeyPatch) -> ProfileSession:
    """Return a session that gets to this stage within a few steps."""
    if stage == "watching":
        monkeypatch.setattr(ProfileSession, "_observed_enough", lambda session, seconds: len(session.steps) >= 3)
        monkeypatch.setattr(ProfileSession, "_traced", lambda session: iter(()))
    return ProfileSession(confirm=False, trace_file=None, exchange=Exchange())


@pytest.mark.parametrize("stage", ["observing", "watching"])
def test_what_the_script_does_after_its_last_step_counts_nowhere(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = begun(stage, monkeypatch)
    before: list[float] = []

    def collect() -> None:
        before.append(session._gc.share())
        for _ in range(5):
            gc.collect()
        now = session.recorder.clock.now()
        with session._sampler._lock:
            session._sampler._pending.append(_Sample(now, ("outside", "after.py", 1), 2.0, 1.0, set()))

    train(session, around=nullcontext, after=collect)
    seen = session.evidence()

    assert session.stage == stage
    assert [seen.gc_share] == before
    assert not [line for line in seen.lines if line.file == "after.py"]


@pytest.mark.parametrize("stage", ["observing", "watching"])
def test_workers_count_in_the_steps_and_not_in_an_evaluation(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent ones sleep through it."""
    session = begun(stage, monkeypatch)
    monkeypatch.setattr(session.recorder, "loader_facts", lambda: LoaderFacts(kind="DataLoader", workers=1))
    monkeypatch.setattr(session.recorder, "worker_pids", lambda: [os.getpid()])
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = torch.randn(48, 4)
    training, evaluation = DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=24)
    counted: dict[str, list[bool]] = {"training": [], "evaluation": []}
    session.start()
    try:
        for _ in range(3):
            for x in training:
                counted["training"].append(session._workers._counts)
                model(x).square().sum().backward()
                optimizer.step()
            with torch.no_grad():
                for x in evaluation:
                    counted["evaluation"].append(session._workers._counts)
                    model(x)
    finally:
        session.stop()

    assert session.stage == stage
    assert all(counted["training"][12:]) and not any(counted["evaluation"])
    assert not session._workers._meters  # all files are closed


def test_a_step_that_was_slow_once_is_left_out_of_every_share() -> None:
    session = profiled(around=nullcontext)
    waits = {n: 4.0 if n == 20 else 0.002 for n in range(50)}
    session.steps.clear()
    for n, wait_s in waits.items():
        session.steps.append(Measurement(step=n, seconds=0.018 + wait_s, phases={"data": 0.018, "backward": wait_s}))
        session._ddp_wait._seconds.append((n, wait_s))
    seen = session.evidence()

    assert [m.step for m in seen.one_offs] == [20]
    assert seen.ddp_wait_share == pytest.approx(0.1)


class Event:
    """Is passed at once, a second after the one before it."""

    recorded = 0

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


@pytest.mark.parametrize("enough", [True, False])
def test_steps_have_a_gpu_s_times_if_enough_were_read(enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ProfileSession, "_trained", lambda session: Trained(device=torch.device("cuda", 0)))
    monkeypatch.setattr("accel.profiler.session.events_on", lambda device: Event)
    monkeypatch.setattr(device_time, "MIN_TIMED", 5 if enough else 50)
    seen = profiled(around=nullcontext).evidence()

    timed = [measured for measured in seen.steps if measured.phases["forward"] == 1.0]
    assert len(seen.steps) == 12 - WARM_UP
    assert len(timed) == (12 - WARM_UP - 1 if enough else 0)
    assert all(measured.seconds == sum(measured.phases.values()) > 3 for measured in timed)
    assert (seen.host_ms.get("forward", 0.0) > 0) == enough
    assert (device_time.UNSEEN in seen.unseen) != enough


def test_products_are_held_against_those_of_the_script_s_dtype() -> None:
    session = profiled(around=nullcontext)
    seen = session.evidence()
    seen.device, seen.dtype = "cuda", "float64"
    seen.trace = summary(dtypes={"float32": 0.2, "bfloat16": 0.8})
    assert session._dtypes(seen) == [torch.float32, torch.float64, torch.bfloat16]
    seen.device = "cpu"
    assert session._dtypes(seen) == [torch.float32, torch.float64]


def summary(**given: Any) -> TraceSummary:
    shares = {"small_share": 0.0, "matmul_share": 1.0, "elementwise_share": 0.0}
    return TraceSummary(steps=2, ops=[], ops_per_step=1, **shares, **given)


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> ProfileSession:
    monkeypatch.setattr(ProfileSession, "_trained", lambda session: Trained(device=torch.device("cuda", 0)))
    monkeypatch.setattr("accel.profiler.session.events_on", lambda device: Event)
    return ProfileSession(confirm=True, trace_file=None, exchange=Exchange())


def test_the_window_with_stacks_tells_lines_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SyncPoint(name="item", file="", line=0, calls=1, ms=4)
    placed = SyncPoint(name="item", file="train.py", line=7, calls=1, ms=90)

    def window(session: ProfileSession, steps: int, file: Any, *, stacks: bool = False) -> Any:
        yield from ()
        return summary(syncs=[placed if stacks else plain])

    monkeypatch.setattr(ProfileSession, "_window", window)
    session = on_cuda(monkeypatch)
    list(session._traced())

    assert session._trace is not None
    assert [(sync.line, sync.ms) for sync in session._trace.syncs] == [(7, 4)]


@pytest.mark.parametrize("cause", ["sync.read", "host.gc"])
def test_an_experiment_counts_what_a_gpu_still_has_to_do(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def experiment(switch: Any, **options: Any) -> Any:
        seen.update(options, calls=session.recorder.on_call)
        yield from ()

    monkeypatch.setattr("accel.profiler.session.experiment", experiment)
    monkeypatch.setattr(ProfileSession, "_suspects", lambda session: [cause])
    session = on_cuda(monkeypatch)
    list(session._try())

    assert isinstance(seen["backlog"], Backlog)
    # What may get a loop stuck is what changes what the model learns.
    assert (seen["calls"] == session.recorder.pauses.called) == (cause == "sync.read")
    assert session.recorder.on_call is None
    monkeypatch.setattr(ProfileSession, "_trained", lambda session: Trained())
    assert session._backlog() is None
