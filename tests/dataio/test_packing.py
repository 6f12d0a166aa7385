"""A packed row must hold every token once and let none see, or predict, another sequence."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader

from accel.dataio.packing import PADDING, PackCollate, Packed, best_fit, pack, unpack

# 0: empty sequences; 1: nothing to predict in them.
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    parts = torch.arange(1, sum(lengths) + 1).split(lengths)
    return list(parts)


@given(LENGTHS, st.integers(0, 5), st.booleans(), st.booleans())
def test_pack_and_unpack(lengths: list[int], extra: int, padded: bool, shift: bool) -> None:
    given_in = sequences(lengths)
    capacity = sum(lengths) + extra if padded else None
    row = pack(given_in, capacity=capacity, pad_id=77, shift=shift)
    for got, want in zip(unpack(row), given_in, strict=True):
        assert torch.equal(got, want)
    assert row.cu_seqlens.dtype == torch.int32
    assert row.cu_seqlens[0] == 0
    assert row.cu_seqlens[-1] == len(row.tokens) == (capacity if capacity is not None else sum(lengths))
    assert row.max_seqlen == row.cu_seqlens.diff().max()
    assert {len(row.tokens)} == {len(row.labels), len(row.position_ids), len(row.sequence_ids)}
    filler = row.sequence_ids == PADDING
    assert filler.sum() == (extra if padded else 0)
    assert (row.tokens[filler] == 77).all()
    assert (row.labels[filler] == -100).all()


@given(LENGTHS, st.integers(0, 5), st.booleans())
def test_no_token_predicts_across_a_border(lengths: list[int], extra: int, shift: bool) -> None:
    row = pack(sequences(lengths), capacity=sum(lengths) + extra, shift=shift)
    ids, labels, tokens = row.sequence_ids, row.labels, row.tokens
    predicted = labels if shift else torch.cat([labels[1:], torch.tensor([-100])])
    for t in range(len(tokens)):
        inside = t + 1 < len(tokens) and ids[t] == ids[t + 1] != PADDING
        assert predicted[t] == (tokens[t + 1] if inside else -100)
    assert (labels != -100).sum() == sum(max(n - 1, 0) for n in lengths)


def test_positions_and_ids_of_an_example() -> None:
    row = pack([[5, 6, 7], [], [8, 9]], capacity=7)
    assert row.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert row.sequence_ids.tolist() == [0, 0, 0, 2, 2, -1, -1]
    assert row.cu_seqlens.tolist() == [0, 3, 3, 5, 7]
    assert row.labels.tolist() == [-100, 6, 7, -100, 9, -100, -100]
    assert row.max_seqlen == 3


def test_attention_by_cu_seqlens_equals_one_sequence_at_a_time() -> None:
    lengths = [5, 1, 7]
    row, torch_seed = pack(sequences(lengths), capacity=16), torch.manual_seed(0)
    q, k, v = torch.randn(3, 16, 4, generator=torch_seed)
    same = row.sequence_ids[:, None] == row.sequence_ids[None]
    whole = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same[None])[0]
    parts = [unpack(row, each) for each in (q, k, v, whole)]
    for qs, ks, vs, got in zip(*parts, strict=True):
        want = scaled_dot_product_attention(qs[None], ks[None], vs[None])[0]
        torch.testing.assert_close(got, want)


def test_labels_of_ones_own() -> None:
    row = pack([[1, 2, 3], [4, 5]], [[-1, -100, 13], [-1, 15]])
    assert row.labels.tolist() == [-100, -100, 13, -100, 15]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "at least one sequence, got none"),
        (([[[1]]],), {}, r"must be 1-D, got \(1, 1\) at index 0"),
        (([[1, 2]], [[1]]), {}, r"as long as their sequences, \[2\], got \[1\]"),
        (([[1, 2], [3]],), {"capacity": 2}, "at most 2 tokens, got 3; sample batches with Length"),
    ],
    ids=["none", "matrix", "labels", "capacity"],
)
def test_pack_refuses(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(*arguments, **options)


def test_unpack_refuses_values_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"one entry per token, \(2, …\), got \(1, 2, 3\); squeeze"):
        unpack(pack([[1, 2]]), torch.zeros(1, 2, 3))


# Collate


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_in_a_loader(workers: int) -> None:
    data: Any = [torch.arange(n) for n in (3, 1, 4, 2)]
    loader = DataLoader(data, batch_size=2, collate_fn=PackCollate(capacity=8), num_workers=workers)
    rows = list(loader)
    assert all(isinstance(row, Packed) for row in rows)
    assert [row.tokens.shape for row in rows] == [(8,), (8,)]
    assert [len(part) for row in rows for part in unpack(row)] == [3, 1, 4, 2]


def test_collate_of_mappings_and_its_refusals() -> None:
    collate = pickle.loads(pickle.dumps(PackCollate()))
    row = collate([{"input_ids": [1, 2], "labels": [-1, 12]}, {"input_ids": [3], "labels": [-1]}])
    assert row.labels.tolist() == [-100, 12, -100]
    with pytest.raises(ValueError, match="all samples or none must have 'labels', got 1 of 2"):
        collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}])
    with pytest.raises(TypeError, match="got padding"):
        PackCollate(padding=3)


# Rows


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(40, 60))
def test_rows_are_no_longer_than_allowed_and_not_half_empty(lengths: list[int], capacity: int) -> None:
    descending = np.sort(np.array(lengths, dtype=np.int64))[::-1]
    held = np.bincount(best_fit(descending, capacity), weights=descending, minlength=1)
    assert held.sum() == sum(lengths) and held.max() <= capacity
    # No two rows are half empty: best fit would have put the second into the first.
    assert sum(held * 2 <= capacity) <= 1
