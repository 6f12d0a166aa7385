"""A slot must be filled anew only when nothing of its batch is left, and slots must not pile up."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from accel.dataio.engine import slots
from accel.dataio.fetching import wire

pytestmark = pytest.mark.skipif(not slots.supported(), reason="needs memfd_create")


class Link:
    """A worker's and a loop's side of the same slots, in one process; a released slot is filled with 0xFF at once."""

    def __init__(self, most_free: int = 3) -> None:
        self.writer, self.reader = slots.SlotWriter(most_free), slots.SlotReader()

    def send(self, batch: Any) -> Any:
        self.take_back()
        packed = wire.pack(batch)
        slot = self.writer.acquire(packed.size)
        wire.write(packed, slot.memory)
        if slot.file is not None:
            self.reader.add(slot.number, os.dup(slot.file))
            slot.close_file()
        self.tell_dropped()
        return wire.load(packed.payload, packed.sizes, self.reader.view(slot.number))

    def take_back(self) -> None:
        again, spent = self.reader.take_freed()
        for number in again:
            slot = self.writer._in_use[number]
            slot.memory[:] = b"\xff" * slot.size
            self.writer.release(number)
        for number in spent:
            self.writer.release(number, again=False)

    def tell_dropped(self) -> None:
        dropped, self.writer.dropped = self.writer.dropped, []
        for number in dropped:
            self.reader.drop(number)

    @property
    def mapped(self) -> int:
        return len(self.reader._memory)


def mappings() -> int:
    gc.collect()  # what tests before have left would be given back in the midst of this one
    with open("/proc/self/maps") as lines:
        return sum("accel-batch" in line for line in lines)


# What a loop may keep of a batch.
KEEPS = {
    "batch": lambda x, y: (x, y),
    "one of its tensors": lambda x, y: y,
    "row": lambda x, y: x[1],
    "view": lambda x, y: x.view(-1)[3:5],
    "detached": lambda x, y: x.detach(),
    "numpy": lambda x, y: x.numpy(),
    "numpy row": lambda x, y: x.numpy()[1],
    "iterator": lambda x, y: iter(x),
    "storage": lambda x, y: x.untyped_storage(),
    "dlpack": lambda x, y: torch.from_dlpack(x),
    "part of a dict": lambda x, y: {"deep": [{"x": x.t()}]},
    "graph": lambda x, y: (x * torch.ones(2, 4, requires_grad=True)).sum(),
    "closure": lambda x, y: lambda: x.sum(),
}


@pytest.mark.parametrize("kind", KEEPS)
def test_a_batch_that_is_held_never_changes(kind: str) -> None:
    link = Link()
    batch = link.send([torch.arange(8.0).reshape(2, 4), torch.tensor([7, 8])])
    copy = [each.clone() for each in batch]
    # The same memory, looked at from elsewhere: what is kept must keep it.
    look = np.frombuffer(link.writer._in_use[0].memory, np.uint8)
    before = look.copy()
    kept = KEEPS[kind](*batch)
    assert torch.equal(batch[0], copy[0])
    del batch
    for _ in range(10):
        link.send([torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)])

    assert np.array_equal(look, before)
    assert kept is not None
    del kept
    gc.collect()
    link.take_back()
    assert not np.array_equal(look, before)
    del look


@pytest.mark.parametrize("keep", [lambda a: a, lambda a: a[1:], lambda a: a.T, lambda a: memoryview(a)])
def test_an_array_keeps_its_slot(keep: Any) -> None:
    link = Link()
    kept = keep(link.send({"a": np.arange(6).reshape(2, 3)})["a"])
    before = np.array(kept)
    for _ in range(5):
        link.send({"a": np.zeros((2, 3), int)})

    assert np.array_equal(np.array(kept), before)
    assert link.reader.in_use == 1


def test_what_backward_saved_is_held() -> None:
    link = Link()
    weight = torch.ones(3, requires_grad=True)
    batch = link.send(torch.tensor([1.0, 2.0, 3.0]))
    loss = (weight * batch).sum()
    del batch
    for _ in range(5):
        link.send(torch.zeros(3))
    loss.backward()

    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 2, 3]


def test_a_tensor_may_be_dropped_by_another_thread() -> None:
    link = Link()
    kept = [link.send(torch.ones(3)) for _ in range(20)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()

    assert link.reader.in_use == 0
    assert len(link.reader.take_freed()[0]) == 20


@given(
    steps=st.lists(st.tuples(st.integers(1, 5000), st.booleans(), st.integers(0, 5)), max_size=60),
    most_free=st.integers(1, 5),
)
def test_any_order_of_sizes_and_drops(steps: list[tuple[int, bool, int]], most_free: int) -> None:
    link, held = Link(most_free), []
    for size, keep, drop in steps:
        value = size % 251
        batch = link.send(torch.full((size,), value, dtype=torch.uint8))
        assert int(batch.min()) == int(batch.max()) == value
        if keep:
            held.append((value, batch))
        del batch
        if held and drop < 2:
            held.pop(drop % len(held))
        assert all(int(each.min()) == int(each.max()) == number for number, each in held)
        assert link.mapped <= len(held) + most_free + 2
    assert len(link.writer._free) <= most_free


def test_growing_and_shrinking_batches_settle_on_a_few_slots() -> None:
    link = Link()
    sizes = [*range(100, 60_000, 3000), *range(60_000, 100, -3000)] * 5
    files = len(os.listdir("/proc/self/fd"))
    before = mappings()
    for size in sizes:
        link.send(torch.zeros(size))

    assert mappings() - before <= 2 * 6  # the writer's and the reader's
    assert link.mapped <= 6
    assert len(os.listdir("/proc/self/fd")) == files
    assert link.writer._made < 30


def test_memory_is_given_back_with_the_last_batch() -> None:
    before = mappings()
    link = Link()
    batch: Tensor = link.send(torch.ones(1000))
    del link
    gc.collect()

    assert int(batch.sum()) == 1000
    assert mappings() == before + 1
    del batch
    gc.collect()
    assert mappings() == before


def test_no_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    writer, files = slots.SlotWriter(2), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            writer.acquire(100)

    assert len(os.listdir("/proc/self/fd")) == files
    assert not writer._in_use


def test_a_batch_that_a_forked_process_holds_too_is_never_overwritten() -> None:
    link = Link()
    batch = link.send(torch.arange(5))
    answer, question = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(question[0], 1)
        os.write(answer[1], bytes(batch.tolist()))
        os._exit(0)
    del batch
    for _ in range(10):
        link.send(torch.full((5,), 99))
    os.write(question[1], b"?")
    seen = os.read(answer[0], 5)
    os.waitpid(child, 0)
    for end in (*answer, *question):
        os.close(end)

    assert list(seen) == [0, 1, 2, 3, 4]
    assert link.mapped <= 4  # the slot was given up, not forgotten


def test_numbers_that_are_not_held_are_ignored() -> None:
    writer = slots.SlotWriter(1)
    writer.release(5)

    assert not writer._free
