"""Ranks of one test: processes forked from a server that has imported torch once, on gloo over loopback."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forks import ForkServer


@functools.cache
def _server() -> ForkServer:
    return ForkServer("ranks", ("tests.comm.rank_server",))


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    per_host: int = 1,
    timeout_s: float = 240,
    meet: bool = True,
) -> list[Any]:
    """Return what `function(rank, world, *arguments)` returned on each rank; the exit code where a rank died.

    Args:
        per_host: ranks that share a host, by torchrun's variables.
        meet: ranks wait for each other at the end; False where some die.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = {"function": function, "world": world, "per_host": per_host, "folder": folder, "meet": meet}
        processes = [_server().fork(_rank, rank=rank, arguments=arguments, **common) for rank in range(world)]
        deadline = time.monotonic() + timeout_s
        ended = [_server().wait(process, deadline - time.monotonic()) for process in processes]
        late = [rank for rank, (in_time, _) in enumerate(ended) if not in_time]
        assert not late, f"ranks {late} of {function.__name__} still ran after {timeout_s} s"
        found = []
        for rank, (_, status) in enumerate(ended):
            path = folder / f"{rank}.pickle"
            kind, value = pickle.loads(path.read_bytes()) if path.exists() else ("code", status)
            assert kind != "error", f"rank {rank}:\n{value}"
            found.append(value)
        return found


def on_ranks(
    world: int | None = None, *, per_host: int | None = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test's body, which takes (rank, world, …), run on ranks: what fails on one of them fails the test.

    Args:
        world: number of ranks; None where the test has it as a parameter.
        per_host: ranks that share a host; None for two hosts.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            size = given.pop("world") if world is None else world
            hosts = max(size // 2, 1) if per_host is None else per_host
            run_ranks(_body, size, body.__module__, body.__qualname__, given, per_host=hosts)

        functools.update_wrapper(test, body)
        signature = inspect.signature(body)
        left_out = ("rank",) if world is None else ("rank", "world")
        own = [one for name, one in signature.parameters.items() if name not in left_out]
        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]  # what pytest looks at
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _body(rank: int, world: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(rank, world, **given)


def _rank(
    function: Callable[..., Any], rank: int, world: int, per_host: int, folder: Path, meet: bool, arguments: Any
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", GROUP_RANK=str(rank // per_host), LOCAL_WORLD_SIZE=str(per_host))
    try:
        store = f"file://{folder / 'store'}"
        timeout = timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
        said: tuple[str, Any] = ("value", function(rank, world, *arguments))
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-comm")]
        if left:
            said = ("error", f"threads left: {left}")
    except BaseException:
        said = ("error", traceback.format_exc())
    path = folder / f"{rank}.pickle"
    path.with_suffix(".part").write_bytes(pickle.dumps(said))
    path.with_suffix(".part").rename(path)
    if meet and said[0] == "value":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # past gloo's own end, which waits for ranks that died
