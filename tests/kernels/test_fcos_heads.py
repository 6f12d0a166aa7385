"""Patched heads against stand-ins that have the published attributes, signatures and lists a level."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.kernels.fcos_heads import patch_fcos_head, unpatch_fcos_head
from accel.kernels.fcos_targets.inputs import FcosConfig, FcosPoints
from tests.kernels.fcos_oracle import fcos3d_single, fcos_single

SIZES, STRIDES = [(9, 13), (5, 6), (3, 4)], [8, 16, 32]
RANGES = ((-1, 24), (24, 48), (48, 1e8))


class Instances(SimpleNamespace):
    """A stand-in for InstanceData: attributes, and `in`."""

    def __contains__(self, name: str) -> bool:
        return name in vars(self)


class StandIn(nn.Module):
    """What both heads have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.regress_ranges, self.strides = RANGES, STRIDES
        self.center_sampling, self.center_sample_radius, self.norm_on_bbox = True, 1.5, True
        for name, value in settings.items():
            setattr(self, name, value)

    def points(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [FcosPoints.regular([s], [n], [(0, 1)], dtype=dtype).xy for s, n in zip(SIZES, STRIDES, strict=True)]

    def all_points(self, points: list[Tensor]) -> FcosPoints:
        strides = [stride[0] if isinstance(stride, tuple) else stride for stride in self.strides]
        return FcosPoints(
            torch.cat(points),
            torch.cat([p.new_tensor(r).expand_as(p) for p, r in zip(points, self.regress_ranges, strict=True)]),
            torch.cat([p.new_full((len(p),), s) for p, s in zip(points, strides, strict=True)]),
        )


def levels(found: list[tuple[Tensor, ...]], points: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Return targets of images as lists of levels."""
    sizes = [len(level) for level in points]
    kinds = zip(*found, strict=True)
    return tuple([torch.cat(parts) for parts in zip(*(t.split(sizes) for t in of), strict=True)] for of in kinds)


class FlatHead(StandIn):
    """FCOSHead of MMDetection 3.x."""

    num_classes = 10

    def get_targets(self, points: list[Tensor], batch_gt_instances: list[Any]) -> tuple[list[Tensor], ...]:
        config = FcosConfig(
            background=10,
            center_sampling=self.center_sampling,
            radius=self.center_sample_radius,
            normalize=self.norm_on_bbox,
        )
        whole = self.all_points(points)
        return levels([fcos_single(whole, gt.bboxes, gt.labels, config) for gt in batch_gt_instances], points)


class DeepHead(StandIn):
    """FCOSMono3DHead of MMDetection3D 1.x."""

    background_label, attr_background_label = 10, 9
    centerness_alpha, bbox_code_size = 2.5, 9

    def get_targets(
        self, points: list[Tensor], batch_gt_instances_3d: list[Any], batch_gt_instances: list[Any]
    ) -> tuple[list[Tensor], ...]:
        config = FcosConfig(
            background=10, attr_background=9, radius=self.center_sample_radius, normalize=self.norm_on_bbox
        )
        found = []
        for deep, flat in zip(batch_gt_instances_3d, batch_gt_instances, strict=True):
            boxes_3d = deep.bboxes_3d if isinstance(deep.bboxes_3d, Tensor) else deep.bboxes_3d.tensor
            # the published head turns the caller's tensor
            boxes_3d[..., 6] = -torch.atan2(boxes_3d[..., 0], boxes_3d[..., 2]) + boxes_3d[..., 6]
            gts = {
                "boxes": flat.bboxes,
                "labels": deep.labels_3d,
                "boxes_3d": boxes_3d,
                "centers": deep.centers_2d,
                "depths": deep.depths,
                "attr_labels": deep.attr_labels if "attr_labels" in deep else torch.full_like(deep.labels_3d, 9),
            }
            found.append(fcos3d_single(self.all_points(points), gts, config))
        return levels(found, points)


def instances(seed: int, *, boxed: bool = False, attributes: bool = True) -> tuple[list[Instances], list[Instances]]:
    """Return 3D and 2D instances of three images, the second without any."""
    torch.manual_seed(seed)
    deep, flat = [], []
    for count in (4, 0, 7):
        centers, sizes = torch.rand(count, 2) * torch.tensor([104.0, 72.0]), torch.rand(count, 2) * 80 + 4
        boxes_3d, labels = torch.randn(count, 9), torch.randint(0, 10, (count,))
        flat.append(Instances(bboxes=torch.cat((centers - sizes / 2, centers + sizes / 2), 1), labels=labels))
        more = {"attr_labels": torch.randint(0, 9, (count,))} if attributes else {}
        held = SimpleNamespace(tensor=boxes_3d) if boxed else boxes_3d
        depths = torch.rand(count) * 60
        deep.append(Instances(bboxes_3d=held, labels_3d=labels, centers_2d=centers + 1, depths=depths, **more))
    return deep, flat


def same(found: tuple[list[Tensor], ...], expected: tuple[list[Tensor], ...]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, list)
        for level, published in zip(mine, theirs, strict=True):
            assert level.shape == published.shape
            # centerness below the least normal number is 0
            torch.testing.assert_close(level, published, rtol=0, atol=2e-38)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_on_bbox": False},
        {"center_sampling": False},
        {"center_sample_radius": 0.7},
        {"strides": [(8, 8), (16, 16), (32, 32)]},
    ],
    ids=["published", "pixels", "whole boxes", "narrow", "strides of two axes"],
)
def test_fcos_head_has_the_published_targets(settings: dict[str, Any]) -> None:
    head = FlatHead(**settings)
    for seed in range(5):
        _, flat = instances(seed)
        expected = head.get_targets(head.points(), flat)
        same(patch_fcos_head(head).get_targets(head.points(), flat), expected)
        unpatch_fcos_head(head)


@pytest.mark.sample(3)
@pytest.mark.parametrize("settings", [{}, {"norm_on_bbox": False}, {"center_sample_radius": 2.3}], ids=str)
@pytest.mark.parametrize("boxed", [False, True], ids=["tensor", "box structure"])
@pytest.mark.parametrize("attributes", [True, False], ids=["attributes", "none"])
def test_fcos3d_head_has_the_published_targets(settings: dict[str, Any], boxed: bool, attributes: bool) -> None:
    head = DeepHead(**settings)
    for seed in range(5):
        mine, theirs = (instances(seed, boxed=boxed, attributes=attributes) for _ in range(2))
        expected = head.get_targets(head.points(), *theirs)
        same(patch_fcos_head(head).get_targets(head.points(), *mine), expected)
        unpatch_fcos_head(head)


def test_the_callers_boxes_are_left_alone() -> None:
    head, (deep, flat) = patch_fcos_head(DeepHead()), instances(0)
    before = copy.deepcopy(deep)
    first, second = (head.get_targets(head.points(), deep, flat) for _ in range(2))
    same(first, second)
    assert all(torch.equal(a.bboxes_3d, b.bboxes_3d) for a, b in zip(before, deep, strict=True))


@pytest.mark.parametrize("kind", ["shifted", "shuffled", "ragged", "kernels"])
def test_points_that_are_no_grid(kind: str, request: pytest.FixtureRequest) -> None:
    head, (_, flat) = FlatHead(), instances(1)
    points = head.points()
    if kind == "shifted":
        points[1] = points[1] + 0.25
    elif kind == "shuffled":
        points[0] = points[0].flip(0)
    elif kind == "ragged":
        points[0] = points[0][:-1]
    expected = head.get_targets(points, flat)
    if kind == "kernels":
        request.getfixturevalue("interpreted")
    found = patch_fcos_head(head).get_targets(points, flat)
    torch.testing.assert_close(found, expected)


def test_images_without_any_box() -> None:
    head = patch_fcos_head(DeepHead())
    deep, flat = ([gts[1], gts[1]] for gts in instances(0))
    labels, boxes_3d, centerness, attributes = head.get_targets(head.points(), deep, flat)
    assert [len(level) for level in labels] == [2 * h * w for h, w in SIZES]
    assert all((level == 10).all() for level in labels)
    assert all((level == 9).all() for level in attributes)
    assert not any(level.any() for level in (*boxes_3d, *centerness))
    assert boxes_3d[0].shape[-1] == 9


def test_unpatch_gives_the_published_method_back() -> None:
    head = FlatHead()
    assert unpatch_fcos_head(head) is head
    patch_fcos_head(patch_fcos_head(head))
    assert "get_targets" in vars(head)
    unpatch_fcos_head(head)
    assert "get_targets" not in vars(head)


def test_patch_survives_a_copy_and_stays_out_of_the_state() -> None:
    head = patch_fcos_head(FlatHead())
    assert head.state_dict() == {}
    twin = copy.deepcopy(head)
    twin.center_sample_radius = 1e-4
    _, flat = instances(0)
    assert not any((labels != 10).any() for labels in twin.get_targets(twin.points(), flat)[0])
    assert any((labels != 10).any() for labels in head.get_targets(head.points(), flat)[0])


class Foreign(StandIn):
    def get_targets(self, cls_scores: Any, anchors: Any) -> None: ...


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (Foreign(), r"Found: Foreign, get_targets\(cls_scores, anchors\). Call accel.kernels.fcos_targets"),
        (nn.ReLU(), r"Found: ReLU, get_targets\(\)"),
        (DeepHead(pred_bbox2d=True), "with pred_bbox2d"),
    ],
    ids=["signature", "no head", "2D boxes"],
)
def test_other_heads_are_refused_and_left_alone(head: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        patch_fcos_head(head)
    assert "get_targets" not in vars(head)


def test_missing_attribute_is_named() -> None:
    head = FlatHead()
    del head.norm_on_bbox
    with pytest.raises(ValueError, match="without norm_on_bbox"):
        patch_fcos_head(head)


def test_levels_must_match_the_ranges() -> None:
    head, (_, flat) = patch_fcos_head(FlatHead()), instances(0)
    with pytest.raises(ValueError, match="Found: 2 levels, 3 ranges"):
        head.get_targets(head.points()[:2], flat)
