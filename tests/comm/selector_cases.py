"""What the ranks of the selector's tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import CATALOGUE, Entry, Scheme, allowed, catalogue_settings
from accel.comm.cost_model import probe as probing
from accel.comm.cost_model.cost import Link, Network
from accel.comm.engine import gradient_engine
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.memory import reshard
from accel.comm.selection.planner import Planner
from accel.comm.selection.recorder import StepRecorder
from accel.comm.selector import AutoComm
from tests.comm.cases import (
    SECONDS,
    WAIT,
    Given,
    Phases,
    backward,
    gradients,
    mean_gradient,
    message,
    residual,
    same_everywhere,
)


def module(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Given(), **{"bucket_cap_mb": 0.004, **options})


def planned(**options: Any) -> tuple[DistributedDataParallel, Planner]:
    ddp = module(**options)
    planner = Planner(ddp, timeout=SECONDS)
    ddp.register_comm_hook(planner, hook)
    return ddp, planner


# The planner


def off_is_ddps_own(rank: int, world: int) -> dict[str, bool]:
    """Compare a hook that is off, before, between and after ways, with DDP without a hook, bit by bit."""
    found = {}
    for name, options in {
        "plain": {},
        "bucket views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
    }.items():
        bare = module(**options)
        ddp, planner = planned(**options)
        same = []
        for step in range(6):
            planner.use(Scheme("int8") if step in (2, 3) else None)
            got, want = backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step))
            same.append(torch.equal(got, want))
        found[name] = same == [True, True, False, False, True, True]
        planner.close()
        found[f"{name}, closed"] = torch.equal(backward(ddp, gradients(rank, 9)), backward(bare, gradients(rank, 9)))
    return found


def every_way(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Compare each way with a CommState of its own, and look at what the ranks have."""
    found = {}
    for way in allowed("lossy", by_hosts=world > 2):
        ddp, planner = planned(find_unused_parameters=True)  # DDP keeps its first buckets
        other = module(find_unused_parameters=True)
        state = CommState(other, timeout=SECONDS, **catalogue_settings(way)._asdict())
        other.register_comm_hook(state, hook)
        planner.use(way)
        equal, same = True, True
        for step in range(3):
            got, want = backward(ddp, gradients(rank, step)), backward(other, gradients(rank, step))
            equal &= torch.equal(got, want)
            same &= same_everywhere(got)
        found[str(way)] = {"as its own state": equal, "same on all ranks": same}
        planner.close()
        state.close()
    return found


def back_and_forth(rank: int, world: int) -> dict[str, Any]:
    """Change schemes between steps, and look at the law of error feedback and at the replicas."""
    ddp, planner = planned()
    ways: list[Scheme | None] = [None, *(Scheme(name) for name in ("int8", "1-bit", "powersgd 16", "half"))]
    if world > 2:
        ways += [Scheme("int8", True), Scheme("exact", True)]
    ways += [None, Scheme("1-bit"), Scheme("int8")]
    applied, wanted, same = 0.0, 0.0, True
    for step, way in enumerate(way for way in ways for _ in range(2)):
        planner.use(way)
        got = backward(ddp, gradients(rank, step))
        same &= same_everywhere(got)
        applied, wanted = applied + got.double(), wanted + mean_gradient(world, step)
    left = residual(planner)
    found = {
        "same": same,
        "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
        "residual": left.norm().item(),
        "steps": planner.step,
    }
    before = backward(ddp, gradients(rank, 50))
    planner.release()
    found["states"] = len(planner._routes)
    found["finite"] = bool(torch.isfinite(before).all())
    planner.close()
    return found


