"""What ranks do where stages are issued as on a GPU, by the thread that runs backward; here over gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme
from accel.comm.engine import pipeline
from accel.comm.engine.gradient_engine import GradientEngine
from accel.comm.hooks import hook
from accel.comm.int8 import Int8
from accel.comm.ranks.channel import GlooChannel
from tests.comm import cases
from tests.comm.cases import COMPRESSORS, SECONDS, Given, backward, gradients, make, same_everywhere


@contextmanager
def in_line() -> Iterator[None]:
    before = pipeline.in_line
    pipeline.in_line = lambda device: True
    try:
        yield
    finally:
        pipeline.in_line = before


def order(rank: int, world: int) -> dict[str, Any]:
    """Note who issues what, on a rank that is slow to encode."""
    noted: list[tuple[str, int]] = []

    def note(what: str) -> None:
        noted.append((what, threading.get_ident()))

    def noting(call: Any, what: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            note(what)
            return call(*args, **kwargs)

        return called

    def noting_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the classes
        found = hook(state, bucket)
        note(f"bucket {bucket.index()}")
        return found

    encode = Int8.encode

    def slowly(*args: Any) -> None:
        time.sleep(0.01 * rank)
        encode(*args)

    with in_line():
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004, find_unused_parameters=True)
        engine = GradientEngine(timeout=SECONDS)
        engine.bind(ddp)
        ddp.register_comm_hook(engine, noting_hook)
        engine.use(Scheme("int8"))
        backward(ddp, gradients(rank, 0))
        Int8.encode = slowly  # type: ignore[method-assign]
        GlooChannel.exchange = noting(GlooChannel.exchange, "exchange")  # type: ignore[method-assign]
        noted.clear()
        got = backward(ddp, gradients(rank, 1))
        engine.close()
    return {"order": [what for what, _ in noted], "threads": len({thread for _, thread in noted}), "mean": got}


def as_threads(rank: int, world: int) -> dict[str, bool]:
    """Compare with what threads make of the same gradients, by hosts, and look at replicas."""
    found = {}
    for name, compressor in COMPRESSORS.items():
        kind = compressor()
        options: dict[str, Any] = {"hierarchical": True, "error_feedback": kind.takes_feedback}
        ddp, state = make(compressor(), **options)
        want = [backward(ddp, gradients(rank, step)) for step in range(3)]
        state.close()
        with in_line():
            ddp, state = make(compressor(), **options)
            got = [backward(ddp, gradients(rank, step)) for step in range(3)]
            state.close()
        found[name] = all(map(torch.equal, got, want)) and same_everywhere(got[-1])
    return found


def fails(rank: int, world: int) -> dict[str, Any]:
    """Let a compressor raise on one rank."""
    with in_line():
        return cases.compressor_fails(rank, world)
