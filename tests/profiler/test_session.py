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

from accel.profiler.diagnose import step_times
from accel.profiler.evidence import LoaderFacts, SyncPoint, TraceSummary
from accel.profiler.experiments import whatif
from accel.profiler.experiments.counterfactuals import counterfactual
from accel.profiler.gather import Exchange
from accel.profiler.loop.device import Backlog
from accel.profiler.loop.facts import Trained
from accel.profiler.loop.recorder import Recorder
from accel.profiler.nvml import Nvml
from accel.profiler.phases import Measurement
from accel.profiler.session import WARM_UP, ProfileSession
from accel.profiler.system import instruments
from accel.profiler.system.instruments import _Sample
from accel.profiler.trace import roofline, window
from tests.profiler.test_device import Device


def train(
    session: ProfileSession,
    *,
    around: Any,
    within: Any = nullcontext,
    threads: int = 1,
    after: Any = lambda: None,
    steps: int = 12,
) -> None:
    """Take some steps."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = torch.randn(4 * steps, 4)
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
    assert session.evidence().model_name == "Linear"

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
        monkeypatch.setattr(window, "traced", lambda *args, **options: iter(()))
    return ProfileSession(confirm=False, trace_file=None, exchange=Exchange())


@pytest.mark.parametrize("stage", ["observing", "watching"])
def test_what_the_script_does_after_its_last_step_counts_nowhere(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = begun(stage, monkeypatch)
    before: list[float] = []

    def collect() -> None:
        before.append(session.instruments.collections.share())
        for _ in range(5):
            gc.collect()
        now = session.recorder.clock.now()
        with session.instruments.sampler._lock:
            session.instruments.sampler._pending.append(_Sample(now, ("outside", "after.py", 1), 2.0, 1.0, set()))

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
                counted["training"].append(session.instruments.workers._counts)
                model(x).square().sum().backward()
                optimizer.step()
            with torch.no_grad():
                for x in evaluation:
                    counted["evaluation"].append(session.instruments.workers._counts)
                    model(x)
    finally:
        session.stop()

    assert session.stage == stage
    assert all(counted["training"][12:]) and not any(counted["evaluation"])
    assert not session.instruments.workers._meters  # all files are closed


def test_a_step_that_was_slow_once_is_left_out_of_every_share() -> None:
    session = profiled(around=nullcontext)
    waits = {n: 4.0 if n == 20 else 0.002 for n in range(50)}
    session.steps.clear()
    for n, wait_s in waits.items():
        session.steps.append(Measurement(step=n, seconds=0.018 + wait_s, phases={"data": 0.018, "backward": wait_s}))
        session.instruments.ddp_wait._seconds.append((n, wait_s))
    seen = session.evidence()

    assert [m.step for m in seen.one_offs] == [20]
    assert seen.ddp_wait_share == pytest.approx(0.1)


@pytest.mark.parametrize("enough", [True, False])
def test_steps_have_a_gpu_s_times_if_enough_were_read(enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_cuda(monkeypatch)
    monkeypatch.setattr(step_times, "MIN_TIMED", 5 if enough else 50)
    seen = profiled(around=nullcontext).evidence()

    timed = [measured for measured in seen.steps if measured.phases["forward"] == 1.0]
    assert len(seen.steps) == 12 - WARM_UP
    assert len(timed) == (12 - WARM_UP - 1 if enough else 0)
    assert all(measured.seconds == sum(measured.phases.values()) > 3 for measured in timed)
    assert (seen.host_ms.get("forward", 0.0) > 0) == enough
    assert (step_times.UNSEEN in seen.unseen) != enough


def test_products_are_held_against_those_of_the_script_s_dtype() -> None:
    seen = profiled(around=nullcontext).evidence()
    seen.device, seen.dtype = "cuda", "float64"
    seen.trace = summary(dtypes={"float32": 0.2, "bfloat16": 0.8})
    assert roofline.dtypes_of(seen) == [torch.float32, torch.float64, torch.bfloat16]
    seen.device = "cpu"
    assert roofline.dtypes_of(seen) == [torch.float32, torch.float64]


def summary(**given: Any) -> TraceSummary:
    shares = {"small_share": 0.0, "matmul_share": 1.0, "elementwise_share": 0.0}
    return TraceSummary(steps=2, ops=[], ops_per_step=1, **shares, **given)


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "trained", Trained(device=torch.device("cuda", 0)))
    for place in (whatif, instruments):
        monkeypatch.setattr(place, "events_on", lambda device: Device().event)
    monkeypatch.setattr(Nvml, "start", lambda nvml, device: None)


def test_the_window_with_stacks_tells_lines_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Played(window.Window):
        def start(self) -> None:
            pass

        def stop(self, steps: int, *, shared: bool = False) -> TraceSummary:
            return summary(syncs=[next(found)])

    plain = SyncPoint(name="item", file="", line=0, calls=1, ms=4)
    found = iter([plain, SyncPoint(name="item", file="train.py", line=7, calls=1, ms=90)])
    monkeypatch.setattr(window, "Window", Played)
    course = window.traced(torch.device("cuda", 0), 2, None, [], shared=False)
    assert [next(course) for _ in range(3)] == [None] * 3
    with pytest.raises(StopIteration) as ended:
        next(course)

    assert [(sync.line, sync.ms) for sync in ended.value.value.syncs] == [(7, 4)]


def test_an_experiment_counts_what_a_gpu_still_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "trained", Trained())
    assert whatif.backlog_of(Recorder()) is None
    on_cuda(monkeypatch)
    assert isinstance(whatif.backlog_of(Recorder()), Backlog)


@pytest.mark.parametrize("cause", ["sync.read", "host.gc"])
def test_an_experiment_that_changes_learning_looks_at_each_call(cause: str) -> None:
    """What may get a loop stuck is what changes what the model learns."""
    recorder = Recorder()
    tried = counterfactual(cause, recorder)
    assert tried is not None
    course = whatif.experiment(tried, recorder)
    next(course)
    assert (recorder.calls.on_call is not None) == (cause == "sync.read")
    course.close()
    assert recorder.calls.on_call is None


def test_a_rank_tries_what_all_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that can't switch it takes part unchanged, at the same steps."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    session = ProfileSession(confirm=True, trace_file=None, exchange=Exchange())
    monkeypatch.setattr(session, "_observed_enough", lambda seconds: len(session.steps) >= 3)
    monkeypatch.setattr(session.exchange, "elect", lambda own, most: ["communication.exposed"])
    train(session, around=nullcontext, steps=150)

    assert {cause: tried.name for cause, tried in session.experiments.items()} == {"communication.exposed": "nothing"}


def test_without_the_other_ranks_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    session = ProfileSession(confirm=True, trace_file=None, exchange=Exchange())
    monkeypatch.setattr(session, "_observed_enough", lambda seconds: len(session.steps) >= 3)
    train(session, around=nullcontext)

    assert session.stage == "watching" and session.experiments == {}
    assert any(sentence.startswith("no experiments: ") for sentence in session.unseen)
