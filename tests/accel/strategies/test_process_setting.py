"""Strategies that set something of the whole process, in the runs of two models: neither takes it from the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.strategies import intraop_threads
from accel.strategies.base import Strategy
from accel.strategies.cudnn_benchmark import CudnnBenchmark
from accel.strategies.intraop_threads import IntraopThreads
from accel.strategies.process_setting import ProcessSetting
from accel.strategies.tf32 import TF32


def run_of(threads: int = 4, free_cores: int | None = None) -> Any:
    observed = SimpleNamespace(free_cores=free_cores)
    return SimpleNamespace(device=torch.device("cpu"), threads=threads, cores=4, observed=observed)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_the_last_of_two_models_puts_the_threads_back() -> None:
    first, second, run = IntraopThreads(), IntraopThreads(), run_of()
    first.enable(run, 2)
    second.enable(run, 1)
    first.disable(run)
    assert torch.get_num_threads() == 1  # the second one's, which is on
    first.enable(run, 3)
    assert torch.get_num_threads() == 3
    first.disable(run)
    assert torch.get_num_threads() == 1
    second.disable(run)
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_threads_are_tried_for_one_model_at_a_time() -> None:
    first, second, run = IntraopThreads(), IntraopThreads(), run_of()
    first.enable(run, 2)
    try:
        assert first.refusal(run) == ""
        assert second.refusal(run) == "another model has set the number of threads, which is that of the process"
    finally:
        first.disable(run)
    assert second.refusal(run) == ""


@pytest.mark.parametrize(
    ("threads", "free_cores", "settings"),
    [
        (4, None, [3, 2, 1]),
        (4, 4, [3, 2, 1]),
        (4, 2, [2, 3, 1]),
        (4, 1, [1, 3, 2]),
        (8, 4, [4, 7, 1]),
        (2, 1, [1]),
        (1, 1, []),
    ],
)
def test_what_other_processes_leave_is_tried_first(
    threads: int, free_cores: int | None, settings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intraop_threads, "_THREADS", ProcessSetting(lambda: threads, lambda value: None))
    assert IntraopThreads().settings(run_of(threads, free_cores)) == settings


@pytest.mark.parametrize(
    ("kind", "is_on"),
    [
        (CudnnBenchmark, lambda: torch.backends.cudnn.benchmark),
        (TF32, lambda: torch.backends.cuda.matmul.allow_tf32),
    ],
)
@pytest.mark.parametrize("first_leaves", [True, False])
def test_a_switch_stays_on_for_the_model_that_keeps_it(
    kind: type[Strategy], is_on: Callable[[], bool], first_leaves: bool
) -> None:
    run, before = run_of(), is_on()
    first, second = kind(), kind()
    first.enable(run, None)
    second.enable(run, None)
    leaves, stays = (first, second) if first_leaves else (second, first)
    leaves.disable(run)
    leaves.disable(run)  # as after an enable that failed
    try:
        assert is_on()
    finally:
        stays.disable(run)
    assert is_on() == before
    assert not any(setting.is_used() for setting in (CudnnBenchmark.switch, TF32.switch, intraop_threads._THREADS))


@pytest.mark.usefixtures("four_threads")
def test_what_the_loop_has_set_since_the_run_began_is_what_is_displaced() -> None:
    strategy, run = IntraopThreads(), run_of(threads=4)
    torch.set_num_threads(3)
    assert strategy.settings(run) == [2, 1]  # of four cores, three threads are in use
    strategy.enable(run, 1)
    assert (run.threads, strategy.settings(run)) == (3, [2, 1])
    strategy.disable(run)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("four_threads")
def test_what_the_loop_sets_meanwhile_stays() -> None:
    first, second, run = IntraopThreads(), IntraopThreads(), run_of()
    first.enable(run, 1)
    torch.set_num_threads(3)
    first.disable(run)
    assert torch.get_num_threads() == 3
    first.enable(run, 2)
    second.enable(run, 1)
    torch.set_num_threads(3)
    second.disable(run)
    first.disable(run)
    assert torch.get_num_threads() == 3


def test_what_an_interrupted_switch_has_set_is_put_back() -> None:
    level, stops = [0], [True]

    def write(value: int) -> None:
        level[0] = value
        if stops.pop():
            raise KeyboardInterrupt

    setting = ProcessSetting(lambda: level[0], write)
    with pytest.raises(KeyboardInterrupt):
        setting.use("user", 1)
    stops[:] = [False]
    setting.leave("user")
    assert level == [0] and not setting.is_used()
