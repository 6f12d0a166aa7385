"""What the ranks of the tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.engine import route as routes
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.memory import reshard
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.selection.planner import Planner

SECONDS = timedelta(seconds=60)
"""Nothing waits for it: a rank that is late by this long on a busy machine is no fault."""


class OneBitTwice(OneBit):
    """Rounds values and sums, as more ranks than there are here do."""

    direct = 0


COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "exact": Exact,
    "fp16": lambda: Half(torch.float16),
    "bf16": Half,
    "int8": lambda: Int8(64),
    "1-bit": lambda: OneBit(64, exact_below=0),
    "1-bit twice": lambda: OneBitTwice(64, exact_below=200),
    "PowerSGD": lambda: PowerSGD(2, min_compression=0),
    "ACP-SGD": lambda: PowerSGD(2, min_compression=0, alternate=True),
    "DGC": lambda: DGC(0.05, momentum=False, dense_below=0),
}


class Given(nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    # Scalars, odd sizes, one element, a size that is no multiple of any block, one larger than a bucket.
    SHAPES = ((7,), (33, 5), (1,), (64, 16), (129,), (), (40, 40), (3, 3, 3), (257,), (50, 21), (5,), (31, 31))

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in self.SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.p, gradients, strict=True) if g is not None]).sum()


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the gradients of a rank at a step, of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** (i % 4 - 2)).to(dtype)
        for i, shape in enumerate(Given.SHAPES)
    ]


class Phases(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, 5, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.turn * x).sum().abs() * self.gain * torch.arange(1.0, 8.0)).sum()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1) for one in tensors])


def mean_gradient(world: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the mean over the ranks, in float64."""
    return sum(flat(gradients(rank, step, dtype)).double() for rank in range(world)) / world


def make(
    compressor: Compressor | None, dtype: torch.dtype = torch.float32, group: Any = None, **options: Any
) -> tuple[DistributedDataParallel, CommState]:
    """Return a DDP module of about 6 buckets with the hook on it."""
    ours = ("hierarchical", "error_feedback", "timeout")
    of_ddp = {key: options.pop(key) for key in list(options) if key not in ours}
    model = Given(dtype)
    settings = {"bucket_cap_mb": 0.004, **of_ddp}
    ddp = DistributedDataParallel(model, process_group=group, **settings)
    state = CommState(ddp, compressor, process_group=group, **{"timeout": SECONDS, **options})
    ddp.register_comm_hook(state, hook)
    return ddp, state


def backward(ddp: DistributedDataParallel, given: list[Tensor]) -> Tensor:
    """Return the averaged gradients, a zero for those that have none."""
    ddp.zero_grad(set_to_none=True)
    ddp(given).backward()
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in ddp.parameters()]).clone()


def same_everywhere(values: Tensor) -> bool:
    """Tell whether all ranks have the same bits, NaN included."""
    own = values.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return all(torch.equal(own, part) for part in parts)


def residual(state: CommState, group: Any = None) -> Tensor:
    """Return the sum of all ranks' residuals, in float64, in the order of the parameters."""
    own = state.state_dict()["own"].get("residual", {})
    total = []
    for i, shape in enumerate(Given.SHAPES):
        whole = torch.zeros(shape.numel() if isinstance(shape, torch.Size) else torch.Size(shape).numel()).double()
        for skipped, values in own.get(f"p.{i}", []):
            whole[skipped : skipped + values.numel()] += values
        total.append(whole)
    found = torch.cat(total)
    dist.all_reduce(found, group=group)
    return found


def buckets(state: CommState) -> int:
    return max(layout.index for layout in state.binding.layouts) + 1


def dense_start(rank: int, world: int) -> dict[Any, Any]:
    """Run signs after two dense steps."""
    found = {}
    for hierarchical in (False, True):
        ddp, state = make(OneBit(64, start_step=2), torch.float64, hierarchical=hierarchical)
        errors = []
        for step in range(4):
            got, want = backward(ddp, gradients(rank, step, torch.float64)), mean_gradient(world, step, torch.float64)
            errors.append(((got - want).norm() / want.norm()).item())
        found[hierarchical] = errors
        state.close()
    return found


