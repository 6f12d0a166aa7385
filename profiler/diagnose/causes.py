"""The causes that the profiler can name: what is wrong, the remedy, and the strategy that applies it automatically."""

from __future__ import annotations

from dataclasses import dataclass

from accel.profiler.bottleneck import Bottleneck

PHASES_OF = {
    Bottleneck.INPUT: ("data",),
    Bottleneck.TRANSFER: ("copy",),
    Bottleneck.COMPUTE: ("forward", "loss", "backward"),
    Bottleneck.COMMUNICATION: ("communication",),
    Bottleneck.OPTIMIZER: ("optimizer",),
    Bottleneck.OUTSIDE: ("outside", "evaluation"),
}
"""Class → its phases, for the classes that have some."""


@dataclass(frozen=True)
class Cause:
    """One thing that can hold a run back."""

    name: str
    """The bottleneck's class, a dot, and what it is."""
    title: str
    remedy: str
    strategy: str = ""
    """Strategy of `accel.optimize` that applies the remedy."""
    own_phases: tuple[str, ...] | None = None
    """The phases whose time it takes, where these are not those of its class; () where it slows the whole step down."""
    otherwise: str = ""
    """The cause of the same time where an experiment clears this one."""

    @property
    def bottleneck(self) -> Bottleneck:
        """The class."""
        return Bottleneck(self.name.split(".")[0])

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases whose time it takes and its remedy can save."""
        return PHASES_OF.get(self.bottleneck, ()) if self.own_phases is None else self.own_phases


_ALL = (
    Cause(
        "input.cpu",
        "each batch is computed in the training process while the model waits",
        "move the work to worker processes (num_workers), do it once and store the result, or do it on whole batches "
        "(a dataset with __getitems__)",
        "loader_workers",
    ),
    Cause(
        "input.storage",
        "each batch waits for storage or the network in the training process",
        "read ahead in worker processes or threads; more of them than cores is right for waiting, or keep the data "
        "in memory",
        "loader_workers",
    ),
    Cause(
        "input.workers",
        "the loader's workers are all busy computing and still too slow",
        "more workers if cores are free; otherwise a cheaper transform, or one done once and stored",
    ),
    Cause(
        "input.worker_storage",
        "the loader's workers sleep in storage or network calls",
        "more workers (they sleep, so more than cores is right), larger reads, a faster or nearer store",
    ),
    Cause(
        "input.handover",
        "taking batches over from the loader's workers costs the training process",
        "fewer and larger tensors in a batch; for cheap samples, no workers, or "
        "accel.ContinuousLoader(loader), which finds out what is fastest",
    ),
    Cause(
        "input.epoch_start",
        "each epoch begins with a wait for the loader's workers",
        "accel.ContinuousLoader(loader), whose workers go on across epochs, or persistent_workers=True",
        "loader_workers",
        own_phases=("data", "forward", "loss", "backward", "optimizer"),
    ),
    Cause(
        "input.collate",
        "putting samples together into a batch takes most of the wait",
        "a vectorised collate_fn, or samples that are tensors of one shape already",
        "loader_workers",
    ),
    Cause(
        "input.iterator",
        "the loop's own iterator or function makes each batch while the model waits",
        "make batches ahead of time, in another thread, or in a torch.utils.data.DataLoader with workers",
        own_phases=("host", "forward", "loss", "outside"),
    ),
    Cause(
        "transfer.pageable",
        "the device waits for copies from the host",
        "pin_memory=True in the loader and .to(device, non_blocking=True), one batch ahead",
        "pin_memory",
        own_phases=(),
    ),
    Cause(
        "launch.small_ops",
        "many small operations: starting them takes longer than doing them",
        "a larger batch, torch.compile, or CUDA graphs",
        "torch_compile",
        own_phases=("forward", "loss", "backward", "optimizer"),
    ),
    Cause(
        "sync.read",
        "the host waits for the device to read a value back",
        "read it every N steps, or keep the sum on the device and read it once",
    ),
    Cause(
        "compute.threads",
        "computation runs on fewer threads than there are idle cores",
        "torch.set_num_threads(cores), or drop OMP_NUM_THREADS",
        "intraop_threads",
        own_phases=("forward", "loss", "backward", "optimizer"),
    ),
    Cause(
        "compute.float64",
        "the model computes in double precision",
        "float32 (model.float(), and data to match) unless the problem needs more",
        own_phases=("forward", "loss", "backward", "optimizer"),
    ),
    Cause(
        "compute.anomaly",
        "autograd's anomaly detection is on",
        "torch.autograd.set_detect_anomaly(False) outside of debugging",
    ),
    Cause(
        "memory.bound",
        "element-wise operations on large tensors: memory bandwidth is the limit",
        "fuse them (torch.compile), fewer passes, or a 16-bit dtype",
        "torch_compile",
        own_phases=("forward", "loss", "backward"),
    ),
    Cause(
        "communication.exposed",
        "gradients are exchanged longer than the backward pass can hide",
        "fewer exchanges (accumulate under no_sync), 16-bit or compressed gradients, a faster link",
        own_phases=("forward", "backward", "communication", "optimizer"),
    ),
    Cause(
        "communication.each_micro_step",
        "gradients are exchanged in each of the backward passes before an update",
        "all but the last of them under model.no_sync(), with the call of the model inside, too "
        "(FSDP2: model.set_requires_gradient_sync(False))",
        own_phases=("forward", "backward", "communication", "optimizer"),
        otherwise="communication.exposed",
    ),
    Cause(
        "communication.inverted_no_sync",
        "the last backward pass before an update exchanges no gradients, and earlier ones do: ranks come apart",
        "model.no_sync() around all passes but the last; a condition such as (i + 1) % n is the wrong way round",
        own_phases=("forward", "backward", "communication", "optimizer"),
    ),
    Cause(
        "communication.small_buckets",
        "gradients are exchanged in many small buckets, each with the link's latency",
        "DistributedDataParallel's default bucket_cap_mb (25), or more",
        own_phases=("forward", "backward", "communication", "optimizer"),
    ),
    Cause(
        "communication.unused_search",
        "DistributedDataParallel looks for unused parameters in each step, and there are none",
        "find_unused_parameters=False",
        own_phases=("forward", "backward", "communication"),
    ),
    Cause(
        "straggler.rank",
        "one rank is slower than the others, and all wait for it",
        "look at that rank's own phases: its input, its host, its share of the work",
    ),
    Cause(
        "straggler.evaluation",
        "one rank evaluates while the others wait for it",
        "evaluate on all ranks, a shard of the data on each, or less often, or in another process",
    ),
    Cause(
        "optimizer.per_parameter",
        "the optimizer updates parameter by parameter",
        "foreach=True or fused=True",
        "fused_optimizer",
    ),
    Cause(
        "optimizer.update",
        "the optimizer's own arithmetic is a large part of the step",
        "a fused optimizer, fewer or smaller parameters to update, or an update every N batches",
        "fused_optimizer",
    ),
    Cause(
        "outside.step",
        "the loop does other work after each step",
        "do it every N steps, or in another thread",
        own_phases=("outside",),
    ),
    Cause(
        "outside.checkpoint",
        "saving checkpoints stops the training",
        "save less often, or copy to host memory and write in another thread (torch.distributed.checkpoint.async_save)",
    ),
    Cause(
        "outside.evaluation",
        "evaluation takes a large part of the run",
        "evaluate less often, on a part of the data, or in another process",
        own_phases=("evaluation",),
    ),
    Cause(
        "outside.periodic",
        "the training stops every so often for other work",
        "do it less often, or in another thread",
    ),
    Cause(
        "host.oversubscribed",
        "other processes keep the machine's cores busy",
        "run on a quiet machine before believing any figure, or give the job cores of its own",
    ),
    Cause(
        "host.own_processes",
        "this run starts more busy threads and processes than there are cores",
        "fewer loader workers, or fewer threads in each (torch.set_num_threads)",
    ),
    Cause(
        "host.gc",
        "Python's garbage collector runs within the steps",
        "no gc.collect() in the loop; gc.freeze() after the first step, so that long-lived objects are not scanned "
        "again",
    ),
    Cause(
        "host.step_code",
        "the loop's own code inside the step takes longer than it looks",
        "vectorise it, move it to the loader's workers, or read values less often",
        own_phases=("host", "forward", "loss", "backward"),
    ),
)

CAUSES = {cause.name: cause for cause in _ALL}
"""By name."""
_SWITCHED_TOGETHER = (
    ("input.cpu", "input.storage", "input.workers", "input.worker_storage", "input.handover", "input.collate"),
    ("optimizer.per_parameter", "optimizer.update"),
)
OVERSUBSCRIBED = "host.oversubscribed"
CROWDS = (OVERSUBSCRIBED, "host.own_processes")
"""Beside one of these no other cause can be established."""


def switched_with(cause: str) -> tuple[str, ...]:
    """Return the causes that one experiment switches off, this one first: what it shows holds for each of them."""
    others = next((group for group in _SWITCHED_TOGETHER if cause in group), ())
    return (cause, *(other for other in others if other != cause))
