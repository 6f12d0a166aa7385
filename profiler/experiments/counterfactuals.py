"""Counterfactuals: what switches one suspected cause off in a running script, from one step to the next.

Reads of values on a device are answered by what the same call site read before, without waiting. What a read returns
decides what the script does, so the answer has the type, dtype and shape of the true value, and
every 64th read is a true one: a loop that goes on until a value changes must terminate. Without gradients all reads are
true: what an evaluation finds is printed, or decides. So are those of a gradient scaler, which leaves an update out
where it reads of an infinite gradient: by an older answer it would make all weights NaN. `Tensor.numpy()` is not
replaced, since tensors on a device don't have it. `Tensor.cpu()` is answered only for single values without gradients:
larger tensors are what checkpoints are made of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.profiler.diagnose.causes import switched_with
from accel.profiler.experiments import update_path
from accel.profiler.experiments.update_path import Paths
from accel.profiler.host import usable_cores
from accel.profiler.loop.patches import Patches, call_method, replace_reads
from accel.profiler.loop.recorder import Recorder


@dataclass
class Counterfactual:
    """One thing that can be switched between two steps."""

    name: str
    what: str
    """What the steps without the suspected cause did differently."""
    off: Callable[[], AbstractContextManager[None]]
    """The suspected cause is off while this is entered."""
    worked: Callable[[], bool]
    """Return whether it has removed anything so far; the experiment is void if it has not."""
    changes_learning: bool = False
    """The steps without the suspected cause don't train as usual: the state from before them is restored."""


def counterfactual(cause: str, recorder: Recorder, local_ranks: int = 1, passes: int = 1) -> Counterfactual | None:
    """Return what switches a cause off in this run, None if nothing does.

    Args:
        cause: its name.
        recorder: of the loop.
        local_ranks: that share the cores of this host.
        passes: backward passes with an exchange before each update.
    """
    if cause in switched_with("input.cpu") and recorder.loaders.loader is not None:
        return fetched_ahead(recorder)
    if cause == "sync.read":
        return no_waiting(StaleReads())
    if cause == "host.gc":
        return no_collector(lambda: recorder.probes.collector.seconds)
    if cause == "compute.anomaly":
        return no_anomaly_mode()
    if cause == "compute.threads":
        return all_threads(local_ranks)
    if cause.startswith("optimizer.") and any(can_update_at_once(o) for o in recorder.optimizers):
        return one_update(recorder.optimizers)
    ddp = [module for module in recorder.roots.modules if isinstance(module, DistributedDataParallel)]
    if cause == "communication.exposed" and ddp:
        return no_exchange(ddp)
    if cause == "communication.each_micro_step" and ddp:
        return last_exchange(ddp, passes)
    return other_reducer(ddp, cause) if ddp else None


def counted(
    name: str, what: str, run: Callable[[], Generator[None, None, int]], *, changes_learning: bool = False
) -> Counterfactual:
    """Make one of what switches the cause off, yields, switches it on again, and returns how often it has acted."""
    acted = 0

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal acted
        switched = run()
        next(switched)
        try:
            yield
        finally:  # on again, however the block ends
            acted += _result(switched)

    return Counterfactual(name, what, off, lambda: acted > 0, changes_learning)


def _result(switched: Generator[None, None, int]) -> int:
    """Run what comes after the `yield`, and return its result."""
    try:
        next(switched)
    except StopIteration as ended:
        return int(ended.value)
    return 0


def fetched_ahead(recorder: Recorder) -> Counterfactual:
    """Fetch batches while the step's clock is stopped: as if the loader were never late."""
    loaders = recorder.loaders

    def run() -> Generator[None, None, int]:
        loaders.ahead, before = True, loaders.fetched
        yield
        loaders.ahead = False
        return loaders.fetched - before

    return counted("batch fetched ahead", "each batch was fetched between two steps, off the clock", run)


def no_waiting(reads: StaleReads) -> Counterfactual:
    """Answer reads of values by older ones."""
    what = "item(), float() and the like returned what the same place had read before, without waiting for the device"
    return Counterfactual("no waiting for values", what, reads.off, lambda: reads.answered > 0, changes_learning=True)


def one_update(optimizers: Sequence[Optimizer]) -> Counterfactual:
    """Let the optimizers update all parameters in one fused or foreach call."""
    optimizers = [each for each in optimizers if can_update_at_once(each)]

    def run() -> Generator[None, None, int]:
        paths = Paths()
        for optimizer in optimizers:
            paths.switch([optimizer], fused=update_path.has_fused(optimizer))
        yield
        switched = sum(map(update_path.updates_at_once, optimizers))
        paths.restore()
        return switched

    return counted("multi-tensor optimizer", "the optimizer took its fused path, or foreach where it has none", run)


