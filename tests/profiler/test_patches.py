"""Copies to a GPU are told from other calls of `Tensor.to`, and no call comes out other than without the marks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel.profiler.loop import backward as passes
from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.patches import Patches
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock

ORIGINAL = vars(torch._C.TensorBase)["to"]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, list[str]]]:
    """A recorder, and the phase in which each copy was."""
    phases: list[str] = []
    recorder = Recorder()

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        phases.append(recorder.clock.code)
        return tensor

    def cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(tensor)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "cuda", cuda)
    recorder.start()
    recorder.clock.enter("host")
    yield recorder, phases
    recorder.stop()


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        (lambda t: t.cuda(), "copy"),
        (lambda t: t.to("cuda"), "copy"),
        (lambda t: t.to("cuda:1", non_blocking=True), "copy"),
        (lambda t: t.to(torch.device("cuda", 0)), "copy"),
        (lambda t: t.to(0), "copy"),
        (lambda t: t.to(device="cuda", dtype=torch.float16), "copy"),
        (lambda t: t.to(None, torch.float16), "host"),
        (lambda t: t.to(torch.float64), "host"),
        (lambda t: t.to(dtype=torch.float64), "host"),
        (lambda t: t.to("cpu"), "host"),
        (lambda t: t.to(torch.zeros(1)), "host"),
        (lambda t: t.to(other=torch.zeros(1)), "host"),
    ],
)
def test_only_what_goes_to_a_gpu_is_a_copy(
    call: Callable[[Tensor], Any], phase: str, marked: tuple[Recorder, list[str]]
) -> None:
    """`img.to(dtype)` is a part of torchvision's ToTensor, and of the loader's time."""
    recorder, phases = marked
    call(torch.ones(1))
    assert phases == [phase]
    assert recorder.clock.code == "host"


@pytest.mark.parametrize("code", ["evaluation", "data?", "host?", "forward?"])
def test_what_an_evaluation_copies_is_its_own(code: str, marked: tuple[Recorder, list[str]]) -> None:
    recorder, phases = marked
    recorder.clock.enter(code)
    torch.ones(1).cuda()
    assert (phases, recorder.clock.code) == ([code], code)


def test_copies_of_another_thread_are_not_the_loop_s(marked: tuple[Recorder, list[str]]) -> None:
    thread = threading.Thread(target=torch.ones(1).cuda)
    thread.start()
    thread.join()
    assert marked[1] == ["host"]


class Boxes(Tensor):
    """Asks which function of torch's is called, as torchvision's own tensors do."""

    told: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "to":
            cls.told = func
        return super().__torch_function__(func, types, args, kwargs)


def test_a_compiled_step_is_neither_compiled_again_nor_split() -> None:
    def step(x: Tensor) -> Tensor:
        return x.to("cpu", torch.float64) * 2

    graphs: list[Any] = []
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph)
    recorder = Recorder()
    for _ in range(2):
        compiled(torch.ones(2))
        recorder.start()
        compiled(torch.ones(2))
        recorder.stop()
    assert len(graphs) == 1


def test_a_subclass_is_told_torch_s_own_function() -> None:
    recorder = Recorder()
    recorder.start()
    try:
        moved = torch.ones(2).as_subclass(Boxes).to(torch.float64)
    finally:
        recorder.stop()
    assert type(moved) is Boxes and moved.dtype == torch.float64
    assert Boxes.told is ORIGINAL


def test_lazy_modules_and_modes_go_through() -> None:
    recorder = Recorder()
    recorder.start()
    try:
        assert nn.LazyLinear(2).to(torch.float64).weight.dtype == torch.float64
        with torch.device("meta"):
            assert torch.ones(2).to(torch.float64).device.type == "meta"
    finally:
        recorder.stop()


class Owner:
    def method(self) -> str:
        return "its own"


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("order", ["theirs ends later", "theirs began earlier", "theirs goes on", "deleted"])
def test_what_the_script_puts_in_the_same_place_is_left_to_it(order: str, inherited: bool) -> None:
    class Sub(Owner):
        pass

    owner: Any = Sub if inherited else type("Own", (), dict(vars(Owner)))
    patches = Patches()

    def make(original: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda self: "ours, " + original(self) if patches.on else original(self)

    theirs = mock.patch.object(owner, "method", return_value="theirs")
    if order == "theirs began earlier":
        theirs.start()
        patches.replace(owner, "method", make)
        assert owner().method() == "ours, theirs"
        theirs.stop()
        patches.remove()
    elif order == "deleted":
        patches.replace(owner, "method", make)
        del owner.method
        patches.remove()
        assert ("method" in vars(owner)) is False
        return
    else:
        patches.replace(owner, "method", make)
        theirs.start()
        patches.remove()
        assert owner().method() == "theirs"
        if order == "theirs goes on":
            theirs.stop()
    if order == "theirs ends later":
        theirs.stop()
    assert owner().method() == "its own"


def test_a_mark_that_the_script_puts_back_does_nothing() -> None:
    recorder, ends = Recorder(), []
    recorder.start()
    listener = SimpleNamespace(backward_ended=ends.append)
    passes.listen(listener)
    theirs = [mock.patch.object(torch.autograd, "backward"), mock.patch.object(Tensor, "to")]
    for patch in theirs:
        patch.start()
    recorder.stop()
    passes.forget(listener)
    for patch in theirs:
        patch.stop()
    backward, to = torch.autograd.backward, Tensor.to
    try:
        length = len(recorder.clock.tape)
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        assert x.to(torch.float64).dtype == torch.float64
        assert (ends, len(recorder.clock.tape)) == ([], length)
    finally:
        _restored(backward, to)


def _restored(backward: Any, to: Any) -> None:
    """Undo what a script like this leaves behind."""
    while hasattr(backward, "__wrapped__"):
        backward = backward.__wrapped__
    torch.autograd.backward = backward
    if "to" in vars(Tensor) and hasattr(to, "__wrapped__"):
        del Tensor.to


def test_a_batch_that_is_copied_in_the_loop_is_marked_and_in_the_loader_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PlayedClock()

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        clock.sleep(0.01)
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    recorder, seen = Recorder(StepClock(clock)), list[Measurement]()
    recorder.delivery.on_step = seen.append
    recorder.start()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def collate(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows).to(torch.float32)

    rows: Any = torch.randn(40, 4)
    try:
        for x in DataLoader(rows, batch_size=4, collate_fn=collate):
            model(x.to("cuda")).sum().backward()
            optimizer.step()
    finally:
        recorder.stop()
    for measured in seen[2:]:
        assert measured.phases["copy"] == pytest.approx(0.01, abs=1e-3)
        assert measured.phases["data"] == pytest.approx(0.01, abs=1e-3)
