"""The registry: adding a strategy takes its file and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from accel.errors import InvalidArgument
from accel.strategies.allocator import Allocator
from accel.strategies.amp_o2 import AmpO2
from accel.strategies.async_copy import AsyncCopy
from accel.strategies.autocast_bf16 import AutocastBf16
from accel.strategies.base import Exactness, Strategy
from accel.strategies.batched_muon import BatchedMuon
from accel.strategies.channels_last import ChannelsLast
from accel.strategies.cuda_graphs import CudaGraphs
from accel.strategies.cudnn_benchmark import CudnnBenchmark
from accel.strategies.dropout_masks import DropoutMasks
from accel.strategies.float8 import Float8
from accel.strategies.flush_denormal import FlushDenormal
from accel.strategies.fused_optimizer import FusedOptimizer
from accel.strategies.gradients import GradientByHosts, GradientCompression, GradientHalf
from accel.strategies.intraop_threads import IntraopThreads
from accel.strategies.liger import Liger
from accel.strategies.loader_workers import LoaderWorkers
from accel.strategies.pin_memory import PinMemory
from accel.strategies.sample_cache import KeepSamples
from accel.strategies.tf32 import TF32
from accel.strategies.torch_compile import TorchCompile
from accel.strategies.window_attention import WindowAttention

__all__ = ["REGISTRY", "Exactness", "Strategy", "check_names", "names"]

# In the order of trial among equals, and of wrapping: the compiled call lies innermost.
REGISTRY: list[type[Strategy]] = [
    TorchCompile,
    ChannelsLast,
    AutocastBf16,
    AmpO2,
    TF32,
    CudnnBenchmark,
    WindowAttention,
    Liger,
    Float8,
    CudaGraphs,  # around all that changes what the model's call runs
    DropoutMasks,
    FusedOptimizer,
    BatchedMuon,
    Allocator,
    FlushDenormal,
    KeepSamples,  # before workers: it begins to record, which takes two epochs
    LoaderWorkers,
    IntraopThreads,
    PinMemory,
    AsyncCopy,
    GradientCompression,
    GradientHalf,
    GradientByHosts,
]


def names() -> list[str]:
    """Return the registered names."""
    return [strategy.name for strategy in REGISTRY]


def check_names(argument: str, given: Iterable[str]) -> frozenset[str]:
    """Return `given` as a set, or raise `InvalidArgument` naming the nearest registered name."""
    if isinstance(given, str):
        name = next(iter(_nearest(given)), given)
        raise InvalidArgument(
            f"{argument} must be a tuple of strategy names, got the string {given!r}; write ({name!r},)"
        )
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"{argument} must be a tuple of strategy names, got {given!r}")
    chosen = frozenset(given)
    for name in sorted(chosen, key=str):
        if name not in names():
            near = _nearest(str(name))
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
            raise InvalidArgument(f"{argument} names an unknown strategy {name!r}; {hint}")
    return chosen


def _nearest(name: str) -> list[str]:
    return difflib.get_close_matches(name, names(), n=1, cutoff=0.3)
