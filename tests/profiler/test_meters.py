"""Readings between steps: of the workers there are, and of the steps that count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.profiler.host import ThreadTime
from accel.profiler.system import meters
from accel.profiler.system.meters import DdpWait, Span, Workers


class Played:
    """Workers whose times are written by hand, each with a file that is really open."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: dict[int, float] = {}
        """Of those that live."""

    def meter(self, pid: int) -> Any:
        played = self

        class Meter:
            file = os.open(os.devnull, os.O_RDONLY)

            def read(self) -> ThreadTime | None:
                return ThreadTime(played.now, played.ran[pid], 0.0) if pid in played.ran else None

            def close(self) -> None:
                os.close(self.file)

        return Meter()

    def turn(self, seconds: float, *, busy: bool = True) -> None:
        self.now += seconds
        for pid in self.ran:
            self.ran[pid] += seconds * busy


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(meters, "ThreadMeter", played.meter)
    return played


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system doesn't list open files")
def test_workers_of_past_epochs_leave_nothing_open_and_are_counted_no_more(played: Played) -> None:
    workers = Workers()
    workers.begin([])
    before = open_files()
    for epoch in range(40):
        pids = [2 * epoch, 2 * epoch + 1]
        played.ran = dict.fromkeys(pids, 0.0)
        for _ in range(3):
            workers.sample(pids)
            played.turn(1.0)
        assert open_files() == before + 2
        assert [worker.pid for worker in workers.shares()] == pids
    played.ran = {}
    workers.sample(pids)  # the loader still lists them, but they have ended
    assert open_files() == before
    workers.sample([])
    assert [worker.share.run for worker in workers.shares()] == [1.0, 1.0]  # the last there were


def test_what_workers_do_while_the_loop_is_elsewhere_does_not_count(played: Played) -> None:
    workers = Workers()
    played.ran = {7: 0.0}
    workers.begin([7])
    for _ in range(5):
        played.turn(1.0)
        workers.end([7])
        played.turn(10.0, busy=False)  # an evaluation, in which persistent workers sleep
        workers.sample([7])
        played.turn(10.0, busy=False)
        workers.begin([7])
    played.turn(10.0, busy=False)  # after the last reading
    before = workers.shares()
    workers.close()

    (worker,) = workers.shares()
    assert (worker.share.run, worker.share.blocked) == (pytest.approx(1.0), pytest.approx(0.0))
    assert [worker] == before


def test_a_loader_that_keeps_fewer_workers_has_fewer(played: Played) -> None:
    workers = Workers()
    played.ran = dict.fromkeys(range(4), 0.0)
    workers.begin([0, 1, 2, 3])
    played.turn(1.0)
    workers.sample([0, 1, 2, 3])
    workers.sample([2])

    assert [worker.pid for worker in workers.shares()] == [2]
    workers.close()


def test_a_counter_grows_within_spans_and_only_there() -> None:
    span = Span()
    assert span.share() == 0.0
    span.begin(0, 1.0, 10.0)
    span.end(5, 3.0, 20.0)
    span.end(5, 90.0, 99.0)  # none was open
    span.begin(8, 50.0, 100.0)
    span.end(9, 50.0, 110.0)
    span.begin(9, 50.0, 110.0)  # what comes after the last step

    assert span.share() == pytest.approx(0.1)
    assert span.share(without=[8]) == pytest.approx(0.2)
    assert span.share(without=[5, 9]) == pytest.approx(0.1)
    assert span.share(without=[0, 8]) == 0.0


def test_ddp_s_wait_in_a_step_that_is_left_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(DistributedDataParallel):
        """Reports a time of its own choice."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.find_unused_parameters, self.require_forward_param_sync = False, True
            self.wait_s = 0.002

        def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
            pass

        def _get_ddp_logging_data(self) -> dict[str, float]:
            return {"backward_comm_time": self.wait_s * 1e9}

    model, waits = Timed(), DdpWait()
    for step in range(50):
        model.wait_s = 4.0 if step == 20 else 0.002
        waits.sample([model, nn.Linear(1, 1)], step)

    assert waits.mean() == pytest.approx(0.08196)
    assert waits.mean(without=[20]) == pytest.approx(0.002)
    assert DdpWait().mean() is None


def test_on_a_gpu_ddp_times_a_few_steps_and_each_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the device in each of those."""

    class Timed(nn.Linear):
        device_type, find_unused_parameters, require_forward_param_sync = "cuda", False, True
        rate = comm_ns = 0

        def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
            self.rate = rate

        def _get_ddp_logging_data(self) -> dict[str, float]:
            return {"backward_comm_time": self.comm_ns}

    monkeypatch.setattr(meters, "DistributedDataParallel", Timed)
    model, waits = Timed(1, 1), DdpWait()
    model.comm_ns = 10**9  # of a step long ago
    for step in range(20):
        waits.sample([model], step)
        if step % 5 == 0:
            model.comm_ns = 2_000_000 + step
    assert model.rate == meters._GPU_EVERY
    assert [step for step, _ in waits._seconds] == [1, 6, 11, 16]
    assert waits.mean() == pytest.approx(0.002, rel=1e-3)