def laws(rank: int, world: int, names: Sequence[str]) -> dict[Any, Any]:
    """Run these compressors, flat and by hosts, in float32 and float64, with error feedback where it can have it."""
    found = {}
    for name, hierarchical, dtype in itertools.product(names, (False, True), (torch.float32, torch.float64)):
        compressor = COMPRESSORS[name]()
        ddp, state = make(compressor, dtype, hierarchical=hierarchical, error_feedback=compressor.takes_feedback)
        applied, wanted, errors, same = 0.0, 0.0, [], True
        for step in range(3):
            got = backward(ddp, gradients(rank, step, dtype))
            want = mean_gradient(world, step, dtype)
            same &= same_everywhere(got)
            applied, wanted = applied + got.double(), wanted + want
            errors.append(((got.double() - want).norm() / want.norm()).item())
        left = residual(state)
        found[name, hierarchical, dtype] = {
            "buckets": buckets(state),
            "same": same,
            "first error": errors[0],
            "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
            "residual": (left.norm() / wanted.norm()).item(),
        }
        state.close()
    return found


def laws_unused(rank: int, world: int, names: Sequence[str]) -> dict[Any, Any]:
    """Leave parameters out of the last step: one on all ranks, one on all but one."""
    found = {}
    starts = list(itertools.accumulate((torch.Size(shape).numel() for shape in Given.SHAPES), initial=0))
    for name, hierarchical in itertools.product(names, (False, True)):
        compressor = COMPRESSORS[name]()
        options = {"hierarchical": hierarchical, "error_feedback": compressor.takes_feedback}
        ddp, state = make(compressor, torch.float64, find_unused_parameters=True, **options)
        applied, wanted = 0.0, 0.0
        for step in range(3):
            given: list[Any] = gradients(rank, step, torch.float64)
            want = mean_gradient(world, step, torch.float64)
            if step == 2:
                before = residual(state)
                given[6] = None
                want[starts[6] : starts[7]] = 0
                if rank != 0:
                    given[3] = None
                here = slice(starts[3], starts[4])
                want[here] = gradients(0, step, torch.float64)[3].reshape(-1) / world
            applied, wanted = applied + backward(ddp, given).double(), wanted + want
        left, there = residual(state), slice(starts[6], starts[7])
        found[name, hierarchical] = {
            "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
            "kept": torch.equal(before[there], left[there]),
            "residual": bool(left[there].any()),
            "same": same_everywhere(applied),
        }
        state.close()
    return found


def void_step(rank: int, world: int, names: Sequence[str]) -> dict[Any, Any]:
    """Give rank 1 an infinity, then a NaN, between good steps."""
    found = {}
    for name, hierarchical in itertools.product(names, (False, True)):
        compressor = COMPRESSORS[name]()
        ddp, state = make(compressor, hierarchical=hierarchical, error_feedback=compressor.takes_feedback)
        for step in range(2):
            backward(ddp, gradients(rank, step))
        before = residual(state)
        arrived = []
        for bad in (float("inf"), float("nan")):
            given = gradients(rank, 3)
            if rank == 1:
                given[6][20, 20] = bad
            got = backward(ddp, given)
            place = sum(torch.Size(shape).numel() for shape in Given.SHAPES[:6]) + 20 * 40 + 20
            arrived.append(not torch.isfinite(got[place]).item())
        after = residual(state)
        found[name, hierarchical] = {
            "arrived": all(arrived),
            "untouched": torch.equal(before, after),
            "recovers": bool(torch.isfinite(backward(ddp, gradients(rank, 4))).all()),
        }
        state.close()
    return found


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "float64": {"dtype": torch.float64},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "one bucket": {"bucket_cap_mb": 25},
    "no_sync": {},
}
"""Options of DDP, and dtypes."""


