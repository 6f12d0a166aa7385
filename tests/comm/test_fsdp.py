"""FSDP2 over two hosts of two ranks: against FSDP2's own all-reduce, and the laws of compressed averaging."""

from __future__ import annotations

import pytest
import torch

from tests.comm import fsdp_cases as cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks


@few(cases.AS_FSDP2, ("mixed precision", "accumulation"))
def test_exact_averaging_is_fsdp2s(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.as_fsdp2, 4, names, per_host=2):
        assert tuple(found) == names
        for what, one in found.items():
            # Sums of four in another order, over three steps.
            assert one["error"] < (1e-13 if what in ("float64", "divide factor") else 2e-5), what
            assert one["same"], what
            assert one["steps"] == 3, what


@few(cases.COMPRESSORS, ("PowerSGD",))
def test_applied_and_residual_add_up_and_void_steps_change_neither(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.laws, 4, names, per_host=2):
        assert len(found) == len(names) + ("int8" in names)
        for what, one in found.items():
            # Roundings over four steps, in the dtype of the gradients.
            assert one["law"] < (1e-5 if str(torch.float32) in what else 1e-13), what
            assert one["residual"] > 1e-6, what
            for law in ("same", "arrived", "untouched", "recovers"):
                assert one[law], (what, law)
            assert one["steps"] == 6


def test_residuals_follow_the_scale_and_lose_it_where_there_is_none() -> None:
    for found in run_ranks(cases.scaled, 4, per_host=2):
        assert found["saved"] == 8.0
        assert found["law"] < 1e-13
        assert found["residual"] > 1e-6


@pytest.mark.slow
def test_bytes_between_hosts_are_those_of_the_encoding() -> None:
    # With two replicas 2 (n − 1)/n = 1 of the shard, encoded; 4 bytes of scale for each block of 1024.
    want = {"exact": 1.0, "bf16": 1 / 2, "int8": (1 + 4 / 1024) / 4, "1-bit": (1 / 8 + 4 / 1024) / 4}
    for found in run_ranks(cases.traffic, 4, per_host=2):
        for name, share in want.items():
            assert found[name] == pytest.approx(share, rel=0.03), name


REFUSED = {
    "two dimensions": "is sharded over two dimensions, where FSDP2 all-reduces between replicas by itself",
    "plain": "all parameters must be sharded by fully_shard, got a plain 'blocks.0.weight'",
    "one dimension": "mesh must be a DeviceMesh of two dimensions, replicas and shards, got",
    "other mesh": "parameters must be sharded over the second dimension of the mesh, ranks [",
    "all ranks": "parameters must be sharded over the second dimension of the mesh, ranks [",
    "no parameters": "the model must have FSDP2 modules with parameters to train, got none",
    "compressor": "compressor must be a Compressor, got 'int8'",
    "feedback": "error_feedback=True needs a compressor that uses it, got Exact()",
    "DGC": "takes the optimizer's momentum, which shards don't have; pass momentum=False",
    "timeout": "timeout must be positive, got 0:00:00",
    "settings differ": "all ranks must have the same compressor, got another on replica ",
    "weights differ": "all ranks must have the same weights, got another on replica ",
    "unused": "all parameters of parts.2 must take part in backward, got gradients of ",
    "closed": "an FSDPComm that was closed can't average over replicas any more",
}


def test_what_cannot_work_is_refused() -> None:
    for found in run_ranks(cases.refusals, 4, per_host=2):
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert found[what].startswith("ValueError: "), (what, found[what])
            assert text in found[what], (what, found[what])
