"""How far an acceleration may move the numbers of a training."""

from __future__ import annotations

import difflib
from enum import IntEnum
from typing import Any

from accel.errors import InvalidArgument


class Exactness(IntEnum):
    """How far the numbers may move; a higher value moves them further."""

    EXACT = 0
    """The same bits."""
    REORDERED = 1
    """The same precision, another order of summation."""
    REDUCED = 2
    """Fewer bits somewhere: TF32, bfloat16, fp16 with master weights."""
    FLOAT8 = 3
    """Products of 8-bit numbers."""
    LOSSY = 4
    """Information is left out and fed back later: gradient compression."""

    @property
    def word(self) -> str:
        """The name users write in `allow=`."""
        return self.name.lower()


LEVELS = {level.word: level for level in Exactness}
_OF_PRECISION = dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "tf32", "half", "mixed", "amp"), "reduced") | {
    "fp8": "float8"
}


def check_level(option: str, allow: Any) -> Exactness:
    """Return the level that a user has written.

    Args:
        option: as it is written: on the command line, or of `accel.optimize`.
        allow: its value.

    Raises:
        InvalidArgument: if it is none; the message says which was likely meant.
    """
    if not isinstance(allow, str) or allow not in LEVELS:
        known = ", ".join(map(repr, LEVELS))
        near = difflib.get_close_matches(str(allow).lower(), [*LEVELS, *_OF_PRECISION], n=1)
        hint = f"; did you mean {_OF_PRECISION.get(near[0], near[0])!r}?" if near else ""
        raise InvalidArgument(f"{option} must be one of {known}, got {allow!r}{hint}")
    return LEVELS[allow]