def modes(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    """Compare the exact hook and bf16, flat and by hosts, with the mean under DDP's options and dtypes."""
    found = {}
    for name in names:
        options = MODES[name]
        for hierarchical, compressor in ((False, Half()), (True, Exact())):
            dtype = options.get("dtype", torch.float32)
            ddp, state = make(compressor, hierarchical=hierarchical, **options)
            worst, same = 0.0, True
            for step in range(3):
                given = gradients(rank, step, dtype)
                want = mean_gradient(world, step, dtype)
                if name == "unused":
                    given[3] = None if rank == 1 else torch.zeros(64, 16)
                    given[8] = None
                    at = itertools.accumulate((torch.Size(shape).numel() for shape in Given.SHAPES), initial=0)
                    starts = list(at)
                    for i in (3, 8):
                        want[starts[i] : starts[i + 1]] = 0
                if name == "no_sync":
                    with ddp.no_sync():
                        ddp.zero_grad(set_to_none=True)
                        ddp(given).backward()
                    ddp(given).backward()
                    got, want = flat([p.grad for p in ddp.parameters()]), 2 * want
                else:
                    got = backward(ddp, given)
                same &= same_everywhere(got)
                worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
            found[f"{name}, {'hosts' if hierarchical else 'flat'}, {compressor}"] = {"error": worst, "same": same}
            state.close()
    return found


RESUMED = {
    "int8, flat": ("int8", False),
    "1-bit, hosts": ("1-bit", True),
    "PowerSGD, hosts": ("PowerSGD", True),
    "DGC, flat": ("DGC", False),
}


def resume(rank: int, world: int, names: Sequence[str]) -> dict[str, Any]:
    """Stop after 3 steps and go on: with the same ranks to the bit, and the rest of the sum on two ranks."""
    found: dict[str, Any] = {}
    for what in names:
        name, hierarchical = RESUMED[what]
        options: dict[str, Any] = {"hierarchical": hierarchical, "error_feedback": True}

        def fresh(**more: Any) -> tuple[DistributedDataParallel, CommState]:
            # With find_unused_parameters DDP keeps its first buckets, so that both runs quantise alike.
            return make(COMPRESSORS[name](), **{**options, "find_unused_parameters": True, **more})  # noqa: B023

        ddp, state = fresh()
        whole = [backward(ddp, gradients(rank, step)) for step in range(6)]
        state.close()
        ddp, first = fresh()
        parts = [backward(ddp, gradients(rank, step)) for step in range(3)]
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        through_pickle = pickle.loads(pickle.dumps(first))
        saved_residual = residual(first)
        first.close()
        ddp, second = fresh()
        second.load_state_dict(saved)
        parts += [backward(ddp, gradients(rank, step)) for step in range(3, 6)]
        second.close()
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004, find_unused_parameters=True)
        through_pickle.bind(ddp)
        ddp.register_comm_hook(through_pickle, hook)
        again = backward(ddp, gradients(rank, 3))
        through_pickle.close()

        states: list[Any] = [None] * world
        dist.all_gather_object(states, saved)
        pair = dist.new_group([0, 1])
        law = None
        if rank < 2:
            ddp, fewer = make(COMPRESSORS[name](), group=pair, error_feedback=True)
            fewer.load_state_dict(reshard(states, 2)[rank])
            got = backward(ddp, gradients(rank, 3)).double() + backward(ddp, gradients(rank, 4)).double()
            want = saved_residual + mean_gradient(2, 3) + mean_gradient(2, 4)
            law = ((got + residual(fewer, pair) - want).abs().max() / want.abs().max()).item()
            fewer.close()
        found[what] = {
            "same bits": all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)),
            "pickled": torch.equal(again, whole[3]),
            "law on two": law,
            "residual": saved_residual.norm().item(),
            "steps": second.step,
        }
    return found


