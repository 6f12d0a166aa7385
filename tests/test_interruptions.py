"""What raises at one line after the other leaves nothing behind in the thread."""

from __future__ import annotations

import sys

import pytest

from accel.dataio.dataset.reach import own_attributes
from tests.interruptions import Interrupter, SignalInterrupter


@pytest.mark.parametrize("kind", [Interrupter, SignalInterrupter])
def test_an_interruption_leaves_no_error_being_handled(kind: type[Interrupter]) -> None:
    at, interrupted = 0, True
    while interrupted:
        interrupter = kind("dataio/dataset/reach.py", at)
        try:
            with interrupter():
                own_attributes(14)  # handles an AttributeError
            interrupted = False
        except KeyboardInterrupt:
            pass
        assert sys.exc_info() == (None, None, None), interrupter.place
        at += 1
    assert at > 1
