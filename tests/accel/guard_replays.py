"""Replays of a recorded call, plainly and otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.guard import guard
from accel.guard.guard import Comparison, Recording
from accel.strategies.base import Exactness


def replayed_both_ways(model: nn.Module, wrap: Callable[[Any], Any], recording: Recording) -> Comparison:
    """Replay a call plainly and as `wrap` makes it, each from the state that was recorded, and compare the two."""
    with guard.untouched(model, torch.device("cpu")):
        recording.before.restore()
        plain = guard.replay(model, model, recording)
        recording.before.restore()
        candidate = guard.replay(model, wrap(model), recording)
    return guard.compare(plain, candidate, Exactness.REORDERED)