def can_update_at_once(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has another path, and is not on it."""
    return not update_path.refusal(optimizer) and not update_path.updates_at_once(optimizer)


def unchanged() -> Counterfactual:
    """Switch nothing, on a rank that can't switch what the others try: what is measured is what those do."""
    return Counterfactual("nothing", "nothing", contextlib.nullcontext, lambda: True)


# -- modes of the whole process ----------------------------------------------------------------------------------------


def no_collector(spent: Callable[[], float]) -> Counterfactual:
    """Switch the collector off, and let `gc.collect` do nothing.

    It has worked if the collector ran for less than half as long: a function that was imported by name goes on.
    """
    ran_on = ran_off = 0.0
    at, patches = spent(), Patches()

    def collecting(original: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, **kwargs: 0 if patches.on else original(*args, **kwargs)

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal at, ran_on, ran_off
        began, was_on = spent(), gc.isenabled()
        ran_on += began - at
        gc.disable()
        patches.replace(gc, "collect", collecting)
        try:
            yield
        finally:
            at = spent()
            ran_off += at - began
            patches.remove()
            if was_on:
                gc.enable()

    what = "the garbage collector was off and gc.collect() did nothing"
    return Counterfactual("no garbage collection", what, off, lambda: ran_off < 0.5 * ran_on)


def no_anomaly_mode() -> Counterfactual:
    """Switch anomaly detection off; what the script sets meanwhile takes effect afterwards."""
    patches = Patches()
    requests: list[tuple[bool, bool]] = []

    def setting(original: Callable[..., None]) -> Callable[..., None]:
        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            if patches.on:
                requests.append((mode, check_nan))
            else:
                original(mode, check_nan)

        return set_anomaly_enabled

    def run() -> Generator[None, None, int]:
        requests[:] = [(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())]
        torch.set_anomaly_enabled(False)
        patches.replace(torch, "set_anomaly_enabled", setting)
        yield
        patches.remove()
        torch.set_anomaly_enabled(*requests[-1])
        return sum(mode for mode, _ in requests)

    what = "autograd's anomaly detection was off, whatever the loop asked for"
    return counted("no anomaly detection", what, run)


def all_threads(local_ranks: int = 1) -> Counterfactual:
    """Compute on all cores that ranks of this host share, unless the loop sets its threads itself."""
    cores = max(1, usable_cores() // local_ranks)
    own = torch.get_num_threads()

    def run() -> Generator[None, None, int]:
        torch.set_num_threads(cores)
        yield
        is_effective = torch.get_num_threads() == cores != own
        torch.set_num_threads(own)
        return is_effective

    return counted(f"{cores} threads", f"torch.set_num_threads({cores})", run)


# -- how DistributedDataParallel exchanges gradients -------------------------------------------------------------------


def no_exchange(models: Sequence[DistributedDataParallel]) -> Counterfactual:
    """Exchange no gradients between ranks; it has worked if the loop, which may set that itself, left it off."""

    def run() -> Generator[None, None, int]:
        for model in models:
            model.require_backward_grad_sync = False
        yield
        left_off = sum(not model.require_backward_grad_sync for model in models)
        for model in models:
            model.require_backward_grad_sync = True
        return left_off

    what = "the ranks did not exchange gradients (no_sync)"
    return counted("no gradient exchange", what, run, changes_learning=True)


_LEFT_OUT: Any = 0
"""False, told from the one that the loop's own `no_sync` sets."""


def last_exchange(models: Sequence[DistributedDataParallel], passes: int) -> Counterfactual:
    """Exchange gradients in the last of so many passes before an update that the loop does not leave out itself."""

    def run() -> Generator[None, None, int]:
        counts: Counter[int] = Counter()

        def before_call(model: Any, args: Any) -> None:
            if torch.is_grad_enabled() and model.require_backward_grad_sync is not False:
                counts[id(model)] += 1
                model.require_backward_grad_sync = counts[id(model)] % passes == 0 or _LEFT_OUT

        hooks = [model.register_forward_pre_hook(before_call) for model in models]
        yield
        for model, hook in zip(models, hooks, strict=True):
            hook.remove()
            model.require_backward_grad_sync = True
        return sum(count - count // passes for count in counts.values())

    what = f"gradients were exchanged in one of {passes} backward passes (no_sync)"
    return counted("one exchange", what, run, changes_learning=True)


_REDUCERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "communication.small_buckets": ("larger buckets", "DDP's buckets held 25 MiB", {"cap": 25 * 2**20}),
    "communication.unused_search": ("no search", "DDP did not look for unused parameters", {"seeks": False}),
}
"""Cause → what a reducer without it is made by."""


def other_reducer(models: Sequence[DistributedDataParallel], cause: str) -> Counterfactual | None:
    """Have DDP reduce by larger buckets, or without looking for unused parameters, by another reducer."""
    if cause not in _REDUCERS or any(m.static_graph or m.gradient_as_bucket_view or m._comm_hooks for m in models):
        return None
    name, what, changes = _REDUCERS[cause]

    def run() -> Generator[None, None, int]:
        before = [_remade(model, **changes) for model in models]
        yield
        for model, settings in zip(models, before, strict=True):
            _remade(model, **settings)
        return len(models)

    return counted(name, what, run)


def _remade(ddp: DistributedDataParallel, cap: Any = None, seeks: bool | None = None) -> dict[str, Any]:
    """Replace the reducer of a model, between two steps and on all ranks; return what makes it as it was.

    Args:
        cap: bytes of a bucket, or the settings that this has returned; None leaves them.
        seeks: look for unused parameters; None leaves it.
    """
    model: Any = ddp
    config = getattr(model, "_bucket_config", None)  # torch before 2.13 has the bytes alone
    before = {"cap": model.bucket_bytes_cap if config is None else config, "seeks": model.find_unused_parameters}
    if cap is not None and config is None:
        model.bucket_bytes_cap = cap
    elif cap is not None:
        model._bucket_config = _buckets(config, cap) if isinstance(cap, int) else cap
        model.bucket_bytes_cap = model._bucket_config.bucket_bytes_cap
    if seeks is not None:
        model.find_unused_parameters = seeks
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)
    model._set_ddp_runtime_logging_sample_rate(1)
    return before


def _buckets(config: Any, cap: int) -> Any:
    first = min(cap, 2**20)  # as by default: the first one is on its way early
    return dataclasses.replace(config, bucket_bytes_cap=cap, first_bucket_bytes_cap=first, per_bucket_bytes_caps=())


# -- reads that lag a step behind --------------------------------------------------------------------------------------


_TRUE_READ_EVERY = 64
_TENSOR_FILE = Tensor.__format__.__code__.co_filename
_SCALER = "grad_scaler.py"
"""How the names of files end that hold one: torch.amp's, that of FSDP, and those of other libraries."""

_Site = tuple[Any, ...]


def _on_device(tensor: Tensor) -> bool:
    # To a subclass (a fake or a distributed tensor) a read may mean something else.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_cuda


class StaleReads:
    """Reads on the device return what the same call site read before, without waiting for the device."""

    def __init__(self, waits: Callable[[Tensor], bool] = _on_device) -> None:
        self.answered = 0
        self._waits = waits
        self._values: dict[_Site, tuple[Tensor, int]] = {}
        self._patches = Patches()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Answer reads from stored values while this is entered."""
        replace_reads(self._patches, self._reading)
        try:
            yield
        finally:
            self._patches.remove()

    def _reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                not self._patches.on
                or not torch.is_grad_enabled()
                or not self._waits(tensor)
                or (name == "cpu" and (tensor.numel() != 1 or tensor.requires_grad))
            ):
                return call_method(original, tensor, *args, **kwargs)
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename == _TENSOR_FILE:  # an f-string reads through Tensor.__format__
                frame = frame.f_back
            if frame.f_code.co_filename.endswith(_SCALER):
                return original(tensor, *args, **kwargs)
            site = (name, frame.f_code, frame.f_lasti, tensor.dtype, tensor.shape)
            value = self._value_at(site, tensor)
            return value.clone() if name == "cpu" else original(value, *args, **kwargs)

        return read

    def _value_at(self, site: _Site, tensor: Tensor) -> Tensor:
        """Return, on the CPU, the value that a call site read before or, if that is missing or too old, reads now."""
        value, uses = self._values.get(site, (None, 0))
        if value is None or uses >= _TRUE_READ_EVERY - 1:
            value, uses = tensor.detach().to("cpu", copy=True), 0
        else:
            self.answered += 1
            uses += 1
        self._values[site] = value, uses
        return value
