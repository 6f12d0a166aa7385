"""Kineto's events of a GPU, made by hand as torch 2.9 to 2.13 give them, and the lines that they come from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from accel.profiler.trace.window import full_path, read, users_lines, work_kind

ZERO = 1_795_000_000_000_000_000  # ns since the epoch: floats of that size would lose 256 ns


@dataclass
class Event:
    """One of kineto's raw events; times in µs after the window's start."""

    label: str
    start: float
    end: float
    number: int = 0
    linked: int = 0
    device: DeviceType = DeviceType.CPU
    index: int = 0
    annotation: bool = False
    asynchronous: bool = False
    inputs: list[Any] = field(default_factory=list)

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return ZERO + round(self.start * 1e3)

    def end_ns(self) -> int:
        return ZERO + round(self.end * 1e3)

    def duration_ns(self) -> int:
        return self.end_ns() - self.start_ns()

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_type(self) -> DeviceType:
        return self.device

    def device_index(self) -> int:
        return self.index

    def start_thread_id(self) -> int:
        return 1

    def is_user_annotation(self) -> bool:
        return self.annotation

    def is_async(self) -> bool:
        return self.asynchronous

    def shapes(self) -> list[list[int]]:
        return [[2, 2]]

    def dtypes(self) -> list[str]:
        return ["float"]

    def concrete_inputs(self) -> list[Any]:
        return self.inputs


@dataclass
class Results:
    listed: list[Event]

    def events(self) -> list[Event]:
        return self.listed


def on_gpu(label: str, start: float, end: float, *, number: int = 0, linked: int = 0, index: int = 0) -> Event:
    return Event(label, start, end, number, linked, DeviceType.CUDA, index)


EVENTS = [
    Event("aten::mm", 0, 10, number=1),
    Event("cudaLaunchKernel", 5, 8, number=101, linked=1),
    Event("aten::item", 20, 80, number=2),
    Event("cudaMemcpyAsync", 22, 40, number=102, linked=2),
    Event("cudaStreamSynchronize", 41, 75, number=103, linked=2),
    Event("aten::to", 80, 90, number=3),
    Event("cudaMemcpyAsync", 81, 84, number=104, linked=3),  # into pinned memory: returns before the copy is done
    Event("cudaDeviceSynchronize", 100, 130, number=105),  # the window's own
    Event("Optimizer.step#SGD.step", 0, 100, annotation=True),
    Event("all_reduce", 0, 100, asynchronous=True),
    Event("Activity Buffer Request", 3, 4),
    Event("profiler::_record_function_enter_new", 3, 4),
    on_gpu(GEMM := "ampere_sgemm_128x64_nn", 12, 36, number=101, linked=1),
    on_gpu("Memcpy DtoH (Device -> Pageable)", 36, 39, number=102, linked=2),
    on_gpu("Memcpy DtoH (Device -> Pinned)", 86, 120, number=104, linked=3),
    on_gpu("ampere_sgemm_128x64_nn", 12, 36, number=900, index=1),  # another process's device
]


def test_operators_are_calls_and_all_else_on_the_host_is_not() -> None:
    trace = read(Results(EVENTS), window_ns=(ZERO, ZERO + 140_000), closing_ns=ZERO + 95_000, gpu=0)

    assert [(call.name, call.start, call.end, call.id) for call in trace.calls] == [
        ("aten::mm", 0.0, 10.0, 1),
        ("aten::item", 20.0, 80.0, 2),
        ("aten::to", 80.0, 90.0, 3),
    ]
    assert trace.window == (0.0, 140.0)


def test_device_work_knows_its_launch_and_its_operator() -> None:
    trace = read(Results(EVENTS), window_ns=(ZERO, ZERO + 140_000), closing_ns=ZERO + 95_000, gpu=0)

    assert trace.works is not None
    assert [(w.name.split()[0], w.kind, w.start, w.end, w.launch, w.operator) for w in trace.works] == [
        (GEMM, "kernel", 12.0, 36.0, 5.0, 1),
        ("Memcpy", "copy out", 36.0, 39.0, 22.0, 2),
        ("Memcpy", "copy out", 86.0, 120.0, 81.0, 3),
    ]


def test_waits_are_calls_that_return_after_the_device() -> None:
    trace = read(Results(EVENTS), window_ns=(ZERO, ZERO + 140_000), closing_ns=ZERO + 95_000, gpu=0)

    assert [(wait.name, wait.start, wait.end, wait.operator) for wait in trace.waits] == [
        ("cudaMemcpyAsync", 22.0, 40.0, 2),
        ("cudaStreamSynchronize", 41.0, 75.0, 2),
    ]


def test_without_a_gpu_there_are_only_calls() -> None:
    trace = read(Results(EVENTS), window_ns=(ZERO, ZERO + 140_000), closing_ns=ZERO + 95_000, gpu=None)

    assert (len(trace.calls), trace.works, trace.waits) == (3, None, [])


def test_pythons_calls_are_no_operators() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    profile_function = sys.getprofile()  # torch's tracer takes its place, and leaves none behind
    with profile(use_kineto=True, with_stack=True) as traced:
        model(torch.ones(2, 3)).sum().item()
    sys.setprofile(profile_function)
    trace = read(traced.kineto_results, window_ns=(0, 1), closing_ns=0, gpu=None, stacks=True)

    assert {"aten::linear", "aten::item"} <= {call.name for call in trace.calls}
    assert all(call.name.startswith("aten::") for call in trace.calls)


def test_only_convolutions_bring_inputs_that_are_no_tensors() -> None:
    events = [Event("aten::convolution", 0, 1, inputs=[None, [1, 1]]), Event("aten::mm", 1, 2, inputs=[None])]
    trace = read(Results(events), window_ns=(ZERO, ZERO + 1), closing_ns=ZERO, gpu=None)

    assert [call.scalars for call in trace.calls] == [[None, [1, 1]], ()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "copy in"),
        ("Memcpy DtoH (Device -> Pinned)", "copy out"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("Memset (Device)", "memory"),
        ("void gemm_kernel()", "kernel"),
    ],
)
def test_what_a_device_event_is(name: str, kind: str) -> None:
    assert work_kind(name) == kind


@pytest.fixture(autouse=True)
def _own_profile_function() -> Iterator[None]:
    # The tracer takes the thread's profile function, and leaves none behind; a coverage tool may need it.
    before = sys.getprofile()
    yield
    sys.setprofile(before)


def lines(run: Callable[[], object], operator: str) -> list[tuple[str, int]]:
    """Return file and line, from the start of `run`, of each call of an operator."""
    with profile(use_kineto=True, with_stack=True) as traced:
        run()
    wanted = [event.correlation_id() for event in traced.kineto_results.events() if event.name() == operator]
    places = users_lines(traced.kineto_results.experimental_event_tree(), wanted, is_file=lambda file: file == __file__)
    first = inspect.getsourcelines(run)[1]
    return [(Path(file).name, line - first) for file, line in (places.get((True, id), ("", 0)) for id in wanted)]


def test_a_methods_call_has_its_own_line() -> None:
    def run() -> None:
        loss = torch.ones(3).sum()
        torch.relu(loss)
        loss.item()

    assert lines(run, "aten::item") == [("test_kineto.py", 3)]


def test_a_modules_operators_have_the_line_that_called_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def run() -> None:
        batch = torch.ones(2, 3)
        model(batch)

    assert lines(run, "aten::relu") == [("test_kineto.py", 2)]


def test_a_conversion_has_the_last_line_that_was_seen() -> None:
    def run() -> None:
        loss = torch.ones(3).sum()
        float(loss)  # goes through a slot, which the tracer does not see

    def nothing_before(loss: torch.Tensor) -> bool:
        return loss > 1  # type: ignore[return-value]

    assert lines(run, "aten::item") == [("test_kineto.py", 1)]
    assert lines(lambda: bool(nothing_before(torch.ones(()))), "aten::is_nonzero")[0][0] == "test_kineto.py"


def test_a_loop_has_the_line_of_each_turn() -> None:
    def run() -> None:
        for i in range(2):
            torch.ones(3).sum().item()
            if i:
                torch.ones(2).max().item()

    assert [line for _, line in lines(run, "aten::item")] == [2, 2, 4]


def test_what_no_file_of_the_users_called_has_no_place() -> None:
    with profile(use_kineto=True, with_stack=True) as traced:
        torch.ones(3).sum().item()
    wanted = [event.correlation_id() for event in traced.kineto_results.events()]

    assert users_lines(traced.kineto_results.experimental_event_tree(), wanted, is_file=lambda _: False) == {}


def test_a_path_that_kineto_cut_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "script.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    full_path.cache_clear()

    assert full_path("package/script.py") == str(tmp_path / "package" / "script.py")
    assert full_path("package/missing.py") == "package/missing.py"
    assert full_path("<string>") == "<string>"
    assert full_path("/a/script.py") == "/a/script.py"
