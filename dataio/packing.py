"""Pack sequences of any length end to end into one row, with what variable-length attention needs to keep them apart.

A row of T tokens that holds the sequences s_0 … s_{n-1}:

    tokens        s_0[0] s_0[1] s_0[2] | s_1[0] s_1[1] | …      (T,)
    position_ids       0      1      2 |      0      1 | …      (T,)
    sequence_ids       0      0      0 |      1      1 | …      (T,)
    cu_seqlens    [0, 3, 5, …, T]                               (n+1,) int32
    labels          -100 s_0[1] s_0[2] |   -100 s_1[1] | …      (T,)

`accel.LengthBalancedBatchSampler` plans which sequences go into a row of so many tokens, by
best-fit decreasing: at most 11/9 of the fewest rows possible, plus four (Johnson et al. 1974,
doi.org/10.1137/0203025).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from accel.profiler.errors import InvalidArgument, InvalidType

PADDING = -1  # the sequence id of padding
_INT32_MAX = 2**31 - 1


class Packed(NamedTuple):
    """One row of sequences end to end. A named tuple, so that DataLoader's page-locking looks into it."""

    tokens: Tensor
    """(T,), the dtype of the sequences."""
    labels: Tensor
    """(T,), `ignore_index` where nothing is to be predicted."""
    position_ids: Tensor
    """(T,) int64, from 0 in each sequence."""
    sequence_ids: Tensor
    """(T,) int64, `PADDING` (-1) for padding."""
    cu_seqlens: Tensor
    """(n+1,) int32: sequence i is tokens[cu_seqlens[i]:cu_seqlens[i+1]]; padding counts as one more sequence."""
    max_seqlen: int
    """The longest of the sequences that `cu_seqlens` separates, in tokens."""


def pack(
    sequences: Sequence[Any],
    labels: Sequence[Any] | None = None,
    *,
    capacity: int | None = None,
    pad_id: int = 0,
    ignore_index: int = -100,
    shift: bool = False,
) -> Packed:
    """Join sequences end to end in one row.

    Labels stand where their tokens stand, as for models that shift them on their own: tokens up to t predict label
    t+1. The first label of each sequence is `ignore_index`, so that no token predicts across a border.

    Args:
        sequences: n ≥ 1 CPU tensors (length,) or lists of token ids; a length may be 0.
        labels: for each sequence its labels (length,), at the places of its tokens; default: the tokens.
        capacity: pad the row to this number of tokens, for shapes that stay; default: no padding. The padding is a
            sequence of its own in `cu_seqlens`, so that no attention kernel leaves its output undefined.
        pad_id: token of the padding, default 0.
        ignore_index: label that the loss leaves out, default -100.
        shift: for a loss without a shift: label t is that of token t+1, and the last of each sequence is ignored.

    Returns:
        The row, T = sum of lengths, or `capacity`.

    Raises:
        InvalidArgument: if there is no sequence, one is not 1-D, labels do not fit, or the row exceeds `capacity`.

    Example:
        >>> row = pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
        >>> row.cu_seqlens.tolist(), row.max_seqlen, row.labels.tolist()
        ([0, 3, 5], 3, [-100, 6, 7, -100, 9])
    """
    rows = [_row(sequence, "sequence", i) for i, sequence in enumerate(sequences)]
    if not rows:
        raise InvalidArgument("pack needs at least one sequence, got none; skip the empty batch")
    lengths = [len(row) for row in rows]
    targets = rows if labels is None else _labels(labels, lengths)
    total, filler = sum(lengths), _filler(sum(lengths), capacity)
    tokens = pad(torch.cat(rows), (0, filler), value=pad_id)
    shifted = [_border(target, ignore_index, shift) for target in targets]
    ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    parts = [*lengths, filler] if filler else lengths
    bounds = torch.tensor([0, *parts]).cumsum(0)
    return Packed(
        tokens,
        pad(torch.cat(shifted), (0, filler), value=ignore_index),
        torch.arange(total + filler) - bounds[:-1].repeat_interleave(torch.tensor(parts)),
        pad(ids, (0, filler), value=PADDING),
        bounds.to(torch.int32),
        max(parts),
    )


def unpack(packed: Packed, values: Tensor | None = None) -> list[Tensor]:
    """Cut a row into its sequences again; padding is left out.

    Args:
        packed: the row, T tokens.
        values: (T, …), what a model made of the tokens; default: the tokens. The n results are views of it.

    Raises:
        InvalidArgument: if `values` has no T entries.
    """
    values = packed.tokens if values is None else values
    if values.dim() == 0 or len(values) != len(packed.tokens):
        raise InvalidArgument(
            f"values must have one entry per token, ({len(packed.tokens)}, …), got {tuple(values.shape)}; "
            "squeeze a batch dimension of 1 first"
        )
    parts = list(torch.split(values, packed.cu_seqlens.diff().tolist()))
    padded = len(packed.sequence_ids) > 0 and int(packed.sequence_ids[-1]) == PADDING
    return parts[:-1] if padded else parts


