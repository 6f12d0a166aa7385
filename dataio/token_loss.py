"""Weight every token alike, whatever rank or micro-batch it comes in.

With W ranks and A micro-batches of different token counts T[r, a] and loss sums S[r, a], the loss of the whole batch is

    L = Σ S[r, a] / Σ T[r, a]

DistributedDataParallel and FSDP average gradients over the ranks. If each rank took the mean over its own tokens, a
token in a short batch would weigh more than one in a long batch. So each micro-batch backpropagates

    S[r, a] · W / Σ T

where the denominator runs over all ranks *and* all micro-batches of the step; the sum over a and the mean over r are
then exactly the gradient of L. The same fault was mended in transformers' gradient accumulation (issue 34191) and
remained under DDP (issue 34242).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.profiler.errors import InvalidArgument


def token_mean(
    loss_sum: Tensor,
    tokens: int | Tensor,
    *,
    total: Tensor | None = None,
    averaged_over: int | None = None,
    group: Any = None,
) -> Tensor:
    """Return the loss to backpropagate so that averaged gradients are those of the mean over all tokens.

        loss_sum · averaged_over / total

    Args:
        loss_sum: sum of the token losses of this micro-batch on this rank, a scalar. 0 where there is no token; it must
            still hang on the model, so that every rank joins in the gradients' all-reduce.
        tokens: number of tokens in it, ≥ 0. Not used where `total` is given.
        total: tokens of all micro-batches of the step on all ranks, from `global_tokens`. Needed with gradient
            accumulation; default: `global_tokens(tokens)`, right for one micro-batch per step.
        averaged_over: ranks over which the gradients are averaged, default the size of the group; 1 where they are
            summed.
        group: process group, default all ranks; without torch.distributed there is one rank.

    Returns:
        A scalar in fp32, or fp64 if `loss_sum` is. It is 0, with gradients of 0, if no rank has a token.

    Raises:
        InvalidArgument: if `loss_sum` is no scalar, or a number is out of range.

    Example:
        >>> logits = model(row.tokens[None])
        >>> loss_sum = cross_entropy(logits[0], row.labels, reduction="sum")
        >>> token_mean(loss_sum, count_tokens(row.labels)).backward()

        With accumulation the micro-batches of a step are fetched before the first backward; all but the last of those
        run under DistributedDataParallel.no_sync():

        >>> total = global_tokens(sum(count_tokens(row.labels) for row in rows), device=device)
        >>> for row in rows:
        ...     token_mean(loss_sum(row), count_tokens(row.labels), total=total).backward()
    """
    if loss_sum.numel() != 1:
        raise InvalidArgument(
            f"loss_sum must be a scalar, got shape {tuple(loss_sum.shape)}; use reduction='sum', not 'none'"
        )
    if total is None:
        total = global_tokens(tokens, device=loss_sum.device, group=group)
    wide = loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32))
    return wide * _scale(total.to(wide.device), averaged_over, group).to(wide.dtype)


def global_tokens(tokens: int | Tensor, *, device: torch.device | str | None = None, group: Any = None) -> Tensor:
    """Return the sum of `tokens` over the ranks; all ranks must call it, the ones without tokens too.

    Args:
        tokens: this rank's tokens of the whole step, all micro-batches together, ≥ 0.
        device: where to count, default that of `tokens`; with NCCL it must be the rank's GPU.
        group: process group, default all ranks.

    Returns:
        A scalar int64 on `device`. The host does not wait for it.

    Raises:
        InvalidArgument: if `tokens` is negative, or a tensor with more than one entry.

    Example:
        >>> total = global_tokens(count_tokens(labels), device="cuda")
    """
    count = torch.as_tensor(tokens, device=device).detach()
    if count.numel() != 1 or (not isinstance(tokens, Tensor) and tokens < 0):
        raise InvalidArgument(f"tokens must be one number, at least 0, got {tokens}; sum the micro-batches' counts")
    # A copy: the all-reduce writes into it.
    summed = count.reshape(()).to(torch.int64, copy=True)
    if _ranks(group) > 1:
        dist.all_reduce(summed, group=group)
    return summed


def count_tokens(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return how many labels the loss counts, a scalar int64 on their device.

    Args:
        labels: any shape. For a model that shifts labels on its own, those that remain: `labels[..., 1:]`.
        ignore_index: label that the loss leaves out, default -100.

    Example:
        >>> count_tokens(torch.tensor([-100, 4, 5]))
        tensor(2)
    """
    return (labels != ignore_index).sum()


def scale_gradients(
    parameters: Iterable[Tensor],
    tokens: int | Tensor,
    *,
    averaged_over: int | None = None,
    group: Any = None,
) -> Tensor:
    """Scale gradients of loss *sums* into those of the mean over all tokens, where the total is not known beforehand.

        grad · averaged_over / Σ tokens

    Backpropagate the bare sum in each micro-batch, then call this once before clipping and the optimizer's step. Sums
    are large: prefer `token_mean` with fp16 gradients.

    Args:
        parameters: with gradients that are averaged over the ranks already; those without any are left out.
        tokens: this rank's tokens in all micro-batches since the gradients were zeroed, ≥ 0.
        averaged_over: as in `token_mean`.
        group: process group, default all ranks.

    Returns:
        Tokens on all ranks, a scalar int64.

    Raises:
        InvalidArgument: if a number is out of range.

    Example:
        >>> scale_gradients(model.parameters(), seen)
        >>> clip_grad_norm_(model.parameters(), 1.0)
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device = gradients[0].device if gradients else None
    total = global_tokens(tokens, device=device, group=group)
    scale = _scale(total, averaged_over, group)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
    return total


def _scale(total: Tensor, averaged_over: int | None, group: Any) -> Tensor:
    """Return averaged_over / total in fp64, and 0 where there is no token, without waiting for the device."""
    ranks = _ranks(group) if averaged_over is None else averaged_over
    if ranks < 1:
        raise InvalidArgument(f"averaged_over must be at least 1 rank, got {ranks}; 1 is for summed gradients")
    # Nothing to divide by: the sums are 0 then, and so must the gradients be, not NaN.
    return torch.where(total > 0, ranks / total.clamp(min=1).to(torch.float64), 0.0)


def _ranks(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
