"""The checks of PyTorch's own tests of communication hooks, written anew for these hooks.

| PyTorch's | here |
|---|---|
| `test_ddp_hook_pickling_powerSGD`, `test_post_localSGD_optimizer_step_reload`, `test_save_load_checkpoint` (test_c10d_gloo.py) | `test_resuming_equals_not_stopping` in test_hooks.py and test_local_sgd.py |
| `test_ddp_uneven_inputs` | `test_ranks_with_fewer_batches` |
| `test_all_gather_*`, `test_all_to_all_*` (quantization/test_quantization.py) | `test_channels_move_what_torch_moves` |
| `test_post_localSGD_optimizer_parity*`, `test_ddp_hook_parity_post_localSGD` | `test_every_four_steps_is_the_published_algorithm` |

Elsewhere: futures with callbacks, registering twice, sparse gradients, static graphs and dtypes in test_hooks.py and
test_faults.py; PowerSGD against the papers in test_powersgd_ranks.py.
"""  # noqa: E501

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from accel.comm.compressor import Exact
from accel.comm.hooks import hook
from accel.comm.ranks.channel import GlooChannel
from accel.comm.selection.planner import Planner
from tests.comm.cases import COMPRESSORS, SECONDS, Given, backward, flat, gradients, make, message
from tests.comm.ranks import on_ranks


@on_ranks(2)
def test_ranks_with_fewer_batches(rank: int, world: int) -> None:
    """Within join(): each step's mean counts zeros of those that are through."""
    # bf16 rounds twice, int8 within half of 1/127 of a block's largest twice.
    bounds = {"exact": 1e-6, "bf16": 2**-7, "int8": 2 / 127}
    for name, hierarchical in (("exact", False), ("exact", True), ("bf16", False), ("int8", True)):
        ddp, state = make(COMPRESSORS[name](), hierarchical=hierarchical)
        with ddp.join():
            for step in range(3 + rank):
                got = backward(ddp, gradients(rank, step))
                still = [r for r in range(world) if step < 3 + r]
                want = sum(flat(gradients(r, step)).double() for r in still) / world
                assert (got.double() - want).norm() / want.norm() < bounds[name], name  # type: ignore[union-attr]
        assert state.step == 4
        state.close()


@on_ranks(2)
def test_a_mean_over_the_ranks_that_still_have_data_is_refused(rank: int, world: int) -> None:
    refused = "InvalidArgument: DDP hands gradients to a hook without the number of ranks"
    ddp, state = make(Exact())
    with ddp.join(divide_by_initial_world_size=False):
        assert message(lambda: backward(ddp, gradients(rank, 0))).startswith(refused)
    state.close()
    ddp = DistributedDataParallel(Given())
    planner = Planner(ddp, timeout=SECONDS)
    ddp.register_comm_hook(planner, hook)
    with ddp.join(divide_by_initial_world_size=False):
        assert message(lambda: backward(ddp, gradients(rank, 0))).startswith(refused)
    planner.close()
    bare = DistributedDataParallel(Given())
    with bare.join(divide_by_initial_world_size=False):
        assert "join(divide_by_initial_world_size=False)" in message(lambda: Planner(bare))
    ddp, state = make(Exact())
    with ddp.join(divide_by_initial_world_size=False, throw_on_early_termination=True):
        backward(ddp, gradients(rank, 0))
    state.close()


@on_ranks(3)
def test_channels_move_what_torch_moves(rank: int, world: int) -> None:
    """All dtypes that compressors send."""
    store = PrefixStore("parity", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    channel = GlooChannel(store, range(world), rank, SECONDS)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int64):
        for numel in (0, 1, 7, 300_001):  # nothing, less than a rank each, odd, several pieces
            own = (torch.arange(numel) * (rank + 1) % 113).to(dtype)
            want = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(want, own)
            got = [torch.empty_like(own) for _ in range(world)]
            channel.all_gather(own, got)
            assert equal(got, want), (dtype, numel)
            # What rank r gets from each is longer by r.
            sends = [torch.arange(numel + other).add(rank).remainder(113).to(dtype) for other in range(world)]
            want = [torch.arange(numel + rank).add(other).remainder(113).to(dtype) for other in range(world)]
            got = [torch.empty_like(one) if other != rank else sends[rank] for other, one in enumerate(want)]
            channel.exchange(sends, got)
            assert equal(got, want), (dtype, numel)
            if dtype.is_floating_point:
                summed, reference = own.clone(), own.double()
                channel.all_reduce(summed)
                dist.all_reduce(reference)
                # Integers that every format holds, or rounds by a unit in the last place of a sum of four.
                bound = 4 * torch.finfo(dtype).eps * 4 * 113
                assert ((summed.double() - reference).abs() <= bound).all(), (dtype, numel)
    channel.close()


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
