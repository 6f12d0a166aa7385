"""The layout of DDP's buckets in a resumed training: with three ranks the bits of a sum depend on it."""

from __future__ import annotations

from torch import nn

from accel.elastic.saving.bucket_order import BucketOrder
from tests.accel.elastic import elastic_ranks
from tests.comm.ranks import run_ranks


def test_three_ranks_lay_out_their_buckets_as_saved_and_nothing_else_changes() -> None:
    for rank in run_ranks(elastic_ranks.buckets_put_back, 3, timeout_s=120):
        *before, order = rank["before"]
        assert order == {"order": []}
        assert list(rank["after"]) == before
        assert rank["gradients"] == [12.0, None, None, None]
        assert rank["order"] == [2, 0, 3, 1]


def test_two_ranks_need_no_order() -> None:
    for rank in run_ranks(elastic_ranks.buckets_put_back, 2, timeout_s=120):
        assert rank["order"] == [3, 2, 1, 0]


def test_a_model_without_buckets_has_no_order() -> None:
    order = BucketOrder(nn.Linear(2, 1))
    assert order.state_dict() == {"order": []}
    order.load_state_dict({"order": [1, 0]})
