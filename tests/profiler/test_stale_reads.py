"""Reads that wait are answered from memory, place by place, in the type and shape that they have."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.profiler.experiments.counterfactuals import StaleReads, no_waiting
from accel.profiler.experiments.whatif import STUCK, experiment
from accel.profiler.loop.patches import READS
from accel.profiler.loop.recorder import Recorder
from tests.profiler.test_whatif import from_fifth_step


def waits(tensor: Tensor) -> bool:
    """What stands for the device here: tensors of float64."""
    return tensor.dtype == torch.float64


@pytest.fixture
def switch() -> Iterator[StaleReads]:
    found = StaleReads(waits=waits)
    with found.off():
        yield found


def value(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize(
    "read",
    [
        float,
        int,
        bool,
        operator.index,
        operator.methodcaller("item"),
        operator.methodcaller("tolist"),
        lambda t: t.cpu().numpy().item(),
        "{:.0f}".format,
    ],
    ids=["float", "int", "bool", "index", "item", "tolist", "cpu", "format"],
)
def test_a_place_reads_what_it_read_before(read: Callable[[Tensor], Any]) -> None:
    switch = StaleReads(waits=lambda tensor: tensor.dtype == torch.int16)
    with switch.off():
        answers = [read(torch.tensor(n, dtype=torch.int16)) for n in (3, 0, 0)]

    assert answers == [answers[0]] * 3
    assert {type(answer) for answer in answers} == {type(answers[0])}
    assert switch.answered == 2


@pytest.mark.parametrize("read", ["float(t)", "int(t)", "bool(t)", "t.item()", "t.tolist()"])
def test_a_place_stays_one_while_python_specialises_its_code(read: str, switch: StaleReads) -> None:
    names: dict[str, Any] = {}
    exec(f"def at_one_place(t):\n    return {read}", names)
    for _ in range(60):
        names["at_one_place"](value(1.0))
    assert switch.answered >= 58  # Python 3.11 may do a warm call an instruction before


def test_two_reads_on_one_line_are_two_places(switch: StaleReads) -> None:
    def both(a: float, b: float) -> tuple[Any, ...]:
        return value(a).item(), value(b).item(), f"{value(a):.0f} {value(b):.0f}"

    assert both(1.0, 2.0) == (1.0, 2.0, "1 2")
    assert both(3.0, 4.0) == (1.0, 2.0, "1 2")


def test_what_does_not_wait_is_read(switch: StaleReads) -> None:
    assert [float(torch.tensor(n)) for n in (1.0, 2.0)] == [1.0, 2.0]
    assert not switch.answered


def test_another_shape_is_read_anew(switch: StaleReads) -> None:
    lists = [torch.ones(n, dtype=torch.float64).tolist() for n in (2, 3)]

    assert lists == [[1.0] * 2, [1.0] * 3]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.float64), torch.ones((), dtype=torch.float64, requires_grad=True)],
    ids=["many values", "with a gradient"],
)
def test_copies_that_may_be_more_than_a_value_are_true(switch: StaleReads, tensor: Tensor) -> None:
    copies = [t.cpu() for t in (tensor, tensor * 2)]

    assert torch.equal(copies[1], tensor * 2)
    assert not switch.answered


def test_an_answer_can_be_changed_without_changing_the_next(switch: StaleReads) -> None:
    def read(number: float) -> Tensor:
        return value(number).cpu()

    read(1.0)
    read(2.0).add_(5.0)

    assert read(3.0) == 1.0


def test_a_loop_that_waits_for_a_value_to_change_ends(switch: StaleReads) -> None:
    left = value(10.0)
    rounds = 0
    while left > 0 and rounds < 1000:
        left -= 1
        rounds += 1

    assert rounds < 1000


def test_a_tensor_class_of_its_own_is_left_alone() -> None:
    class Own(Tensor):
        is_cuda = True  # type: ignore[assignment]

    with StaleReads().off():
        assert [t.item() for t in (torch.ones(()).as_subclass(Own), torch.zeros(()).as_subclass(Own))] == [1.0, 0.0]


def test_every_read_comes_back() -> None:
    before = {name: (vars(Tensor).get(name), getattr(Tensor, name)) for name in READS}
    with StaleReads(waits=waits).off():
        assert all(getattr(Tensor, name) is not found for name, (_, found) in before.items())

    assert {name: (vars(Tensor).get(name), getattr(Tensor, name)) for name in READS} == before


def test_without_gradients_every_read_is_true(switch: StaleReads) -> None:
    """What an evaluation finds."""

    def read(number: float) -> float:
        return value(number).item()

    read(1.0)
    with torch.no_grad():
        assert [read(n) for n in (2.0, 3.0)] == [2.0, 3.0]
    with torch.inference_mode():
        assert read(4.0) == 4.0
    assert not switch.answered
    assert read(5.0) == 1.0


def test_a_gradient_scaler_sees_each_infinite_gradient(switch: StaleReads) -> None:
    """It leaves the update out then; by an older answer all weights would become NaN."""
    switch._waits = lambda tensor: True
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.full((1, 2), float("inf") if step == 4 else 1.0)
        before = model.bias.detach().clone()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(model.bias.detach(), before))

    assert taken == [True] * 4 + [False, True]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert scaler._scale is not None
    assert scaler._scale == 2.0


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_loop_that_leaves_out_each_nan_goes_on(micro_batches: int) -> None:
    """Answered as if the loss were finite, one NaN makes the weights NaN, and then no step would ever end."""
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switch, recorder = StaleReads(waits=lambda tensor: tensor.dtype == torch.bool), Recorder()
    poisoned: list[int] = []
    ended = from_fifth_step(recorder, experiment(no_waiting(switch), recorder))
    recorder.start()
    try:
        for number in range(2000):
            is_poisoned = switch.answered == 2 and not poisoned
            poisoned += [number] * is_poisoned
            x = torch.full((1, 2), float("nan") if is_poisoned else 1.0, dtype=torch.float64)
            loss = model(x).square().sum()
            if torch.isnan(loss):
                continue
            loss.backward()
            if number % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
            if ended:
                break
    finally:
        recorder.stop()

    assert [experiment.verdict for experiment in ended] == ["void"]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert number < poisoned[0] + micro_batches * (STUCK + 150)
