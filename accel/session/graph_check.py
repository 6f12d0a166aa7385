"""Compare captured graphs with the eager calls that they stand for.

From the same random state a graph draws what an eager call draws, unless a library takes another path while a stream is
captured, as transformers does for attention masks. With a mask attention goes by another kernel, which draws fewer
numbers, and all dropout after it has other masks. By all that reading shows that is why a BERT on an H200 was 0.13 off.

So where a graph differs and the call draws, it is compared, in full, with an eager call that takes the same path, since
it is told that a stream is captured. That path must do what the plain one does where neither draws: in evaluation mode,
gradients included.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import get_ident

import torch

from accel.guard import guard
from accel.guard.guard import Comparison, Recording, Replayed
from accel.strategies.base import Exactness

log = logging.getLogger("accel")

Replay = Callable[[Recording], Replayed]


def compared(eager: Replay, graphs: Replay, recording: Recording, exactness: Exactness) -> Comparison:
    """Compare a call from the same random state: the one that captures, then one that replays what was captured."""
    expected, finding = eager(recording), Comparison()
    for _ in range(2):  # one is freed before the next is made
        finding = finding.merge(guard.compare(expected, graphs(recording), exactness))
        if finding.problem:
            break
    return finding


def compared_on_its_path(
    eager: Replay, graphs: Replay, recording: Recording, exactness: Exactness
) -> Comparison | None:
    """Compare graphs with eager calls on the path of a capture; None if that does not explain how they differ."""
    on_its_path = as_captured(eager)
    finding = compared(on_its_path, graphs, recording, exactness)
    if finding.problem or finding.unsure or recording.flags is None:
        return None
    evaluated = replace(recording, flags=recording.flags.evaluating())
    try:
        path = guard.compare(eager(evaluated), on_its_path(evaluated), exactness)
    except torch.OutOfMemoryError:
        raise  # nobody knows then
    except Exception as error:
        log.debug("accel: the call could not be made in evaluation mode: %s", error)
        return None
    return None if path.problem or path.unsure else replace(finding, other_draws=True)


def as_captured(replay: Replay) -> Replay:
    """Return the same replay, in which Python code is told that a stream is captured."""

    def replay_told(recording: Recording) -> Replayed:
        with _told_of_a_capture():
            return replay(recording)

    return replay_told


@contextlib.contextmanager
def _told_of_a_capture() -> Iterator[None]:
    """Answer that a stream is captured, in this thread."""
    asked, here, cuda = torch.cuda.is_current_stream_capturing, get_ident(), vars(torch.cuda)
    cuda["is_current_stream_capturing"] = lambda: get_ident() == here or asked()
    try:
        yield
    finally:
        cuda["is_current_stream_capturing"] = asked
