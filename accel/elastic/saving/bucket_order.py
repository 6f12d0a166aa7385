"""The order in which gradients lie in the buckets of `DistributedDataParallel`, saved and put back.

DDP lays out its buckets by the order of the parameters, and anew after the first backward pass of a process, by that in
which gradients came. A ring adds up each part of a bucket beginning with another rank, so with three ranks or more
a sum's last bits depend on where in a bucket it lies: the first step of a resumed training had other bits than the same
step of one that was not stopped. A backward pass of zeros in the saved order lets DDP lay them out before that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.profiler.loop import backward

is_heard_elsewhere = False
"""Somebody acts on the gradients of a parameter on another rank; known where the process group was formed anew."""


class BucketOrder:
    """A part of a checkpoint: `load_state_dict` is to be called on all ranks, before the state of the model is loaded.

    It has no effect where the model that the loop calls is not in `DistributedDataParallel`, or this lays out its
    buckets once only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) and _lays_out_anew(model) else None

    def state_dict(self) -> dict[str, list[int]]:
        """Return the numbers of the parameters in the order of the buckets; none if no gradient has come yet."""
        return {"order": [] if self._ddp is None else _order(self._ddp)}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        # Of two numbers the sum is the same in either order.
        if self._ddp is None or dist.get_world_size(self._ddp.process_group) < 3:
            return
        parameters = [] if is_heard_elsewhere else _reduced(self._ddp)
        if parameters and sorted(state["order"]) == list(range(len(parameters))) and not any(map(is_heard, parameters)):
            _pass_zeros(self._ddp, [parameters[number] for number in state["order"]])


def _lays_out_anew(ddp: DistributedDataParallel) -> bool:
    """Return whether it is one of the usual kind: a hook of the user's own would take the zeros for a step."""
    is_plain = not ddp.find_unused_parameters and ddp.mixed_precision is None and not ddp._delay_all_reduce_params
    return is_plain and not ddp.static_graph and not ddp._comm_hooks


def _reduced(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = ddp.parameters_to_ignore
    return [each for name, each in ddp.module.named_parameters() if each.requires_grad and name not in ignored]


def is_heard(parameter: nn.Parameter) -> bool:
    """Return whether somebody acts on its gradients, as an optimizer within the backward pass does."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _order(ddp: DistributedDataParallel) -> list[int]:
    assert ddp.logger is not None
    ddp.logger.set_runtime_stats_and_log()  # after the very first step nothing is known otherwise
    known = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    order = known.get("rebuilt_per_bucket_param_indices") or known.get("prev_iteration_grad_ready_order_indices", "")
    return [int(number) for number in re.findall(r"\d+", str(order))]


def _pass_zeros(ddp: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Run a backward pass in which gradients of zero come in this order, and leave none behind."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with backward.unheard(), torch.enable_grad():
        # Of the nodes that are ready, autograd takes the one that was made last.
        zeros = [(parameter * 0).sum().to("cpu", torch.float32) for parameter in reversed(parameters)]
        ddp.reducer.prepare_for_backward([])
        torch.stack(zeros).sum().backward()  # type: ignore[no-untyped-call]
        ddp.reducer._rebuild_buckets()  # as the next call of the model would: what was noted may come once only
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
