"""SimOTA's part of the GPU suite, on a CPU: the check sees what is wrong, and the rivals compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import simota as bench
from benchmarks.gpu.simota_vectorised import assign
from benchmarks.simota import Batch, batch_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batch() -> Batch:
    return batch_of(2, 6, CPU, torch.float16)


def test_ours_and_the_plain_path_agree_with_the_published_algorithm(batch: Batch) -> None:
    assert bench.disagreement(batch.assign(), batch, 2) == ""
    assert bench.disagreement(assign(batch), batch, 2) == ""


def test_a_wrong_assignment_is_seen(batch: Batch) -> None:
    found = batch.assign()
    foreground = found.fg_mask[1].nonzero()[0, 0]
    found.matched_gt[1, foreground] = -1
    assert "image 1 is assigned otherwise" in bench.disagreement(found, batch, 2)
    assert bench.disagreement(found, batch, 1) == ""


def test_the_loop_takes_the_values_that_ours_reads(batch: Batch) -> None:
    held = bench.on(batch, bench.wide)
    assert held.boxes.dtype == torch.float32
    assert held.gt_classes.dtype == torch.int64
    assert [int(one.fg_mask.sum()) for one in held.loop()] == batch.assign().num_fg.tolist()
