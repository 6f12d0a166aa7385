"""Counterfactuals that switch a mode of the whole process: the garbage collector, anomaly detection, threads."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from accel.profiler.experiments.switch import Counterfactual
from accel.profiler.host import usable_cores
from accel.profiler.loop.patches import Patches


def no_collector(spent: Callable[[], float]) -> Counterfactual:
    """Switch the collector off, and let `gc.collect` do nothing.

    It has worked if the collector ran for less than half as long: a function that was imported by name goes on.

    Args:
        spent: returns the seconds that the collector has run for so far.
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
    requested, switched_off, patches = (False, True), 0, Patches()

    def request(mode: bool, check_nan: bool = True) -> None:
        nonlocal requested, switched_off
        requested = mode, check_nan
        switched_off += mode

    def setting(original: Callable[..., None]) -> Callable[..., None]:
        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            (request if patches.on else original)(mode, check_nan)

        return set_anomaly_enabled

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        request(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.set_anomaly_enabled(False)
        patches.replace(torch, "set_anomaly_enabled", setting)
        try:
            yield
        finally:
            patches.remove()
            torch.set_anomaly_enabled(*requested)

    what = "autograd's anomaly detection was off, whatever the loop asked for"
    return Counterfactual("no anomaly detection", what, off, lambda: switched_off > 0)


def all_threads(local_ranks: int = 1) -> Counterfactual:
    """Compute on all usable cores, unless the loop sets its threads itself.

    Args:
        local_ranks: that share them.
    """
    cores = max(1, usable_cores() // local_ranks)
    own, effective = torch.get_num_threads(), 0

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal effective
        torch.set_num_threads(cores)
        try:
            yield
        finally:
            effective += torch.get_num_threads() == cores != own
            torch.set_num_threads(own)

    return Counterfactual(f"{cores} threads", f"torch.set_num_threads({cores})", off, lambda: effective > 0)
