"""Batched SimOTA in the heads people have: stand-ins of YOLOX's head and MMDetection's containers, as published."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.kernels.simota_heads import AssignResult, BatchedSimOTAAssigner, patch_yolox_head, unpatch_yolox_head
from tests.kernels import simota_oracle as oracle
from tests.kernels.simota_scenes import Batch, scene


class Head(nn.Module):
    """What YOLOX's head publishes of its assignment: a loop over images that calls get_assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.images_assigned = 0

    def get_geometry_constraint(self) -> None:
        """Its name tells the release."""

    def get_losses(
        self,
        imgs: Any,
        x_shifts: list[Tensor],
        y_shifts: list[Tensor],
        expanded_strides: list[Tensor],
        labels: Tensor,
        outputs: Tensor,
        origin_preds: Any,
        dtype: torch.dtype,
    ) -> list[Any]:
        found: list[Any] = []
        x, y, strides = (torch.cat(each, 1) for each in (x_shifts, y_shifts, expanded_strides))
        for index, count in enumerate((labels.sum(2) > 0).sum(1).tolist()):
            if count:
                boxes, classes = labels[index, :count, 1:5], labels[index, :count, 0]
                predicted = outputs[index, :, :4]
                found.append(
                    self.get_assignments(
                        index, count, boxes, classes, predicted, strides, x, y, outputs[..., 5:], outputs[..., 4:5]
                    )
                )
        return found

    def get_assignments(
        self,
        batch_idx: int,
        num_gt: int,
        gt_boxes: Tensor,
        gt_classes: Tensor,
        predicted: Tensor,
        strides: Tensor,
        x_shifts: Tensor,
        y_shifts: Tensor,
        cls: Tensor,
        obj: Tensor,
        mode: str = "gpu",
    ) -> tuple[Any, ...]:
        self.images_assigned += 1
        points = (torch.stack([x_shifts[0], y_shifts[0]], 1) + 0.5) * strides[0][:, None]
        one = oracle.Image(
            predicted, cls[batch_idx], obj[batch_idx, :, 0], points, strides[0], gt_boxes, gt_classes.long()
        )
        found = oracle.assign(one)
        fg = found.fg_mask
        matched = found.matched_gt[fg]
        return gt_classes[matched], fg, found.matched_iou[fg], matched, int(fg.sum())


def losses_of(head: nn.Module, batch: Batch) -> list[Any]:
    """Call get_losses as YOLOXHead.forward does."""
    assert batch.obj is not None
    labels = torch.cat([batch.gt_classes[..., None].float(), batch.gt_boxes], -1) * batch.gt_mask[..., None]
    outputs = torch.cat([batch.boxes, batch.obj[..., None], batch.cls], -1).requires_grad_()
    shifts = batch.points / batch.strides[:, None] - 0.5
    sizes = [int((batch.strides == stride).sum()) for stride in (8, 16, 32)]
    x, y, strides = (list(torch.split(t[None], sizes, 1)) for t in (shifts[:, 0], shifts[:, 1], batch.strides))
    return head.get_losses(None, x, y, strides, labels, outputs, [], dtype=outputs.dtype)  # type: ignore[operator,no-any-return]


def padded_at_the_end(seed: int, counts: tuple[int, ...]) -> Batch:
    found = scene(seed, max(counts), images=len(counts))
    return replace(found, gt_mask=torch.arange(max(counts)) < torch.tensor(counts)[:, None])


def same_losses(one: list[Any], other: list[Any]) -> bool:
    pairs = [pair for images in zip(one, other, strict=True) for pair in zip(*images, strict=True)]
    return all(torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(a) else a == b for a, b in pairs)


def test_a_patched_yolox_head_loses_as_before() -> None:
    head, batch = Head(), padded_at_the_end(0, (3, 0, 5, 1))
    want = losses_of(head, batch)
    assert head.images_assigned == 3
    assert patch_yolox_head(head) is head
    assert same_losses(losses_of(head, batch), want)
    assert head.images_assigned == 3  # its own was not called
    assert isinstance(head, Head)
    assert list(head.state_dict()) == ["scale"]
    patch_yolox_head(head)  # twice is once
    assert type(unpatch_yolox_head(head)) is Head
    assert same_losses(losses_of(head, batch), want)
    assert head.images_assigned == 6


