"""YOLOv7's OTA loss with batched matching: the targets that its own loops find."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel.kernels.simota_yolov7 import patch_yolov7_loss, unpatch_yolov7_loss
from tests.kernels.yolov7_oracle import OtaLoss, batch_of
from tests.sampling import examples

COUNTS = {
    "several": [3, 1, 4],
    "one image, one box": [1],
    "an image without boxes": [2, 0, 3],
    "many": [12, 9],
    "none": [0, 0],
}


def as_found(matched: Sequence[Sequence[Tensor]]) -> list[list[list[float]]]:
    """Return the matches of each level, in order; of what its search names twice, one is like the other."""
    return [
        sorted(torch.cat((torch.stack(level[:4], 1).float(), level[4], level[5]), 1).tolist())
        for level in zip(*matched, strict=True)
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", COUNTS)
def test_the_targets_are_those_of_the_loops(case: str, seed: int) -> None:
    batch = batch_of(seed, COUNTS[case])
    wanted = as_found(OtaLoss().build_targets(batch.p, batch.targets, batch.imgs))
    matched = patch_yolov7_loss(OtaLoss()).build_targets(batch.p, batch.targets, batch.imgs)
    assert as_found(matched) == wanted
    assert any(wanted) == bool(sum(COUNTS[case]))
    for column, dtype in zip(matched, [torch.int64] * 4 + [torch.float32] * 2, strict=True):
        assert len(column) == 3 and all(level.dtype == dtype for level in column)


@settings(max_examples=examples(15))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 1000), st.sampled_from([1, 3]))
def test_any_batch(counts: list[int], seed: int, classes: int) -> None:
    batch = batch_of(seed, counts, size=64, classes=classes)
    wanted = OtaLoss(classes).build_targets(batch.p, batch.targets, batch.imgs)
    found = patch_yolov7_loss(OtaLoss(classes)).build_targets(batch.p, batch.targets, batch.imgs)
    assert as_found(found) == as_found(wanted)


def test_images_come_in_order_and_their_candidates_too() -> None:
    """The loss sums over matches: another order would round otherwise."""
    batch = batch_of(0, [3, 2])
    wanted = OtaLoss().build_targets(batch.p, batch.targets, batch.imgs)
    found = patch_yolov7_loss(OtaLoss()).build_targets(batch.p, batch.targets, batch.imgs)
    for level in range(3):
        assert torch.equal(found[0][level], wanted[0][level])


def test_sides_of_a_list_of_images() -> None:
    batch = batch_of(0, [3, 2])
    loss = patch_yolov7_loss(OtaLoss())
    as_list = loss.build_targets(batch.p, batch.targets, list(batch.imgs))
    assert as_found(as_list) == as_found(loss.build_targets(batch.p, batch.targets, batch.imgs))


def test_predictions_that_are_not_numbers_break_nothing() -> None:
    batch = batch_of(0, [3, 2])
    batch.p[0].fill_(torch.nan)
    patch_yolov7_loss(OtaLoss()).build_targets(batch.p, batch.targets, batch.imgs)


def test_half_precision_and_gradients() -> None:
    batch = batch_of(0, [3, 2])
    p = [level.half().requires_grad_() for level in batch.p]
    found = patch_yolov7_loss(OtaLoss()).build_targets(p, batch.targets, batch.imgs)
    assert not any(tensor.requires_grad for column in found for tensor in column)


def test_it_is_put_back_copied_and_pickled() -> None:
    loss, batch = OtaLoss(), batch_of(1, [2, 3])
    own = loss.build_targets
    assert patch_yolov7_loss(loss) is loss and loss.build_targets != own
    wanted = as_found(loss.build_targets(batch.p, batch.targets, batch.imgs))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other.build_targets.args[0] is other
        assert as_found(other.build_targets(batch.p, batch.targets, batch.imgs)) == wanted
    assert unpatch_yolov7_loss(patch_yolov7_loss(loss)).build_targets == own
    assert unpatch_yolov7_loss(loss) is loss


class AuxiliaryLoss(OtaLoss):
    def build_targets2(self) -> None:
        """Match the auxiliary head's."""


class BinLoss(OtaLoss):
    bin_count = 21


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (AuxiliaryLoss(), "AuxiliaryLoss, which has an auxiliary head"),
        (BinLoss(), "BinLoss, which takes sizes from bins"),
        (torch.nn.BCELoss(), "BCELoss, which has no build_targets and has no find_3_positive"),
    ],
    ids=["auxiliary", "bins", "none"],
)
def test_other_losses_are_refused(loss: object, reason: str) -> None:
    before = dict(vars(loss))
    with pytest.raises(ValueError, match=reason):
        patch_yolov7_loss(loss)
    assert vars(loss) == before


@pytest.mark.gpu
def test_on_a_gpu_the_targets_are_those_of_the_loops() -> None:
    for seed in range(8):
        batch = batch_of(seed, [3, 0, 4])
        wanted = OtaLoss().build_targets(batch.p, batch.targets, batch.imgs)
        loss = patch_yolov7_loss(OtaLoss())
        find = loss.find_3_positive

        def on_device(p: list[Tensor], targets: Tensor, find: object = find) -> object:
            indices, anchors = find([level.cpu() for level in p], targets.cpu())  # type: ignore[operator]
            return [tuple(t.cuda() for t in own) for own in indices], [t.cuda() for t in anchors]

        loss.find_3_positive = on_device
        found = loss.build_targets([level.cuda() for level in batch.p], batch.targets.cuda(), batch.imgs.cuda())
        assert as_found([[t.cpu() for t in column] for column in found]) == as_found(wanted)
