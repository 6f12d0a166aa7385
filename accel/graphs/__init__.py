"""CUDA graphs of whole training steps: captured once for each kind of input, replayed with one launch."""

from __future__ import annotations

from accel.graphs.buckets import Buckets
from accel.graphs.capture import CapturedStep, capture
from accel.graphs.obstacles import Obstacle, why_not_capturable

__all__ = ["Buckets", "CapturedStep", "Obstacle", "capture", "why_not_capturable"]
