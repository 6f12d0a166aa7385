"""What was measured of a run, as plain numbers: the only input of naming."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel.profiler.phases import Measurement

SHARED_CORES = 0.3
"""Share of the cores kept busy by others from which on this run shares them."""


@dataclass(kw_only=True)
class ThreadShare:
    """How a thread spent its time, as shares that add up to 1."""

    run: float
    wait: float
    """Ready to run, but every core was taken."""
    blocked: float
    """Asleep: storage, network, a lock, another process."""


@dataclass(kw_only=True)
class LineTime:
    """Where the loop's own source was while one phase was open, by sampling."""

    phase: str
    file: str
    line: int
    source: str
    """The text of the line, '' if the file can't be read."""
    seconds: float
    """Sampled time, s."""
    share: float
    """Of all sampled time in the phase."""
    blocked: float = 0.0
    """Share of these seconds the thread was asleep."""
    tags: list[str] = field(default_factory=list)
    """What the line was doing, as far as the stack shows: `next batch`, `collate`, `checkpoint`, `read`."""


@dataclass(kw_only=True)
class LoaderFacts:
    """The loader that feeds the training steps."""

    kind: str = "none seen"
    """`DataLoader`, `own iterator` or `none seen`."""
    workers: int = 0
    persistent: bool = False
    pinned: bool = False


@dataclass(kw_only=True)
class WorkerShare:
    """One loader worker process, while the loop waited for it and otherwise."""

    pid: int
    share: ThreadShare


@dataclass(kw_only=True)
class OptimizerFacts:
    """The optimizer that ends the steps."""

    name: str = ""
    tensors: int = 0
    elements: int = 0
    multi_tensor: bool = True
    """False if it updates parameter by parameter in Python."""
    fused: bool = False

    @property
    def one_by_one(self) -> bool:
        """Whether it updates so many tensors one by one that it matters."""
        return not self.multi_tensor and self.tensors >= 20


@dataclass(kw_only=True)
class OpTime:
    """One operator or kernel in the trace window, per step."""

    name: str
    calls: float
    ms: float
    """Time in it alone, without what it calls."""
    share: float
    """Of the time of all operators."""
    kind: str = "other"
    """`matmul` (matrix products, convolutions, attention), `elementwise` (and other memory-bound work) or `other`."""
    small: bool = False
    """True if a call is so short that launching it costs more than doing it."""
    gflops: float | None = None
    """Achieved, GFLOP/s."""
    gb_per_s: float | None = None
    """Achieved, GB/s."""
    intensity: float | None = None
    """FLOP per byte."""


@dataclass(kw_only=True)
class SyncPoint:
    """A call in which the host waited for the device, in the trace window."""

    name: str
    file: str
    line: int
    calls: float
    """Per step."""
    ms: float
    """Per step."""
    copies: bool = False
    """Whether it is the wait of a copy to the device, and not of a read."""


@dataclass(kw_only=True)
class TraceSummary:
    """Summary of a window of two or three traced steps."""

    steps: int
    ops: list[OpTime]
    """The largest first."""
    ops_per_step: float
    small_share: float
    """Share of the model's operator time, on a CPU without the optimizer's, in calls too short for their launch."""
    matmul_share: float
    """Of the same time."""
    elementwise_share: float
    operators_ms: float | None = None
    """Of all operators on the host, tracing overhead included; None where their work ran on a device."""
    dtypes: dict[str, float] = field(default_factory=dict)
    """Share of matmul time by dtype."""
    busy_ms: float | None = None
    """Per step: the device ran a kernel, NCCL's left out, which wait for other ranks; None without a GPU."""
    copy_ms: float = 0.0
    """Per step: host-to-device copies that nothing hid."""
    read_ms: float = 0.0
    """Per step: the device idled since it had run dry while the host waited to read from it."""
    launch_ms: float = 0.0
    """Per step: the device idled since it had run dry while the host was doing something else."""
    syncs: list[SyncPoint] = field(default_factory=list)
    file: str = ""
    """Chrome trace, relative to the report."""


@dataclass(kw_only=True)
class Roofline:
    """The device's measured limits."""

    gflops: dict[str, float]
    """dtype → GFLOP/s of a large matrix product."""
    gb_per_s: float
    """Of a large copy, read plus written."""


@dataclass(kw_only=True)
class GpuShare:
    """One GPU as reported by NVML, medians over the run."""

    index: int
    name: str
    utilisation: float
    """Share of time with a kernel resident; says nothing about how full the device was."""
    memory_used_gib: float
    memory_total_gib: float
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    pcie_rx_mb_per_s: float | None = None
    pcie_tx_mb_per_s: float | None = None
    throttled: list[str] = field(default_factory=list)
    """Reasons seen in more than a tenth of the samples."""


@dataclass(kw_only=True)
class Evidence:
    """One rank's run."""

    steps: list[Measurement] = field(default_factory=list)
    """Observed steps, warm-up, trace window and one-offs left out."""
    one_offs: list[Measurement] = field(default_factory=list)
    """Steps that were slow once; see `step_times.without_one_offs`."""
    cores: int = 1
    """Cores this process may use."""
    threads: int = 1
    loop_threads: int | None = None
    """Those of the loop, where fewer were used to measure since others held cores."""
    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this host."""
    thread: ThreadShare | None = None
    data_thread: ThreadShare | None = None
    """The training thread while it waited for data."""
    foreign_cores: float | None = None
    """Of the cores that this process may use, those kept busy by other processes than this run's."""
    throttled: float | None = None
    """Share of periods in which the control group's quota throttled this run; None without a quota."""
    lines: list[LineTime] = field(default_factory=list)
    model_called: bool = True
    """False if no call of the model was marked: the forward phase then contains all that precedes the backward pass."""
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    workers: list[WorkerShare] = field(default_factory=list)
    collate_share: float = 0.0
    """Of the time spent waiting for data in this process."""
    gc_share: float = 0.0
    """Of the steps' time in Python's garbage collector."""
    optimizer: OptimizerFacts = field(default_factory=OptimizerFacts)
    dtype: str = "float32"
    """Most common dtype of the parameters."""
    anomaly_mode: bool = False
    ddp_wait_share: float | None = None
    """Share of the steps' time in DDP's all-reduce that the backward pass did not hide; None without DDP. In `steps` it
    is part of backward."""
    exchanges: float = 0.0
    """Of gradients in a step, by DDP's own count; 0 if that isn't known."""
    leaves_out_last: bool = False
    """Gradients are exchanged in passes before a step's last one, and not in that."""
    unused_search_share: float = 0.0
    """Share of the steps' time in which DDP looks for unused parameters, and finds none."""
    bucket_bytes: list[int] = field(default_factory=list)
    host_ms: dict[str, float] = field(default_factory=dict)
    """Phase → ms per step by the host's clock, where `steps` have a GPU's times; {} where they have the host's."""
    trace: TraceSummary | None = None
    roofline: Roofline | None = None
    gpus: list[GpuShare] = field(default_factory=list)
    model_name: str = ""
    unseen: list[str] = field(default_factory=list)
    """What could not be measured, one sentence each."""


def are_shared(foreign_cores: float | None, cores: int) -> bool:
    """Return whether others keep so many cores busy that waiting for one says little of the run itself."""
    return foreign_cores is not None and foreign_cores > SHARED_CORES * cores
