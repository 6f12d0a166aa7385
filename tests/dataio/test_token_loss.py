"""Gradients of two ranks and of accumulated micro-batches must be those of one process with the whole batch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from accel.dataio.token_loss import count_tokens, global_tokens, scale_gradients, token_mean
from tests.comm.ranks import run_ranks
from tests.conftest import Once

# Scenario → rank → tokens of each micro-batch. Counts differ; a rank, a micro-batch and all may have no token.
SCENARIOS = {
    "one micro-batch": [[7], [30]],
    "accumulated": [[3, 11, 1], [20, 2, 9]],
    "no token on rank 1": [[5], [0]],
    "a micro-batch without a token": [[5, 0], [0, 3]],
    "no token at all": [[0], [0]],
}
FEATURES = CLASSES = 5


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES, dtype=torch.float64)


def micro_batch(rank: int, step: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return features and labels; two more are ignored."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(tokens + 2, FEATURES, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (tokens + 2,), generator=draw)
    labels[:2] = -100
    return x, labels


def batches(counts: list[int], rank: int) -> list[tuple[Tensor, Tensor]]:
    return [micro_batch(rank, step, tokens) for step, tokens in enumerate(counts)]


def loss_sum(net: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(net(x), labels, reduction="sum")


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def backward(net: Any, mine: list[tuple[Tensor, Tensor]], way: str) -> list[Tensor]:
    """Run this rank's micro-batches of a step, one of both ways, and return the gradients."""
    seen = sum(int(count_tokens(labels)) for _, labels in mine)
    total = global_tokens(seen) if way == "before" else None
    for number, (x, labels) in enumerate(mine, start=1):
        wait = contextlib.nullcontext() if number == len(mine) or not dist.is_initialized() else net.no_sync()
        with wait:
            loss = loss_sum(net, x, labels)
            (loss if total is None else token_mean(loss, count_tokens(labels), total=total)).backward()
    if way == "after":
        scale_gradients(net.parameters(), seen)
    return gradients(net)


def wanted(counts: list[list[int]]) -> list[Tensor]:
    """Return the gradients of the mean over all tokens in one process."""
    net = model()
    everything = [each for rank, mine in enumerate(counts) for each in batches(mine, rank)]
    x, labels = (torch.cat(each) for each in zip(*everything, strict=True))
    (loss_sum(net, x, labels) / max(int(count_tokens(labels)), 1)).backward()
    return gradients(net)


def work(rank: int, world: int) -> dict[str, Any]:
    """Return the gradients of one of two ranks, by scenario."""
    found: dict[str, Any] = {}
    for name, counts in SCENARIOS.items():
        mine = batches(counts[rank], rank)
        for way in ("before", "after"):
            found[f"{name}, {way}"] = backward(DistributedDataParallel(model()), mine, way)
        if len(mine) == 1:  # the total left to token_mean
            net = DistributedDataParallel(model())
            token_mean(loss_sum(net, *mine[0]), count_tokens(mine[0][1])).backward()
            found[f"{name}, at once"] = gradients(net)
    return found


@pytest.fixture(scope="module")
def two_ranks(once: Once) -> list[dict[str, list[Tensor]]]:
    return once("token losses", lambda: run_ranks(work, 2))


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_have_the_gradients_of_one_process(two_ranks: list[dict[str, list[Tensor]]], name: str) -> None:
    want = wanted(SCENARIOS[name])
    for found in two_ranks:
        ways = [key for key in found if key.startswith(f"{name}, ")]
        assert len(ways) >= 2
        for way in ways:
            torch.testing.assert_close(found[way], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["before", "after"])
@pytest.mark.parametrize("counts", [[4], [3, 11, 1], [5, 0], [0, 0]], ids=str)
def test_accumulation_in_one_process(counts: list[int], way: str) -> None:
    torch.testing.assert_close(backward(model(), batches(counts, 0), way), wanted([counts]), rtol=1e-12, atol=1e-14)


def test_mean_of_means_is_another_gradient() -> None:
    """What the helper is for: the usual mean per micro-batch weighs tokens by how few others are in theirs."""
    net, counts = model(), [1, 30]
    for x, labels in batches(counts, 0):
        (cross_entropy(net(x), labels) / len(counts)).backward()
    assert not torch.allclose(gradients(net)[0], wanted([counts])[0], rtol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(3), 3), {}, r"must be a scalar, got shape \(3,\); use reduction='sum'"),
        ((torch.tensor(1.0), -1), {}, "at least 0, got -1"),
        ((torch.tensor(1.0), torch.tensor([1, 2])), {}, "must be one number"),
        ((torch.tensor(1.0), 1), {"averaged_over": 0}, "at least 1 rank, got 0"),
    ],
    ids=["shape", "negative", "several", "ranks"],
)
def test_token_mean_refuses(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_mean(*arguments, **options)
