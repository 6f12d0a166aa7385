"""Parameters that the model's own call writes to, or replaces, are those of the plain loop if the batch size is chosen.

For that, calls are made again on parts of a batch, and on a larger one.
"""

from __future__ import annotations

from collections import UserList
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.elastic.batch_size.rehearsal import BatchRehearsal
from accel.guard import snapshot
from accel.guard.snapshot import sums_of_bits, without_gradient
from tests.accel.goodput.noise_loops import finish, meter_for, train
from tests.accel.loops import Net, loss_of
from tests.accel.test_own_state import Codebook, Replaced

pytestmark = pytest.mark.usefixtures("only_quick")
CALLS: UserList[int] = UserList()
"""Samples of each call; a list would be put back."""


class CountsAndWrites(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return super().forward(x)


class CountsAndReplaces(Replaced):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return super().forward(x)


KINDS = pytest.mark.parametrize("kind", [CountsAndWrites, CountsAndReplaces])


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


@KINDS
def test_measuring_the_noise_leaves_them_as_they_were(kind: type[Net]) -> None:
    codes = []
    for is_metered in (False, True):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "code"], lr=0.05)
        meter = meter_for(model, optimizer)
        if not is_metered:
            meter.close()
        CALLS.clear()
        finish(train(meter, model, optimizer, batch, loss_of, steps=12))
        assert (len(CALLS) > 12) == is_metered
        codes.append([value.tolist() for value in model.state_dict().values()])
    assert codes[0] == codes[1]


@KINDS
def test_rehearsing_a_larger_batch_leaves_them_as_they_were(kind: type[Net]) -> None:
    model = kind()
    rehearsal = BatchRehearsal(model, model, torch.device("cpu"))
    rehearsal.prepare(16)
    x, target = batch(0)
    rehearsal.hear((x,), {})
    loss_of(model(x), target).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    CALLS.clear()
    assert rehearsal.problem(32) == ""
    assert CALLS == [32]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_of_a_large_frozen_model_no_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"frozen": nn.Linear(10, 10), "code": nn.Linear(2, 2, bias=False), "lazy": nn.LazyLinear(2)})
    model["trained"] = nn.Linear(1, 1)
    for parameter in model["trained"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    monkeypatch.setattr(snapshot, "MOST_BYTES", 100)
    found = without_gradient(model)
    assert list(map(id, found)) == [id(model["code"].weight), id(model["frozen"].bias)]


def test_what_a_call_writes_to_is_found() -> None:
    model: Any = nn.ParameterList([torch.randn(3, 4).to(dtype) for dtype in DTYPES])
    for number, parameter in enumerate(model):
        before = sums_of_bits(list(model))
        parameter.data[1, 2] += 1
        changed = [old != new for old, new in zip(before, sums_of_bits(list(model)), strict=True)]
        assert [place for place, is_other in enumerate(changed) if is_other] == [number]
    assert sums_of_bits([]) == []


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
