"""Batches of the user's own classes, also those that are not complete yet."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from accel.dataio.batches import describe, equal, leaves, map_tensors, tensors


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
