"""Batches of the user's own classes, also those that are not complete yet."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.batches import describe, equal, one_memory
from accel.dataio.engine import transfer
from accel.dataio.engine.transfer import AheadCopier, pin
from accel.dataio.loader import ContinuousLoader
from accel.profiler.trees import leaves, map_tensors, tensors


@dataclasses.dataclass
class Sentences:
    """Has fields that the loop sets later, or takes away."""

    words: Tensor
    lengths: Tensor | None = None
    mask: Tensor = dataclasses.field(init=False)


def test_a_field_that_has_not_been_set_yet_is_none_of_its_leaves() -> None:
    batch = Sentences(torch.ones(4, 3))
    assert tensors(batch) == [batch.words]
    assert describe(batch) == (4, (torch.Size((4, 3)),))
    assert equal(batch, Sentences(torch.ones(4, 3)))
    batch.mask = torch.ones(4)
    assert len(list(leaves(batch))) == 3


def test_the_tensors_of_a_batch_with_an_unset_field_are_mapped() -> None:
    batch = Sentences(torch.ones(2))
    mapped = map_tensors(lambda tensor: tensor + 1, batch)
    assert torch.equal(mapped.words, torch.full((2,), 2.0))
    assert not hasattr(mapped, "mask")
    del batch.words
    assert map_tensors(lambda tensor: tensor + 1, batch) is batch


@dataclasses.dataclass(frozen=True)
class Counted:
    """Computes when it is made, from what is not kept."""

    words: Tensor
    scale: dataclasses.InitVar[float]
    scaled: Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "scaled", self.words * scale)
        object.__setattr__(self, "longest", self.words.max())


def test_a_dataclass_is_copied_and_not_made_anew() -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, Counted(torch.ones(2), 3.0))
    assert mapped.words.tolist() == [2.0, 2.0]
    assert mapped.scaled.tolist() == [4.0, 4.0]
    assert mapped.longest == 2.0


def test_a_mapping_that_can_not_be_written_keeps_its_class() -> None:
    batch = MappingProxyType({"x": torch.ones(2), "name": "a"})
    mapped = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(mapped) is MappingProxyType
    assert mapped["x"].tolist() == [2.0, 2.0] and mapped["name"] == "a"


def test_the_sizes_of_a_packed_sequence_stay_where_they_are() -> None:
    """On the CPU: torch takes no others."""
    batch = pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_tensors(lambda tensor: tensor.to("meta"), batch)
    assert mapped.data.device.type == "meta"
    assert mapped.batch_sizes is batch.batch_sizes


def test_what_can_not_be_made_again_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(tuple):  # type: ignore[type-arg]
        def __new__(cls, first: Any, second: Any) -> Any:
            return super().__new__(cls, (first, second))

    monkeypatch.setattr(transfer, "_pin_tensor", lambda tensor: tensor.clone())
    batch = Two(torch.ones(1), torch.ones(1))
    assert transfer.pin(batch) is batch


def test_what_the_host_has_no_locked_memory_for_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Tensor, "pin_memory", fails)
    batch = {"x": torch.ones(2), "weight": torch.ones(1).expand(4)}
    assert transfer.pin(batch) is batch


def test_what_a_copy_would_not_have_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(list[Any]):
        names = ""

    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    marked, trained = torch.ones(1), torch.ones(1, requires_grad=True)
    marked.note = "a"  # type: ignore[attr-defined]
    batch = Named([marked, trained, torch.ones(1)])
    batch.names = "abc"
    pinned = transfer.pin(batch)
    assert pinned[0] is marked and pinned[1] is trained and pinned[2] is not batch[2]
    assert type(pinned) is Named and pinned.names == "abc" and batch[2] is not pinned[2]


def test_links_in_a_circle_have_no_size() -> None:
    node = Linked(torch.ones(2))
    node.others.append(Linked(torch.ones(2), [node]))
    assert describe([node]) == (0, ())


@dataclasses.dataclass
class Linked:
    x: Tensor
    others: list[Any] = dataclasses.field(default_factory=list)


def test_arrays_are_compared_to_their_last_bit() -> None:
    one, other = np.zeros((64, 64)), np.zeros((64, 64))
    assert equal([one], [other])
    other[30, 30] = 1  # where printing leaves it out
    assert not equal([one], [other])
    one[:], other[:] = np.nan, np.nan
    assert equal({"x": one}, {"x": other})
    assert not equal([one], [other.astype(np.float32)])


OWN, HELD = torch.ones(4, 2), [1]


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (OWN[0], OWN[0], True),
        ([OWN[:2]], [OWN[1:]], True),
        (OWN[0].clone(), OWN[0].clone(), False),
        (OWN.numpy()[1], OWN.numpy()[1], True),
        ((1, "a", None, 2.5), (1, "a", None, 2.5), False),
        ({"a": HELD}, {"a": HELD}, True),
        (("a", HELD), ("b", HELD), True),
        ([{"a": [1]}], [{"a": [1]}], False),
        (Sentences(OWN), Sentences(OWN), True),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), False),
    ],
)
def test_what_two_batches_have_in_common_and_can_be_written(one: Any, other: Any, common: bool) -> None:
    assert one_memory(one, other) == common


# Batches that are copied one ahead arrive whole, in order, in their structure


Pair = namedtuple("Pair", "image label")


def batch(number: int) -> Any:
    return {
        "pair": Pair(torch.full((3, 4), float(number)), [torch.tensor(number)]),
        "name": f"batch {number}",
        "n": None,
    }


def test_on_a_cpu_batches_are_handed_through() -> None:
    copier = AheadCopier(torch.device("cpu"))
    first, second = batch(1), batch(2)
    copier.start(first)
    copier.start(second)

    assert len(copier) == 2
    assert copier.finish() is first
    assert copier.finish() is second


def test_pinning_leaves_alone_what_can_not_be_pinned() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA to pin memory")
    pinned = pin(batch(1))

    assert equal(pinned, batch(1))
    assert pinned["pair"].image.is_pinned()


@pytest.mark.gpu
def test_on_a_gpu_batches_arrive_whole_and_in_order() -> None:
    copier = AheadCopier(torch.device("cuda"))
    copier.start(batch(0))
    for number in range(200):
        copier.start(batch(number + 1))
        got = copier.finish()
        assert got["pair"].image.is_cuda
        assert got["name"] == f"batch {number}"
        # Read on the device before the next copy may reuse memory that this batch gave back.
        assert float(got["pair"].image.sum()) == 12.0 * number
        del got


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_handed_out_while_the_step_uses_it() -> None:
    # Whole numbers whose sums fp32 holds, in any order of adding.
    data = TensorDataset(torch.arange(64 * 1024.0).remainder(1021).view(64, 1024))
    work = torch.randn(2048, 2048, device="cuda")
    with ContinuousLoader(DataLoader(data, 1), mode="threads", num_workers=2, device="cuda") as loader:
        sums = []
        for (row,) in loader:
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)  # the device is behind the host by now
            sums.append(row.sum() + 0 * work[0, 0])
            del row

    assert torch.equal(torch.stack(sums).cpu(), data.tensors[0].sum(1))


@pytest.mark.gpu
def test_a_loader_with_pin_memory_hands_over_pinned_batches() -> None:
    data = TensorDataset(torch.arange(12.0))
    with ContinuousLoader(DataLoader(data, 4, pin_memory=True), mode="fork", num_workers=1) as loader:
        assert all(values.is_pinned() for (values,) in loader)
