"""The self-test before gradients go by the hooks' channel: it passes on one that is right, and names what is wrong."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.engine.binding import Binding
from accel.comm.ranks.channel import GlooChannel
from accel.comm.selection.offers import self_test
from tests.comm.ranks import run_ranks


def outcomes(rank: int, world: int) -> list[str]:
    def tested() -> str:
        return self_test(Binding(DistributedDataParallel(nn.Linear(2, 2)), None, "AutoComm"), timedelta(seconds=30))

    right = GlooChannel.all_reduce

    def wrong_on_one(self: GlooChannel, values: torch.Tensor) -> None:
        right(self, values)
        values[3] += rank == 1

    with mock.patch.object(GlooChannel, "all_reduce", wrong_on_one):
        wrong = tested()
    return [tested(), wrong]


def test_a_channel_that_is_wrong_on_one_rank_is_named_on_all() -> None:
    expected = ["", "all_reduce of GlooChannel gave other numbers than torch's own"]
    assert run_ranks(outcomes, 2) == [expected, expected]