def follows(rank: int, world: int, names: Sequence[str], by_hosts: bool) -> dict[str, dict[str, Any]]:
    """Let schemes follow int8, at first without two parameters: their residuals stay, and all others are sent."""
    found = {}
    sizes = [torch.Size(shape).numel() for shape in Given.SHAPES]
    starts = list(itertools.accumulate(sizes, initial=0))
    out = (6, 8)  # one that is encoded, one that is sent as it is
    for name in names:
        ddp, planner = planned(find_unused_parameters=True)
        planner.use(Scheme("int8"))
        applied = sum(backward(ddp, gradients(rank, step)).double() for step in range(2))
        before = residual(planner)  # type: ignore[arg-type]
        planner.use(Scheme(name, by_hosts))
        given: list[Any] = gradients(rank, 2)
        for i in out:
            given[i] = None
        got = backward(ddp, given)
        after = residual(planner)  # type: ignore[arg-type]
        spans = [slice(starts[i], starts[i + 1]) for i in out]
        wanted = sum(mean_gradient(world, step) for step in range(3))
        for span in spans:
            wanted[span] -= mean_gradient(world, 2)[span]  # type: ignore[index]
        lost = applied + got + after - wanted
        parts = [slice(low, high) for low, high in itertools.pairwise(starts)]
        found[name] = {
            "law": max((lost[part].abs().max() / wanted[part].abs().max()).item() for part in parts),  # type: ignore[index]
            # By hosts the ranks' residuals are summed, in float32.
            "kept": all((after - before)[span].abs().max() < 1e-6 * before[span].abs().max() for span in spans),
            "some": all(bool(before[span].any()) for span in spans),
            "same": same_everywhere(got),
        }
        planner.close()
    return found


def complex_beside_real(rank: int, world: int) -> dict[str, Any]:
    """Plan by hosts for a module with complex parameters: DDP itself averages these."""
    bare = DistributedDataParallel(Phases())
    ddp = DistributedDataParallel(Phases())
    planner = Planner(ddp, timeout=SECONDS)
    ddp.register_comm_hook(planner, hook)
    worst, same = 0.0, True
    for step in range(3):
        planner.use(Scheme("int8" if step == 2 else "exact", True))
        for one in (ddp, bare):
            one.zero_grad()
            one(torch.arange(5.0) + rank + 3 * step).backward()
        for got, want in zip(ddp.parameters(), bare.parameters(), strict=True):
            assert got.grad is not None
            assert want.grad is not None
            apart = (got.grad - want.grad).abs().max() / want.grad.abs().max()
            same &= same_everywhere(torch.view_as_real(got.grad) if got.is_complex() else got.grad)
            worst = max(worst, apart.item() if step < 2 or got.is_complex() else 0.0)
    kept = lambda: planner.state_dict()["own"].get("residual", {}).get("gain", [])  # noqa: E731  (one slice by host)
    before = kept()
    ddp.module.turn.register_hook(lambda gradient: gradient * float("inf"))
    ddp(torch.ones(5)).backward()
    unchanged = all(torch.equal(a, b) for (_, a), (_, b) in zip(before, kept(), strict=True))
    planner.close()
    return {"error": worst, "same": same, "kept": unchanged, "some": any(bool(values.any()) for _, values in before)}


def saved_and_moved(rank: int, world: int) -> dict[str, Any]:
    """Save a planner, pickle it, and deal its memory out to two ranks."""
    options = {"find_unused_parameters": True}
    ddp, planner = planned(**options)
    planner.use(Scheme("int8"))
    for step in range(3):
        backward(ddp, gradients(rank, step))
    saved, copy = planner.state_dict(), pickle.loads(pickle.dumps(planner))
    want = backward(ddp, gradients(rank, 3))
    again = module(**options)
    copy.bind(again)
    again.register_comm_hook(copy, hook)
    copy.use(Scheme("int8"))
    found = {"pickled": torch.equal(backward(again, gradients(rank, 3)), want), "steps": copy.step}
    states: list[Any] = [None] * world
    dist.all_gather_object(states, saved)
    ddp2, fresh = planned(**options)
    fresh.load_state_dict(reshard(states, world)[rank])
    fresh.use(Scheme("int8"))
    found["loaded"] = torch.equal(backward(ddp2, gradients(rank, 3)), want)
    for one in (planner, copy, fresh):
        one.close()
    return found


