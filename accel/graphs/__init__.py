"""CUDA graphs of training steps and models: captured once for each kind of input, replayed with one launch."""

from __future__ import annotations

from accel.graphs.capture import CapturedStep, capture
from accel.graphs.captures import CaptureError
from accel.graphs.kinds import Buckets
from accel.graphs.model_calls import ModelCalls, calls_of, release
from accel.graphs.obstacles import Obstacle, why_not_capturable

__all__ = [
    "Buckets",
    "CaptureError",
    "CapturedStep",
    "ModelCalls",
    "Obstacle",
    "calls_of",
    "capture",
    "release",
    "why_not_capturable",
]