def test_copies_and_pickles_of_a_patched_head_are_patched() -> None:
    head, batch = patch_yolox_head(Head()), padded_at_the_end(0, (3, 2))
    want = losses_of(head, batch)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert same_losses(losses_of(other, batch), want)
        assert other.images_assigned == 0
        assert type(other) is type(head)


def test_replicas_in_threads_don_t_assign_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `nn.DataParallel`: one lost by the other's assignments, or had none."""
    head = patch_yolox_head(Head())
    batches = [padded_at_the_end(seed, (3, 2)) for seed in range(2)]
    want = [losses_of(head, batch) for batch in batches]
    both, own = threading.Barrier(2), Head.get_losses
    monkeypatch.setattr(Head, "get_losses", lambda *args, **options: (both.wait(10), own(*args, **options))[1])
    replicas = [copy.copy(head) for _ in batches]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(losses_of, replicas, batches))
    assert all(same_losses(*pair) for pair in zip(got, want, strict=True))


def test_get_assignments_from_elsewhere_is_the_heads_own() -> None:
    head, batch = patch_yolox_head(Head()), padded_at_the_end(0, (3, 2))
    losses_of(head, batch)
    shifts = (batch.points / batch.strides[:, None] - 0.5).T[:, None]
    boxes, classes = batch.gt_boxes[0], batch.gt_classes[0]
    assert batch.obj is not None
    head.get_assignments(  # type: ignore[operator]
        0, 3, boxes, classes, batch.boxes[0], batch.strides[None], *shifts, batch.cls, batch.obj[..., None]
    )
    assert head.images_assigned == 1


def test_what_is_no_yolox_head_is_told() -> None:
    with pytest.raises(ValueError, match=r"must have get_losses\(\). Found: Linear"):
        patch_yolox_head(nn.Linear(1, 1))
    other = type("Other", (nn.Module,), {"get_losses": Head.get_losses, "get_assignments": Head.get_assignments})()
    with pytest.raises(ValueError, match="Found: Other with neither; name its rules"):
        patch_yolox_head(other)
    assert patch_yolox_head(other, variant="yolox") is other


def instances(batch: Batch, index: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return predictions and ground truths of an image as MMDetection holds them."""

    def as_corners(t: Tensor) -> Tensor:
        return torch.cat([t[..., :2] - t[..., 2:] / 2, t[..., :2] + t[..., 2:] / 2], -1)

    assert batch.obj is not None
    scores = (batch.cls[index].sigmoid() * batch.obj[index].sigmoid()[:, None]).sqrt()
    priors = torch.cat([batch.points, batch.strides[:, None].expand(-1, 2)], 1)
    real = batch.gt_mask[index]
    return (
        SimpleNamespace(bboxes=as_corners(batch.boxes[index]), scores=scores, priors=priors),
        SimpleNamespace(bboxes=as_corners(batch.gt_boxes[index][real]), labels=batch.gt_classes[index][real]),
    )


def test_mmdet_assigner_assigns_as_published() -> None:
    batch = padded_at_the_end(0, (3, 0, 5, 1))
    predicted, truths = zip(*(instances(batch, index) for index in range(4)), strict=True)
    assigner = BatchedSimOTAAssigner()
    results = assigner.assign_batch(predicted, truths)
    for index, got in enumerate(results):
        alone = assigner.assign(predicted[index], truths[index])
        want = oracle.assign(batch.image(index), "yolox-2021")
        assert isinstance(got, AssignResult)
        assert got.num_gts == alone.num_gts == len(truths[index].labels)
        assert torch.equal(got.gt_inds, want.matched_gt + 1)
        assert torch.equal(got.gt_inds, alone.gt_inds)
        assert torch.equal(got.labels == -1, ~want.fg_mask)
        torch.testing.assert_close(got.max_overlaps[want.fg_mask], want.matched_iou[want.fg_mask])
        assert (got.max_overlaps[~want.fg_mask] == (-100000 if want.fg_mask.any() else 0)).all()


def test_mmdet_assigner_makes_the_result_asked_for() -> None:
    predicted, truth = instances(scene(0, 3), 0)
    made = BatchedSimOTAAssigner(result=lambda *parts: parts).assign(predicted, truth, gt_instances_ignore=None)
    assert made[0] == len(truth.labels)
    assert BatchedSimOTAAssigner().assign_batch([], []) == []
    with pytest.raises(ValueError, match="as many gt_instances as pred_instances"):
        BatchedSimOTAAssigner().assign_batch([predicted], [])
