"""Counterfactuals of how `DistributedDataParallel` exchanges gradients: not at all, less often, by another reducer.

A reducer is made anew by what DDP itself calls when it is made or unpickled, which is no public part of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.profiler.experiments.switch import Counterfactual

_REDUCERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "communication.small_buckets": ("larger buckets", "DDP's buckets held 25 MiB", {"cap": 25 * 2**20}),
    "communication.unused_search": ("no search", "DDP did not look for unused parameters", {"seeks": False}),
}
"""Cause → what a reducer without it is made by."""
_LEFT_OUT: Any = 0
"""False, told from the one that the loop's own `no_sync` sets."""


def counterfactual(cause: str, models: Sequence[DistributedDataParallel], passes: int) -> Counterfactual | None:
    """Return what switches a cause off in these models, None if nothing does.

    Args:
        cause: its name.
        models: of the loop.
        passes: backward passes with an exchange before each update.
    """
    if cause == "communication.exposed":
        return no_exchange(models)
    return last_exchange(models, passes) if cause == "communication.each_micro_step" else other_reducer(models, cause)


def no_exchange(models: Sequence[DistributedDataParallel]) -> Counterfactual:
    """Exchange no gradients between ranks; it has worked if the loop, which may set that itself, left it off."""
    left_off = 0

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal left_off
        for model in models:
            model.require_backward_grad_sync = False
        try:
            yield
        finally:
            for model in models:
                left_off += not model.require_backward_grad_sync
                model.require_backward_grad_sync = True

    what = "the ranks did not exchange gradients (no_sync)"
    return Counterfactual("no gradient exchange", what, off, lambda: left_off > 0, changes_learning=True)


def last_exchange(models: Sequence[DistributedDataParallel], passes: int) -> Counterfactual:
    """Exchange gradients in the last of so many passes before an update that the loop does not leave out itself."""
    left_out = 0

    def before_call(model: DistributedDataParallel, counts: dict[int, int]) -> None:
        nonlocal left_out
        if torch.is_grad_enabled() and model.require_backward_grad_sync is not False:
            counts[id(model)] = counts.get(id(model), 0) + 1
            model.require_backward_grad_sync = counts[id(model)] % passes == 0 or _LEFT_OUT
            left_out += not model.require_backward_grad_sync

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        counts: dict[int, int] = {}
        hooks = [model.register_forward_pre_hook(lambda model, _: before_call(model, counts)) for model in models]
        try:
            yield
        finally:
            for model, hook in zip(models, hooks, strict=True):
                hook.remove()
                model.require_backward_grad_sync = True

    what = f"gradients were exchanged in one of {passes} backward passes (no_sync)"
    return Counterfactual("one exchange", what, off, lambda: left_out > 0, changes_learning=True)


def other_reducer(models: Sequence[DistributedDataParallel], cause: str) -> Counterfactual | None:
    """Have DDP reduce by larger buckets, or without looking for unused parameters: its reducer is made anew."""
    if cause not in _REDUCERS or any(m.static_graph or m.gradient_as_bucket_view or m._comm_hooks for m in models):
        return None
    name, what, changes = _REDUCERS[cause]
    made = 0

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal made
        before = [_remade(model, **changes) for model in models]
        made += 1
        try:
            yield
        finally:
            for model, settings in zip(models, before, strict=True):
                _remade(model, **settings)

    return Counterfactual(name, what, off, lambda: made > 0)


def _remade(ddp: DistributedDataParallel, cap: Any = None, seeks: bool | None = None) -> dict[str, Any]:
    """Make the reducer of a model anew, between two steps and on all ranks; return what makes it as it was.

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