def taken_off(rank: int, world: int) -> dict[str, Any]:
    """Take the hook off and put it back, with its residuals, under DDP's options."""
    found = {}
    for name, options in {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
    }.items():
        bare, (ddp, planner) = module(**options), planned(**options)
        for step in range(2):
            planner.use(Scheme("int8"))
            backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step))
        before = residual(planner)  # type: ignore[arg-type]
        off = planner.take_off()
        same = all(
            torch.equal(backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step)))
            for step in range(2, 6)
        )
        steps, hooks = planner.step, len(ddp._comm_hooks)
        planner.put_on()
        planner.put_on()
        planner.use(Scheme("int8"))
        got = backward(ddp, gradients(rank, 6)).double()
        law = got + residual(planner) - before - mean_gradient(world, 6)  # type: ignore[arg-type]
        found[name] = {
            "off": off,
            "same": same,
            "hooks": hooks,
            "steps seen": steps,
            "law": law.abs().max().item(),
        }
        planner.close()
    return found


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the message of each bad input."""
    found = {"no ddp": message(lambda: Planner(Given()))}  # type: ignore[arg-type]
    ddp = module()
    ddp.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[misc]
    found["hooked"] = message(lambda: Planner(ddp))
    ddp, planner = planned()
    found["unknown way"] = message(lambda: planner.use(Scheme("int9")))
    planner.close()
    found["closed"] = message(lambda: planner.use(Scheme("int8")))
    other = module()
    other.register_comm_hook(None, hook)
    found["no state"] = message(lambda: backward(other, gradients(rank, 0)))
    found["watch"] = message(lambda: AutoComm(module(), watch=0))
    found["allow"] = message(lambda: AutoComm(module(), "anything"))
    pair = dist.new_group([0, 1])
    if rank < 2 and world > 2:
        found["part"] = message(lambda: AutoComm(module(process_group=pair), "lossy"))
    return found


# The search


SLOW_S = 0.02
"""What DDP's own all-reduce of a bucket takes in the played runs."""


class PlayedTime:
    """A clock of steps that goes on where a test says so, and by 10 us at each look: no machine is too busy for it."""

    def __init__(self) -> None:
        self._now, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        self.spend(1e-5)
        return self._now

    def spend(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


_spend: Callable[[float], None] = time.sleep


def spend(seconds: float) -> None:
    """Let so much time pass, of this machine's or, once it is played, of the played one."""
    _spend(seconds)


def play_time(state: AutoComm) -> None:
    """Let the steps of a search last as long as what `spend` was asked for."""
    global _spend
    clock = PlayedTime()
    _spend, state.recorder = clock.spend, StepRecorder(torch.device("cpu"), clock)


class Lying(Half):
    """A compressor that is quick in a dry run and slow in earnest; below 0 it is as slow in both, and works for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def stages(self) -> Any:
        first, second = super().stages()

        def run(piece: Any, channel: Any) -> None:
            if self.seconds > 0 and threading.current_thread().name.startswith("accel-comm"):
                spend(self.seconds)
            end = time.thread_time() - self.seconds
            while self.seconds < 0 and time.thread_time() < end:
                pass
            first.run(piece, channel)

        return [first._replace(run=run), second]


def _slow_plain() -> None:
    """Let DDP's own all-reduce take SLOW_S."""
    real = dist.all_reduce

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, *arguments: Any, **options: Any) -> Any:
            spend(SLOW_S)
            return real(*arguments, **options)

    gradient_engine.dist = Slow()  # type: ignore[assignment]


def played_network(world: int, byte_s: float) -> Network:
    link = Link(1e-4, 1e-5, byte_s)
    return Network(world, 1, link, link, link, cores=4.0)


def search(rank: int, world: int, entries: dict[str, tuple[float, str]], allow: str, slow: bool) -> dict[str, Any]:
    """Search among compressors that lie by so many seconds, on a network that is played to be slow."""
    with search_entries(entries):
        return _search(rank, world, allow, slow)


@contextlib.contextmanager
def search_entries(entries: dict[str, tuple[float, str]]) -> Iterator[None]:
    """Let the catalogue be of compressors that lie by so many seconds."""
    before = dict(CATALOGUE)
    CATALOGUE.clear()
    for name, (seconds, level) in entries.items():
        CATALOGUE[name] = Entry(lambda seconds=seconds: Lying(seconds), level)  # type: ignore[misc]
    yield
    CATALOGUE.clear()
    CATALOGUE.update(before)


def _search(rank: int, world: int, allow: str, slow: bool) -> dict[str, Any]:
    if slow:
        _slow_plain()
    ddp = module(bucket_cap_mb=25)
    nbytes = sum(p.nbytes for p in ddp.parameters())
    state = AutoComm(
        ddp, allow, watch=3, check=4, network=played_network(world, SLOW_S / nbytes), verbose=rank == 0, timeout=SECONDS
    )
    play_time(state)
    ddp.register_comm_hook(state, hook)
    same, plans = searched(ddp, state, rank)
    found = {
        "plans": plans,
        "same": same,
        "steps": len(plans),
        "plan": str(state.scheme or "plain"),
        "verdict": state.verdict(),
        "explained": state.explain(),
        "measured": {} if state.choice is None else {str(k): v for k, v in state.choice.measured.items()},
        "options": [] if state.choice is None else [(str(one), one.step_s) for one in state.choice.options],
        "hooks": len(ddp._comm_hooks),
        "threads": sum(one.name.startswith("accel-comm") for one in threading.enumerate()),
    }
    state.close()
    return found


