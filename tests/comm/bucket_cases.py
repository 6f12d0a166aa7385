"""What the ranks of the tests of buckets of another size do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel.comm.catalogue import Scheme
from accel.comm.cost_model import prediction
from accel.comm.cost_model.choice import Option, describe
from accel.comm.engine import gradient_engine
from accel.comm.hooks import hook
from accel.comm.selection.reducer import cap_mb, rebucket
from accel.comm.selector import AutoComm
from tests.comm import selector_cases
from tests.comm.cases import SECONDS, backward, gradients, mean_gradient, message, residual, same_everywhere
from tests.comm.selector_cases import module, planned, play_time, played_network, search_entries, spend

SMALL_MB = 0.004


def resized(rank: int, world: int) -> dict[str, Any]:
    """Change the size of buckets with a hook on, off, and without one; no residual gets lost."""
    found: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
    }.items():
        ddp, planner = planned(bucket_cap_mb=25, **options)
        planner.use((Scheme("int8"),))
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        counts, sizes, can = [], [], True
        for step in range(12):
            if step in (3, 8):
                can &= planner.registration.rebucket(SMALL_MB if step == 3 else 25)
            got = backward(ddp, gradients(rank, step, torch.float32)).double()
            applied, wanted = applied + got, wanted + mean_gradient(world, step).double()
            counts.append(len(planner.memory._slots))
            sizes.append(round(cap_mb(ddp), 6))
        law = (applied + residual(planner) - wanted).abs().max() / wanted.abs().max()  # type: ignore[arg-type]
        found[name] = {
            "can": can,
            "counts": (counts[2], max(counts[5:8]), counts[11]),
            "sizes": (sizes[2], sizes[5], sizes[11]),
            "law": law.item(),
            "same": same_everywhere(got),
        }
        planner.close()
    return found


def without_hook(rank: int, world: int) -> dict[str, Any]:
    """Change buckets of a module without a hook, take back a change that was only asked for, and ask for nonsense."""
    ddp, bare = module(bucket_cap_mb=25), module(bucket_cap_mb=SMALL_MB)
    same = []
    for step in range(6):
        if step == 2:
            rebucket(ddp, SMALL_MB)
        got, want = (backward(one, gradients(rank, step)) for one in (ddp, bare))
        same.append(torch.allclose(got, want, rtol=1e-5, atol=1e-7))
    given = ("_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_default")
    sizes = [{name: vars(bare).get(name) for name in given}]
    for size in (25, SMALL_MB):
        rebucket(bare, size)
        sizes.append({name: vars(bare).get(name) for name in given})
    own, planner = planned(bucket_cap_mb=25)
    planner.registration.rebucket(SMALL_MB)
    planner.registration.rebucket(25)
    backward(own, gradients(rank, 0))
    taken_back = cap_mb(own)
    planner.registration.rebucket(SMALL_MB)
    own.eval()
    with torch.no_grad():
        own(gradients(rank, 0))
    waiting = cap_mb(own)
    planner.close()
    listed = {}
    if hasattr(ddp, "_bucket_config"):
        several = module(bucket_cap_mb=None, bucket_cap_mb_list=[1, 2])
        listed = {"listed": rebucket(several, 5)}
    return {
        "same": all(same),
        "taken back": taken_back,
        "waiting": waiting,
        "put back": sizes[0] == sizes[2] != sizes[1],
        "refused": message(lambda: rebucket(ddp, 0)),
        **listed,
    }


def searched(rank: int, world: int, small_helps: bool) -> dict[str, Any]:
    """Search where nothing compressed helps, and small buckets are predicted to, which is true or not."""
    real = dist.all_reduce

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            small = values.nbytes < SMALL_MB * (1 << 20) * 2
            spend(0.001 if small == small_helps else 0.03)
            return real(values, *arguments, **options)

    gradient_engine.dist = Slow()  # type: ignore[assignment]
    small = Option((None,), 0.0, 0.0, SMALL_MB)
    prediction.in_better_buckets = lambda way, *_: small if way is None else None  # type: ignore[assignment]
    with search_entries({"fib": (0.06, "reduced")}):
        ddp = module(bucket_cap_mb=25)
        network = played_network(world, 1e-12)
        state = AutoComm(ddp, "reduced", watch=3, check=4, network=network, verbose=False, timeout=SECONDS)
        play_time(state)
        ddp.register_comm_hook(state, hook)
        same, _ = selector_cases.searched(ddp, state, rank)
    found = {
        "same": same,
        "plan": describe(state.plan or (None,)),
        "cap": round(cap_mb(ddp), 6),
        "hooks": len(ddp._comm_hooks),
        "verdict": state.verdict(),
        "explained": state.explain(),
    }
    state.close()
    return found
