"""Parameters that no rank used in a step: DDP drops what is sent for them, so nothing of them may move.

Neither what was withheld of them nor their momentum: SGD passes over a parameter without a gradient too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.comm.layout import Piece


def any_nonzero(values: Tensor) -> Tensor:
    """Tell whether anything is not zero, () bool; mostly the first elements know."""
    if values.device.type == "cpu" and (first := values[:64].any()):
        return first
    return values.any()


def stand_still(piece: Piece, spans: Sequence[slice], used: Tensor, fields: Sequence[str]) -> None:
    """Send nothing of the ranges that no rank used, and leave these own fields of them as they were before the step.

    Args:
        piece: whose values and fields they are ranges of.
        spans: the ranges.
        used: (ranges,), not 0 where a rank used one.
        fields: those that are there.
    """
    known = [field for field in fields if piece.slot.has(field)]
    if used.device.type == "cpu":
        for span, one in zip(spans, used.tolist(), strict=True):
            if not one:
                piece.values[span].zero_()
                for field in known:
                    piece.slot.write(field)[span] = piece.slot.read(field)[span]
        return
    # The host, which issues the next bucket after this one, must not wait for the device to hear the flags.
    for span, idle in zip(spans, (used == 0).unbind(), strict=True):
        piece.values[span].masked_fill_(idle, 0.0)
        for field in known:
            new = piece.slot.write(field)[span]
            torch.where(idle, piece.slot.read(field)[span], new, out=new)
