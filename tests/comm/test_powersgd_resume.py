"""PowerSGD saved and resumed: the same bits on the same ranks, the same sums on others."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.hooks import CommState, hook
from accel.comm.memory import reshard
from accel.comm.powersgd import PowerSGD
from tests.comm import cases
from tests.comm.ranks import run_ranks

RANK = 3


def small(**settings: Any) -> PowerSGD:
    return PowerSGD(**{"rank": RANK, "min_compression": 0, **settings})


def resume(rank: int, world: int) -> dict[str, Any]:
    """Stop after 3 steps and go on, in the same way and in others."""
    found: dict[str, Any] = {}
    for alternate, hierarchical in itertools.product((False, True), (False, True)):

        def fresh(**more: Any) -> tuple[DistributedDataParallel, CommState]:
            settings = {"alternate": alternate, **more.pop("settings", {})}  # noqa: B023
            more = {"hierarchical": hierarchical, "find_unused_parameters": True, **more}  # noqa: B023
            return cases.make(small(**settings), **more)

        ddp, state = fresh()
        whole = [cases.backward(ddp, cases.gradients(rank, step)) for step in range(6)]
        state.close()
        ddp, first = fresh()
        parts = [cases.backward(ddp, cases.gradients(rank, step)) for step in range(3)]
        saved = pickle.loads(pickle.dumps(first.state_dict()))
        through_pickle = pickle.loads(pickle.dumps(first))
        saved_residual = cases.residual(first)
        first.close()
        ddp, second = fresh()
        second.load_state_dict(saved)
        parts += [cases.backward(ddp, cases.gradients(rank, step)) for step in range(3, 6)]
        second.close()
        ddp = DistributedDataParallel(cases.Given(), bucket_cap_mb=0.004, find_unused_parameters=True)
        through_pickle.bind(ddp)
        ddp.register_comm_hook(through_pickle, hook)
        again = cases.backward(ddp, cases.gradients(rank, 3))
        through_pickle.close()

        # The other way of reducing, another rank, other buckets: the law holds, and replicas stay equal.
        turned = {}
        for name, more in (
            ("other way", {"hierarchical": not hierarchical}),
            ("higher rank", {"settings": {"rank": RANK + 2}}),
            ("lower rank", {"settings": {"rank": 1}}),
            ("other buckets", {"bucket_cap_mb": 0.01, "find_unused_parameters": False}),
        ):
            if hierarchical and name != "other way":
                continue  # how memory is laid out anew doesn't depend on who sums first
            ddp, third = fresh(**more)
            third.load_state_dict(saved)
            applied, same, want = 0.0, True, saved_residual
            for step in range(3, 5):
                got = cases.backward(ddp, cases.gradients(rank, step))
                same &= cases.same_everywhere(got)
                applied, want = applied + got.double(), want + cases.mean_gradient(world, step)
            turned[name] = same, ((applied + cases.residual(third) - want).abs().max() / want.abs().max()).item()
            third.close()

        states: list[Any] = [None] * world
        dist.all_gather_object(states, saved)
        pair = dist.new_group([0, 1])
        law = None
        if rank < 2:
            ddp, fewer = cases.make(small(alternate=alternate), group=pair)
            fewer.load_state_dict(reshard(states, 2)[rank])
            got = sum(cases.backward(ddp, cases.gradients(rank, step)).double() for step in (3, 4))
            want = saved_residual + cases.mean_gradient(2, 3) + cases.mean_gradient(2, 4)
            law = ((got + cases.residual(fewer, pair) - want).abs().max() / want.abs().max()).item()
            fewer.close()
        found[f"{'one factor' if alternate else 'both'}, {'hosts' if hierarchical else 'flat'}"] = {
            "same bits": all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)),
            "pickled": torch.equal(again, whole[3]),
            "turned": turned,
            "law on two": law,
            "residual": saved_residual.norm().item(),
        }
    return found


@pytest.mark.slow
def test_resuming_equals_not_stopping() -> None:
    for rank, found in enumerate(run_ranks(resume, 4, per_host=2)):
        assert len(found) == 4
        for what, one in found.items():
            assert one["same bits"], what
            assert one["pickled"], what
            assert one["residual"] > 0
            for name, (same, law) in one["turned"].items():
                assert same, (what, name)
                assert law < 1e-5, (what, name)
            if rank < 2:
                assert one["law on two"] < 1e-5, what
