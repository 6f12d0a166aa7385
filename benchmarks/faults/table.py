"""The registry of the fault matrix: each script of scripts/, what is wrong with it and what cures it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel.profiler.diagnose.causes import OVERSUBSCRIBED
from accel.profiler.diagnose.rules import IDLE

Compare = Literal["seconds_per_step", "samples_per_second"]

HEALTHY = "none"
"""The cause of a control: nothing holds it back."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One script and the answer a profiler should give."""

    name: str
    """Of the script, without `.py`."""
    cause: str
    """The cause `accel profile` must name first; `none` for a control."""
    remedy: str = ""
    """What `--fixed` does, '' for a control."""
    ranks: int = 1
    compare: Compare = "seconds_per_step"
    """Figure in which the remedy shows."""

    @property
    def script(self) -> Path:
        """The file."""
        return Path(__file__).parent / "scripts" / f"{self.name}.py"

    @property
    def digest(self) -> str:
        """What tells this version of the script from others."""
        return hashlib.sha256(self.script.read_bytes()).hexdigest()[:12]

    @property
    def bottleneck(self) -> str:
        """The class of the cause: what stands before the dot."""
        return self.cause.partition(".")[0]

    def cause_beside(self, others: int, cores: int) -> str:
        """Return the cause to be named beside other busy processes, '' for the same as without.

        Args:
            others: processes that each keep a core busy.
            cores: of the machine.
        """
        if self.ranks > 1 and self.ranks + others > cores:
            return OVERSUBSCRIBED  # ranks wait for whoever has no core: it can't be told who is slow by itself
        if self.cause == "compute.threads" and cores - others - 1 < IDLE * cores:
            return HEALTHY  # there are too few cores for more threads
        return ""

    @property
    def healthy(self) -> bool:
        """True for a control."""
        return self.cause == HEALTHY


_LISTED = (
    Case(name="input_cpu", cause="input.cpu", remedy="samples prepared once and held in memory"),
    Case(name="input_storage", cause="input.storage", remedy="samples held in memory"),
    Case(name="input_workers", cause="input.workers", remedy="samples prepared once, the same single worker"),
    Case(name="input_worker_storage", cause="input.worker_storage", remedy="samples held in memory, the same workers"),
    Case(name="input_epoch_start", cause="input.epoch_start", remedy="persistent_workers=True"),
    Case(name="input_collate", cause="input.collate", remedy="pad_sequence in the collate function"),
    Case(name="input_iterator", cause="input.iterator", remedy="batches made before the training"),
    Case(name="outside_logging", cause="outside.step", remedy="log every 100 steps"),
    Case(name="outside_checkpoint", cause="outside.checkpoint", remedy="one checkpoint at the end"),
    Case(name="outside_evaluation", cause="outside.evaluation", remedy="evaluate every 10,000 steps"),
    Case(name="outside_periodic", cause="outside.periodic", remedy="no report"),
    Case(name="optimizer_per_parameter", cause="optimizer.per_parameter", remedy="AdamW(fused=True)"),
    Case(name="optimizer_update", cause="optimizer.update", remedy="AdamW(fused=True)"),
    Case(name="small_ops", cause="launch.small_ops", remedy="batch 8 times as large", compare="samples_per_second"),
    Case(name="one_thread", cause="compute.threads", remedy="one thread per core"),
    Case(name="float64", cause="compute.float64", remedy="float32"),
    Case(name="anomaly", cause="compute.anomaly", remedy="anomaly detection off"),
    Case(name="gc_collect", cause="host.gc", remedy="no gc.collect()"),
    Case(name="step_code", cause="host.step_code", remedy="images augmented before the training"),
    Case(name="memory_bound", cause="memory.bound", remedy="nn.GELU in one operation"),
    Case(name="slow_link", cause="communication.exposed", remedy="local SGD: average every 100 steps", ranks=2),
    Case(name="straggler", cause="straggler.rank", remedy="no quantiles on the last rank", ranks=2),
    Case(name="healthy_mlp", cause=HEALTHY),
    Case(name="healthy_cnn", cause=HEALTHY),
    Case(name="healthy_transformer", cause=HEALTHY),
    Case(name="healthy_workers", cause=HEALTHY),
    Case(name="healthy_logging", cause=HEALTHY),
    Case(name="healthy_ddp", cause=HEALTHY, ranks=2),
)

CASES: dict[str, Case] = {case.name: case for case in _LISTED}
"""Those that run on a CPU."""

_ON_CUDA = (
    Case(name="cuda_item", cause="sync.read", remedy="read every 100 steps"),
    Case(name="cuda_pageable", cause="transfer.pageable", remedy="pinned memory, copies that do not block"),
    Case(
        name="cuda_small_kernels",
        cause="launch.small_ops",
        remedy="batch 8 times as large",
        compare="samples_per_second",
    ),
    Case(name="cuda_elementwise", cause="memory.bound", remedy="F.gelu in one operation"),
    Case(name="cuda_healthy", cause=HEALTHY),
)

CUDA_CASES: dict[str, Case] = {case.name: case for case in _ON_CUDA}
"""Those that need a GPU: `make gpu` runs them."""