class PackCollate:
    """Collate samples into one packed row: `DataLoader(..., collate_fn=PackCollate())`.

    Args:
        tokens: key of the tokens in samples that are mappings, default "input_ids". Other samples are the tokens.
        labels: key of the labels, default "labels"; without it the tokens are the labels.
        **options: of `pack`: capacity, pad_id, ignore_index, shift.

    Raises:
        InvalidType: if an option is none of `pack`'s.

    Example:
        >>> loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PackCollate())
        >>> for row in loader: ...
    """

    def __init__(self, tokens: str = "input_ids", labels: str = "labels", **options: Any) -> None:
        unknown = sorted(options.keys() - {"capacity", "pad_id", "ignore_index", "shift"})
        if unknown:
            raise InvalidType(f"PackCollate takes capacity, pad_id, ignore_index and shift, got {', '.join(unknown)}")
        self.tokens, self.labels, self.options = tokens, labels, options

    def __call__(self, samples: Sequence[Any]) -> Packed:
        """Return the row of the samples, in their order."""
        mapped = [sample if isinstance(sample, Mapping) else {self.tokens: sample} for sample in samples]
        labelled = [self.labels in sample for sample in mapped]
        if any(labelled) and not all(labelled):
            raise InvalidArgument(
                f"all samples or none must have {self.labels!r}, got {sum(labelled)} of {len(samples)}"
            )
        labels = [sample[self.labels] for sample in mapped] if any(labelled) else None
        return pack([sample[self.tokens] for sample in mapped], labels, **self.options)


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return for each length, in the given order, the row it goes into: the fullest one that still has room for it.

    Args:
        lengths: (n,), each 0 … `capacity`; in decreasing order this is best-fit decreasing.
        capacity: of a row.

    Returns:
        (n,), rows counted from 0 in the order in which they are opened.
    """
    free: list[int] = []  # what distinct room there is, ascending
    having: dict[int, list[int]] = {}  # room → the rows that have it
    assigned = []
    opened = 0
    for length in lengths.tolist():
        at = bisect_left(free, length)
        if at == len(free):
            row, room, opened = opened, capacity, opened + 1
        else:
            room = free[at]
            rows = having[room]
            row = rows.pop()
            if not rows:
                del free[at], having[room]
        assigned.append(row)
        room -= length
        if room in having:
            having[room].append(row)
        else:
            having[room] = [row]
            insort(free, room)
    return np.array(assigned, dtype=np.int64)


def check_lengths(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the lengths as an array (n,) of int64; raise InvalidArgument unless they are whole numbers ≥ 0."""
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"lengths must be a flat list of whole numbers, got {array.dtype} of shape {array.shape}")
    if array.size and array.min() < 0:
        raise InvalidArgument(f"lengths must be at least 0, got {array.min()} at index {array.argmin()}")
    return array.astype(np.int64)


def check_longest(lengths: NDArray[np.int64], max_tokens: int) -> None:
    """Raise InvalidArgument if a sequence is longer than `max_tokens`."""
    if lengths.size and lengths.max() > max_tokens:
        at = int(lengths.argmax())
        raise InvalidArgument(
            f"no sequence may be longer than max_tokens = {max_tokens}, got {lengths[at]} tokens at index {at}, "
            f"{int((lengths > max_tokens).sum())} of {len(lengths)} in all; raise max_tokens, shorten them or leave "
            "them out"
        )


def _row(values: Any, what: str, index: int) -> Tensor:
    row = torch.as_tensor(values) if isinstance(values, Tensor) or len(values) else torch.zeros(0, dtype=torch.int64)
    if row.dim() != 1:
        raise InvalidArgument(f"each {what} must be 1-D, got {tuple(row.shape)} at index {index}; flatten it")
    return row


def _labels(labels: Sequence[Any], lengths: list[int]) -> list[Tensor]:
    rows = [_row(label, "sequence of labels", i) for i, label in enumerate(labels)]
    if [len(row) for row in rows] != lengths:
        raise InvalidArgument(f"labels must be as long as their sequences, {lengths}, got {[len(row) for row in rows]}")
    return rows


def _border(labels: Tensor, ignore_index: int, shift: bool) -> Tensor:
    """Return the labels of one sequence, the one that would be predicted from another sequence ignored."""
    return labels if not len(labels) else pad(labels[1:], (0, 1) if shift else (1, 0), value=ignore_index)


def _filler(total: int, capacity: int | None) -> int:
    most = _INT32_MAX if capacity is None else capacity
    if total > most:
        raise InvalidArgument(
            f"the row must hold at most {most} tokens, got {total}; sample batches with "
            f"LengthBalancedBatchSampler(max_tokens={most})"
        )
    return 0 if capacity is None else capacity - total
