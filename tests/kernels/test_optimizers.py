"""The update of a model's parameters: its table, its layout in memory, and what each op costs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.kernels import support
from accel.kernels.optimizers import (
    Batch,
    Hypers,
    Kind,
    Scaling,
    Updater,
    cost,
    device,
    rules,
)
from accel.kernels.optimizers.device import CHUNK, AddressTable, Form, Launcher, TableEntry
from accel.kernels.optimizers.regular import copy_back, is_dense, regular
from tests.kernels.optimizer_oracle import update_ref
from tests.sampling import examples

FORM = Form(torch.float32, torch.float32, False, True, True, False, False)


def _table(sizes: list[int], forms: list[Form]) -> AddressTable:
    entries = [TableEntry(form, size, i % 2) for i, (size, form) in enumerate(zip(sizes, forms, strict=True))]
    return AddressTable.of(entries, torch.device("cpu"))


def test_every_element_is_in_one_chunk_of_one_launch() -> None:
    other = FORM._replace(param=torch.float16)
    sizes = [0, 1, CHUNK, CHUNK + 1, 0, 3 * CHUNK - 1]
    table = _table(sizes, [FORM, other, FORM, FORM, FORM, other])
    counts = [-(-size // CHUNK) for size in sizes]
    assert table.chunks == sum(counts)
    assert table.layout.tolist() == [sizes, [sum(counts[:i]) for i in range(6)], [0, 1, 0, 1, 0, 1]]
    programs = {form: list(zip(*work.tolist(), strict=True)) for form, work in table.launches.items()}
    assert programs == {FORM: [(2, 0), (3, 0), (3, 1)], other: [(1, 0), (5, 0), (5, 1), (5, 2)]}


def test_more_elements_than_32_bits_count() -> None:
    table = _table([2**31 + CHUNK, 5], [FORM, FORM])
    assert table.layout[0, 0] == 2**31 + CHUNK
    assert table.launches[FORM][:, -2:].tolist() == [[0, 1], [2**31 // CHUNK, 0]]


def test_columns_and_rows_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from accel.kernels.optimizers import triton_scalars

    columns = [getattr(triton_scalars, f"_{name.upper()}").value for name in Hypers._fields]
    assert columns == list(range(len(Hypers._fields)))
    assert len(columns) <= rules.COLUMNS
    assert triton_scalars._GRAD.value + 1 == device.ROWS


def test_a_channels_last_parameter_needs_no_copy() -> None:
    like = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    batch = Batch(Hypers(0.1), [like], [torch.ones_like(like)], [[torch.zeros_like(like)]])
    same, back = regular(batch)
    assert same.params[0] is like
    assert not back


def test_gaps_are_copied_there_and_back() -> None:
    whole = torch.arange(12.0).view(3, 4)
    param = whole[:, ::2]
    same, back = regular(Batch(Hypers(0.1), [param], [torch.ones(3, 2)], [[torch.zeros(3, 2)]]))
    assert not is_dense(param)
    assert same.params[0].is_contiguous()
    same.params[0].zero_()
    copy_back(back)
    assert whole.tolist() == [[0, 1, 0, 3], [0, 5, 0, 7], [0, 9, 0, 11]]


def _batch(kind: Kind) -> Batch:
    generator = torch.Generator().manual_seed(1)
    params, grads = ([torch.randn(n, generator=generator) for n in (7, 300)] for _ in range(2))
    states = [[torch.zeros_like(p) for p in params] for _ in range(2 if kind in ("adam", "lamb") else 1)]
    row = Hypers(0.1, 0.9, 0.99 if len(states) == 2 else 0.0, 1e-8, 0.1, decoupled=1.0)
    return Batch(row, params, grads, states, steps=[torch.zeros(()) for _ in params])


KINDS: tuple[Kind, ...] = ("sgd", "adam", "lamb", "lars")


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_operators_and_formula_agree(kind: Kind, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, exact = (_batch(kind) for _ in range(3))
    scaling = Scaling(torch.tensor([2.0]))
    by_kernels = Updater(kind)([ours], scaling)
    monkeypatch.setattr("accel.kernels.optimizers.update.runs_triton", lambda tensor: False)
    by_operators = Updater(kind)([theirs], scaling)
    by_formula = update_ref(kind, [exact], scaling)
    for outcome in (by_kernels, by_operators):
        assert outcome.norm is not None
        assert by_formula.norm is not None
        torch.testing.assert_close(outcome.norm.double(), by_formula.norm.double(), rtol=1e-6, atol=0)
    for batch in (ours, theirs):
        for a, b in zip(_all(batch), _all(exact), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def _all(batch: Batch) -> list[Tensor]:
    return [*batch.params, *(state for column in batch.states for state in column)]


def test_numbers_are_sent_when_they_changed() -> None:
    launcher = Launcher(torch.device("cpu"))
    launcher.send([Hypers(0.1, max_norm=2.0)])
    table = launcher._hypers
    assert table[0, [0, Hypers._fields.index("max_norm")]].tolist() == [0.1, 2.0]
    launcher.send([Hypers(torch.tensor(0.5))])
    assert launcher._hypers is table  # captured graphs read it
    assert float(table[0, 0]) == 0.5
    launcher.send([Hypers(0.5), Hypers(0.25)])
    assert len(launcher._hypers) == 2


def test_nought_in_the_place_of_a_tensor_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device kept the tensor's last value: a learning rate that came to 0 went on."""
    monkeypatch.setattr(device, "_on_device", lambda number: isinstance(number, Tensor))
    launcher = Launcher(torch.device("cpu"))
    for rate, expected in ((torch.tensor(0.5), 0.5), (0.0, 0.0), (torch.tensor(0.25), 0.25), (0.0, 0.0)):
        launcher.send([Hypers(rate)])
        assert float(launcher._hypers[0, 0]) == expected