def shapes_of_hosts(rank: int, world: int, per_host: list[int]) -> dict[int, dict[str, Any]]:
    """Compare by hosts with flat for several numbers of ranks per host."""
    found = {}
    for count in per_host:
        os.environ.update(GROUP_RANK=str(rank // count), LOCAL_WORLD_SIZE=str(count))
        for name in ("exact", "int8"):
            ddp, state = make(COMPRESSORS[name](), hierarchical=True)
            worst, same = 0.0, True
            for step in range(2):
                got, want = backward(ddp, gradients(rank, step)), mean_gradient(world, step)
                same &= same_everywhere(got)
                worst = max(worst, ((got.double() - want).norm() / want.norm()).item())
            hosts = len(state.topology.hosts)
            state.close()
            found[count, name] = {"hosts": hosts, "error": worst, "same": same}
    return found


def one_host(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Average by hosts where there is one: nothing is compressed, so nothing is lost."""
    found = {}
    for name, compressor in COMPRESSORS.items():
        feedback = compressor().takes_feedback
        ddp, state = make(compressor(), torch.float64, hierarchical=True, error_feedback=feedback)
        worst = 0.0
        for step in range(3):
            got = backward(ddp, gradients(rank, step, torch.float64))
            want = mean_gradient(world, step, torch.float64)
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
        found[name] = {"error": worst, "residual": residual(state).abs().max().item()}
        state.close()
    return found


def rebound(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Bind a state that is in use anew, once hosts hold other ranks, and look at the law of error feedback."""
    found = {}
    for name in names:
        os.environ.update(GROUP_RANK=str(rank // 2))
        ddp, state = make(COMPRESSORS[name](), torch.float64, hierarchical=True, error_feedback=True)
        applied, wanted, same = 0.0, 0.0, True
        for step in range(5):
            if step == 3:
                os.environ.update(GROUP_RANK=str(rank % 2))
                state.bind(ddp)
            got = backward(ddp, gradients(rank, step, torch.float64))
            same &= same_everywhere(got)
            applied, wanted = applied + got, wanted + mean_gradient(world, step, torch.float64)
        left = residual(state)
        found[name] = {
            "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
            "residual": left.norm().item(),
            "same": same,
        }
        state.close()
    return found


# What is refused


def message(call: Callable[[], Any]) -> str:
    """Return what `call` raised, as "Class: text"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def late_rank(rank: int, world: int) -> tuple[float, float]:
    """Let rank 1 take long to connect; return when its groups were made (0 elsewhere), and when the state was."""

    made, stages = 0.0, routes.pipeline_stages

    def late(*given: Any) -> Any:
        nonlocal made
        found = stages(*given)
        if rank == 1:
            time.sleep(0.5)
            made = time.monotonic()
        return found

    routes.pipeline_stages = late
    state = CommState(DistributedDataParallel(Given()), Exact(), timeout=SECONDS)
    found = made, time.monotonic()
    state.close()
    return found


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the message of each bad input, on every rank."""
    found = {}
    model = Given()
    ddp = DistributedDataParallel(model)
    state = CommState(ddp, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    found["twice"] = message(lambda: ddp.register_comm_hook(state, hook))
    state.close()
    found["closed"] = message(lambda: backward(ddp, gradients(rank, 0)))
    other = DistributedDataParallel(Given())
    other.register_comm_hook(None, hook)
    found["no state"] = message(lambda: backward(other, gradients(rank, 0)))
    other = DistributedDataParallel(Given())
    state = CommState(Given(), timeout=SECONDS)
    other.register_comm_hook(state, hook)
    found["another model"] = message(lambda: backward(other, gradients(rank, 0)))
    state.close()
    found["compressor"] = message(lambda: CommState(model, "int8"))  # type: ignore[arg-type]
    found["feedback"] = message(lambda: CommState(model, Exact(), error_feedback=True))
    found["timeout"] = message(lambda: CommState(model, timeout=timedelta()))
    found["no parameters"] = message(lambda: CommState(nn.ReLU()))

    embedding = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    state = CommState(embedding, Int8(), timeout=SECONDS)
    embedding.register_comm_hook(state, hook)
    found["sparse"] = message(lambda: embedding(torch.tensor([1, 2])).sum().backward())
    state.close()

    phases = DistributedDataParallel(nn.Linear(5, 4, bias=False, dtype=torch.complex64))
    state = CommState(phases, Int8(), timeout=SECONDS)
    phases.register_comm_hook(state, hook)
    found["complex"] = message(lambda: phases(torch.ones(5, dtype=torch.complex64)).abs().sum().backward())
    state.close()

    # After torch's own, by position: what differs between ranks.
    found["settings differ"] = message(lambda: CommState(model, Int8() if rank else Half(), timeout=SECONDS))
    narrow = nn.Linear(3 + rank, 2)
    found["models differ"] = message(lambda: CommState(narrow, timeout=SECONDS))
    os.environ.update(GROUP_RANK=str(min(rank, 1)))
    found["uneven"] = message(lambda: CommState(model, hierarchical=True, timeout=SECONDS))
    other = DistributedDataParallel(Given())
    half = dist.new_group([0])
    found["outside"] = message(lambda: CommState(model, process_group=half, timeout=SECONDS).close())
    if rank:
        found["no show"] = message(lambda: CommState(model, timeout=timedelta(seconds=1)))
        found["no planner"] = message(lambda: Planner(other, patience=timedelta(seconds=1)))
    dist.barrier()
    return found


def chained(rank: int, world: int) -> dict[str, Any]:
    """Use the hook's future as torch's own tests do, and drop a state without closing it."""

    def twice(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the classes
        return hook(state, bucket).then(lambda done: done.value() * 2)

    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.004)
    state = CommState(ddp, timeout=SECONDS)
    ddp.register_comm_hook(state, twice)
    got = [backward(ddp, gradients(rank, step)) for step in range(2)]
    errors = [(one.double() - 2 * mean_gradient(world, step)).abs().max().item() for step, one in enumerate(got)]
    threads = [one for one in threading.enumerate() if one.name.startswith("accel-comm")]
    ddp = state = None  # type: ignore[assignment]
    gc.collect()
    for thread in threads:
        thread.join(5)
    return {"error": max(errors), "alive": [thread.is_alive() for thread in threads]}


# Faults

WAIT = timedelta(seconds=60)
"""A failure is noticed sooner than this where ranks are told of it, and no sooner where one merely falls silent."""


def dies(rank: int, world: int, hierarchical: bool) -> dict[str, Any] | None:
    """Let rank 1 end at its third step, as if killed."""
    ddp, state = make(Int8(64), hierarchical=hierarchical, timeout=WAIT)
    for step in range(2):
        backward(ddp, gradients(rank, step))
    if rank == 1:
        time.sleep(0.3)
        os._exit(3)
    return _failure(ddp, state, rank)


def different_buckets(rank: int, world: int) -> dict[str, Any]:
    """Give rank 1 buckets of another size; with find_unused_parameters DDP doesn't even them out."""
    ddp, state = make(
        Half(),
        bucket_cap_mb=0.01 if rank == 1 else 0.004,
        find_unused_parameters=True,
        timeout=WAIT,
    )
    return _failure(ddp, state, rank)


def hangs(rank: int, world: int) -> dict[str, Any]:
    """Let rank 1 not come to its third step before the others have given up."""
    ddp, state = make(Int8(64), timeout=timedelta(seconds=2))
    for step in range(2):
        backward(ddp, gradients(rank, step))
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if rank == 1:
        store.wait(["0 gave up", "2 gave up"])
    found = _failure(ddp, state, rank)
    store.set(f"{rank} gave up", "")
    return found


class Failing(Half):
    """Fails on rank 1 alone."""

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("no room for the codes")
        super().encode(values, out, lost)


def compressor_fails(rank: int, world: int) -> dict[str, Any]:
    """Let a compressor raise on one rank."""
    ddp, state = make(Failing(), timeout=WAIT)
    return _failure(ddp, state, rank)


def _failure(ddp: DistributedDataParallel, state: CommState, rank: int) -> dict[str, Any]:
    began = time.monotonic()
    said = message(lambda: backward(ddp, gradients(rank, 2)))
    took = time.monotonic() - began
    again = message(lambda: backward(ddp, gradients(rank, 2)))
    began = time.monotonic()
    state.close()
    return {"said": said, "again": again, "seconds": took, "closing": time.monotonic() - began}
