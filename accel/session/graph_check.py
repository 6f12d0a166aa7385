"""Compare captured graphs with the eager calls that they stand for.

From the same random state a graph draws what an eager call draws, unless a library takes another path while a stream is
captured, as transformers does for attention masks. With a mask attention goes by another kernel, which draws fewer
numbers, and all dropout after it has other masks. By all that reading shows that is why a BERT on an H200 was 0.13 off.

So where a graph differs and the call draws, it is compared, in full, with an eager call that takes the same path, since
it is told that a stream is captured. That path must do what the plain one does: drop out with the same probabilities,
and in evaluation mode, where neither draws, have the same outputs and gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Lock, get_ident

import torch
from torch import Tensor

from accel.guard import guard
from accel.guard.guard import Comparison, Recording, Replayed
from accel.profiler.interruptions import ours
from accel.strategies.base import Exactness

log = logging.getLogger("accel")

Replay = Callable[[Recording], Replayed]

_TELLING = Lock()
"""Held where torch's own answer is replaced: the last to leave must put back what the first has found."""


def compared(eager: Replay, graphs: Replay, recording: Recording, exactness: Exactness) -> Comparison:
    """Compare a call from the same random state: the one that captures, then one that replays what was captured."""
    expected, finding = eager(recording), Comparison()
    for _ in range(2):  # one is freed before the next is made
        finding = finding.merge(guard.compare(expected, graphs(recording), exactness))
        if finding.problem:
            break
    return finding


def compared_on_its_path(
    eager: Replay, noting: Replay, graphs: Replay, recording: Recording, exactness: Exactness
) -> Comparison | None:
    """Compare graphs with eager calls on the path of a capture; None if that does not explain how they differ.

    Args:
        eager: replays a call eagerly.
        noting: does so and notes the draws.
        graphs: replays it by graphs.
        recording: a call that draws.
        exactness: of what is compared.
    """
    if recording.flags is None:
        return None
    on_its_path, evaluated = as_captured(eager), replace(recording, flags=recording.flags.evaluating())
    try:
        finding = compared(_finite(on_its_path), graphs, recording, exactness)
        if finding.problem or _probabilities(noting, recording) != _probabilities(as_captured(noting), recording):
            return None
        path = guard.compare(eager(evaluated), on_its_path(evaluated), exactness)
    except torch.OutOfMemoryError:
        raise  # nobody knows then
    except ours() as error:
        log.debug("accel: the path of a capture could not be compared: %s", error)
        return None
    return None if path.problem or path.unsure else replace(finding, other_draws=True)


def _finite(replay: Replay) -> Replay:
    """Return the same replay, which raises where it gives what is no number: nothing can be compared with that."""

    def replay_finite(recording: Recording) -> Replayed:
        replayed = replay(recording)
        given = [*replayed.outputs, *(gradient for gradient in replayed.gradients if gradient is not None)]
        if not all(bool(tensor.isfinite().all()) for tensor in map(_values, given)):
            raise ValueError("outputs or gradients are not finite")
        return replayed

    return replay_finite


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _probabilities(noting: Replay, recording: Recording) -> list[float]:
    """Return the first parameter of each draw that has one, as the probability of a dropout, in order of size."""
    floats = [[value for value in parameters if isinstance(value, float)] for *_, parameters in noting(recording).draws]
    return sorted(each[0] for each in floats if each)


def as_captured(replay: Replay) -> Replay:
    """Return the same replay, in which Python code is told that a stream is captured."""

    def replay_told(recording: Recording) -> Replayed:
        with _told_of_a_capture():
            return replay(recording)

    return replay_told


@contextlib.contextmanager
def _told_of_a_capture() -> Iterator[None]:
    """Answer that a stream is captured, in this thread, which goes backward too: a capture knows no other."""
    with _TELLING, torch.autograd.set_multithreading_enabled(False):
        asked, here, cuda = torch.cuda.is_current_stream_capturing, get_ident(), vars(torch.cuda)
        cuda["is_current_stream_capturing"] = lambda: get_ident() == here or asked()
        try:
            yield
        finally:
            cuda["is_current_stream_capturing"] = asked