def test_a_skipped_step_has_a_norm_where_one_is_asked_for(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it was None, where GradScaler had found infinity."""
    scaling = Scaling(torch.tensor([2.0]), torch.tensor([1.0]))

    def step(max_norm: float) -> Tensor | None:
        batch = _batch("sgd")
        batch.row = batch.row._replace(max_norm=max_norm)
        before = copy.deepcopy(_all(batch))
        outcome = Updater("sgd")([batch], scaling)
        assert outcome.overflow is not None and float(outcome.overflow) == 1
        assert all(map(torch.equal, _all(batch), before))
        return outcome.norm

    by_kernels = step(1.0)
    assert step(math.inf) is None
    monkeypatch.setattr("accel.kernels.optimizers.update.runs_triton", lambda tensor: False)
    by_operators = step(1.0)
    assert step(math.inf) is None
    assert by_kernels is not None and by_operators is not None
    torch.testing.assert_close(by_operators, by_kernels)


def test_launches_are_kept_while_their_tensors_are_the_same(interpreted: None) -> None:
    update, batch = Updater("adam"), _batch("adam")

    def launches(scaling: Scaling) -> list[object]:
        with support.interpreted():
            update([batch], scaling)
        assert update._launcher is not None
        return update._launcher._kept

    plain, scale = launches(Scaling()), torch.tensor([2.0])
    assert launches(Scaling()) is plain
    scaled = launches(Scaling(scale))
    assert scaled is not plain and launches(Scaling(scale)) is scaled
    assert launches(Scaling(torch.tensor([2.0]))) is not scaled
    batch.params[0], batch.grads[0] = torch.ones(9), torch.ones(9)
    batch.states = [[torch.zeros(9), *column[1:]] for column in batch.states]
    other = launches(Scaling())
    assert other is not plain and launches(Scaling()) is other
    twin = copy.deepcopy(update)
    assert twin._launcher is not None and twin._launcher._kept is None
    with support.interpreted():
        assert twin([batch]).norm is None


def _square() -> Batch:
    generator = torch.Generator().manual_seed(1)
    params, grads, states = ([torch.randn(4, 4, generator=generator) for _ in range(3)] for _ in range(3))
    return Batch(Hypers(0.1, 0.9), params, grads, [states])


def _transpose(tensor: Tensor) -> None:
    """Change the order in memory, at the same address."""
    tensor.data = tensor.data.t()


def _with_another_gradient(batch: Batch) -> None:
    batch.grads[1] = torch.full_like(batch.grads[1], 0.5)


def _in_half_precision(batch: Batch) -> None:
    batch.params[0].data, batch.grads[0] = batch.params[0].data.half(), batch.grads[0].half()


def _unaligned(batch: Batch) -> None:
    batch.grads[2] = torch.ones(17)[1:].view(4, 4)


def _without_one(batch: Batch) -> None:
    for column in (batch.params, batch.grads, *batch.states):
        column.append(column.pop(0))
        if len(column) > 1:
            column.pop()


CHANGES: dict[str, Callable[[Batch], object]] = {
    "nothing": lambda batch: None,
    "gradient": _with_another_gradient,
    "gradient in place": lambda batch: batch.grads[0].mul_(2),
    "order of a parameter": lambda batch: _transpose(batch.params[-1]),
    "order of a parameter and its state": lambda batch: [*map(_transpose, (batch.params[-1], batch.states[0][-1]))],
    "order of a gradient": lambda batch: _transpose(batch.grads[-1]),
    "dtype": _in_half_precision,
    "alignment": lambda batch: _unaligned(batch) if len(batch.params) == 3 else None,
    "parameters": _without_one,
    "learning rate": lambda batch: setattr(batch, "row", batch.row._replace(lr=0.3)),
    "option": lambda batch: setattr(batch, "nesterov", not batch.nesterov),
}


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=5))
@example(changes=["nothing", "order of a parameter", "nothing", "gradient", "nothing"])
@example(changes=["order of a parameter and its state", "nothing", "gradient in place", "order of a gradient"])
@example(changes=["dtype", "nothing", "gradient", "option", "nothing", "parameters", "nothing"])
def test_a_step_takes_the_tensors_as_they_are_now(changes: list[str], interpreted: None) -> None:
    """Whatever a loop changes between two steps, the table that is kept does not hide it."""
    update, batch = Updater("sgd"), _square()
    for change in changes:
        CHANGES[change](batch)
        alone = copy.deepcopy(batch)
        update([batch])
        Updater("sgd")([alone])
        for one, other in zip(_all(batch), _all(alone), strict=True):
            assert torch.equal(one, other)


def test_a_capture_is_refused_what_it_cannot_do(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Updater("sgd")
    batch = _batch("sgd")
    monkeypatch.setattr(Launcher, "_captures", lambda self: True)
    with pytest.raises(RuntimeError, match=r"before a capture. Found: they changed since the last step"):
        update([batch])
    monkeypatch.undo()
    with support.interpreted():
        update([batch])
    monkeypatch.setattr(Launcher, "_captures", lambda self: True)
    with pytest.raises(RuntimeError, match=r"needs an ordinary one before it"), support.interpreted():
        update([batch])  # a CPU has no memory that is kept for it
    other = _batch("sgd")
    other.params[0], other.grads[0], other.states[0][0] = (torch.zeros(9) for _ in range(3))
    with pytest.raises(RuntimeError, match=r"must update the same parameters"), support.interpreted():
        update([other])


def test_the_least_work() -> None:
    assert cost("adam", 10).bytes == 280
    assert cost("adam", 10, norm=True).bytes == 320
    assert cost("sgd", 10).bytes == 200
    assert cost("lars", 10).bytes == 280
    assert cost("lamb", 10, norm=True).bytes == 440
    assert cost("adam", 10, torch.bfloat16).bytes == 280
    assert cost("adam", 10, torch.float64).bytes == 560