def searched(ddp: DistributedDataParallel, state: AutoComm, rank: int) -> tuple[bool, list[str]]:
    """Train until a search is over, and three steps more; tell whether ranks had the same, and each step's plan."""
    same, plans = True, []
    while not state.settled and len(plans) < 3000:  # on a busy machine trials are longer
        same &= same_everywhere(backward(ddp, gradients(rank, len(plans))))
        plans.append(str(state.scheme or "plain"))
    for step in range(3):
        same &= same_everywhere(backward(ddp, gradients(rank, step)))
    return same, plans


def real_search(rank: int, world: int, allow: str) -> dict[str, Any]:
    """Measure this machine's own network, choose among everything, and train on."""
    ddp = module(bucket_cap_mb=25)
    state = AutoComm(ddp, allow, watch=2, check=3, verbose=False, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    same, plans = searched(ddp, state, rank)
    options = [] if state.choice is None else [one.scheme for one in state.choice.options]
    found = {
        "same": same,
        "settled": state.settled,
        "steps": len(plans),
        "plan": state.scheme,
        "options": options,
        "verdict": state.verdict(),
        "levels": sorted({CATALOGUE[way.compressor].level for way in options if way is not None}),
    }
    state.close()
    return found


def closed_early(rank: int, world: int) -> dict[str, Any]:
    """Close an AutoComm in the middle of its search, and go on: by DDP's own all-reduce."""
    found = {}
    for steps in (1, 4, 6):
        bare, ddp = module(bucket_cap_mb=25), module(bucket_cap_mb=25)
        network = played_network(world, 1e-9)
        state = AutoComm(ddp, "reduced", watch=2, check=30, network=network, verbose=False, timeout=SECONDS)
        ddp.register_comm_hook(state, hook)
        for step in range(steps):
            backward(ddp, gradients(rank, step))
            backward(bare, gradients(rank, step))
        searching = not state.settled
        state.close()
        equal = all(
            torch.equal(backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step)))
            for step in range(steps, steps + 6)
        )
        found[steps] = {"searching": searching, "settled": state.settled, "equal": equal, "verdict": state.verdict()}
    return found


def resumed(rank: int, world: int) -> dict[str, Any]:
    """Pickle an AutoComm in the middle of its search, and go on: it searches anew and keeps its settings."""
    ddp = module(bucket_cap_mb=25)
    state = AutoComm(ddp, "reduced", watch=2, check=2, verbose=False, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    for step in range(4):
        backward(ddp, gradients(rank, step))
    copy = pickle.loads(pickle.dumps(state))
    state.close()
    other = module(bucket_cap_mb=25)
    copy.bind(other)
    other.register_comm_hook(copy, hook)
    steps = 0
    while not copy.settled and steps < 2000:
        backward(other, gradients(rank, steps))
        steps += 1
    found = {"allow": copy.allow, "watch": copy.watch, "settled": copy.settled, "step": copy.step - steps}
    copy.close()
    return found


def dies_in_the_search(rank: int, world: int) -> dict[str, Any] | None:
    """Let rank 1 end before all ranks choose."""
    ddp = module(bucket_cap_mb=25)
    state = AutoComm(ddp, "reduced", watch=1, check=2, network=played_network(world, 1e-9), timeout=WAIT)
    ddp.register_comm_hook(state, hook)
    for step in range(4):
        backward(ddp, gradients(rank, step))
    if rank == 1:
        time.sleep(0.3)
        os._exit(3)
    began = time.monotonic()
    said = message(lambda: backward(ddp, gradients(rank, 4)))
    return {"said": said, "seconds": time.monotonic() - began}


def probed(rank: int, world: int) -> dict[str, Any]:
    """Probe twice, then with one rank that has forgotten."""
    planner = planned()[1]
    calls = []
    measure = probing.measure

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return measure(*arguments, **options)

    probing.measure = counted
    cpu = torch.device("cpu")
    first = probing.probe(planner.topology, cpu)
    second = probing.probe(planner.topology, cpu)
    once = len(calls)
    if rank == 1:
        probing._known.clear()
    third = probing.probe(planner.topology, cpu)
    planner.close()
    return {"network": first, "same": second == first, "once": once, "again": len(calls), "third": third}
