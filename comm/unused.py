"""Parameters that no rank used in a step: DDP drops what is sent for them, so nothing of them may move.

Neither what was withheld of them nor their momentum: SGD passes over a parameter without a gradient too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accel.comm.layout import Piece


def any_nonzero(values: Tensor) -> Tensor:
    """Tell whether anything is not zero, () bool; mostly the first elements know."""
    if values.device.type == "cpu" and (first := values[:64].any()):
        return first
    return values.any()


def stand_still(piece: Piece, span: slice, fields: Sequence[str]) -> None:
    """Send nothing of a range, and leave these own fields of it as they were before the step."""
    piece.values[span].zero_()
    for field in fields:
        if piece.slot.has(field):
            piece.slot.write(field)[span] = piece.slot.read(field)[span]
