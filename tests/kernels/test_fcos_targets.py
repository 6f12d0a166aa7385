"""Targets of a batch against the published algorithm, image by image: random and adversarial batches, all paths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.kernels.fcos_targets import fcos3d_targets, fcos3d_targets_ref, fcos_targets, fcos_targets_ref
from accel.kernels.fcos_targets import near as fcos_near
from accel.kernels.fcos_targets import targets as module
from accel.kernels.fcos_targets.inputs import Fcos3dGts, FcosConfig, FcosGts, FcosPoints, rule_of
from tests.kernels.contract import opcheck
from tests.kernels.fcos_oracle import fcos3d_batch, fcos_batch

# Odd maps, a level of one point, a stride that is no power of two, ranges that meet in one number.
POINTS = FcosPoints.regular(
    [(9, 13), (5, 6), (3, 1), (1, 1)], [8, 16, 33, 64], [(-1, 24), (24, 48), (48, 96), (96, 1e8)]
)
LISTED = replace(POINTS, grids=())
CONFIG = FcosConfig(background=10, attr_background=7)
CONFIGS = {
    "published": CONFIG,
    "pixels": replace(CONFIG, normalize=False),
    "wide": replace(CONFIG, radius=2.3, centerness_alpha=1.7),
    "narrow": replace(CONFIG, radius=0.4),
    "whole boxes": replace(CONFIG, center_sampling=False),
}
EXP_ULPS = 90
"""exp multiplies the last unit of its exponent, which another sqrt may miss, by its size: 87 where fp32 ends."""
KINDS = ["random", "lattice", "same", "outside", "huge", "strange", "thin"]


def batch(seed: int, kind: str, images: int | None = None, most: int = 7) -> Fcos3dGts:
    """Return up to three images of up to `most` boxes, some without any, padding poisoned."""
    draw = torch.Generator().manual_seed(seed)
    images = int(torch.randint(1, 4, (), generator=draw)) if images is None else images
    count = int(torch.randint(0, most + 1, (), generator=draw))
    centers = torch.rand(images, count, 2, generator=draw) * torch.tensor([104.0, 72.0])
    sizes = torch.rand(images, count, 2, generator=draw) ** 2 * 110 + 1
    if kind == "lattice":  # centres, edges and distances on points and on halves between: ties everywhere
        centers, sizes = (centers / 4).round() * 4, (sizes / 8).round() * 8
    elif kind == "same":
        centers, sizes = centers[:, :1].expand_as(centers).clone(), sizes[:, :1].expand_as(sizes).clone()
    elif kind == "outside":
        centers = centers * 6 - 250
    elif kind == "huge":  # areas about the 10⁸ that marks no candidate
        sizes = sizes * torch.tensor([1.0, 100.0, 1e4, 1e6])[torch.randint(0, 4, sizes.shape, generator=draw)]
    elif kind == "thin":  # no area, or turned inside out
        sizes = sizes * torch.tensor([0.0, 1.0, -1.0])[torch.randint(0, 3, sizes.shape, generator=draw)]
    boxes = torch.cat((centers - sizes / 2, centers + sizes / 2), -1)
    if kind == "strange" and boxes.numel():
        odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -0.0])
        hit = torch.rand(boxes.shape, generator=draw) < 0.15
        boxes[hit] = odd[torch.randint(0, 5, (int(hit.sum()),), generator=draw)]
    valid = torch.rand(images, count, generator=draw) < torch.rand((), generator=draw) * 1.5
    return poisoned(
        Fcos3dGts(
            boxes=boxes,
            labels=torch.randint(0, 10, (images, count), generator=draw),
            valid=valid,
            boxes_3d=torch.randn(images, count, 9, generator=draw),
            centers=centers + torch.randint(-1, 2, centers.shape, generator=draw),
            depths=torch.rand(images, count, generator=draw) * 60,
            attr_labels=torch.randint(0, 6, (images, count), generator=draw),
        )
    )


def poisoned(gts: Fcos3dGts) -> Fcos3dGts:
    """Put NaN, and labels that nobody gave, where no box is."""
    for tensor in (gts.boxes, gts.boxes_3d, gts.centers, gts.depths):
        tensor[~gts.valid] = math.nan
    gts.labels[~gts.valid], gts.attr_labels[~gts.valid] = 99, 99
    return gts


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], ulps: float = 0) -> None:
    """Check integers bit for bit, and numbers too but for what is below the least normal one."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        if mine.is_floating_point():
            rtol = ulps * torch.finfo(mine.dtype).eps
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=2e-38, equal_nan=True)
        else:
            assert torch.equal(mine, theirs)


# 143 batches of each of 7 kinds, on grids and on listed points; 36 by default.
@pytest.mark.parametrize("seeds", [range(36), pytest.param(range(36, 143), marks=pytest.mark.slow)], ids=["36", "more"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_batches_have_the_published_targets(kind: str, seeds: range) -> None:
    for seed in seeds:
        gts = batch(seed, kind)
        points = POINTS if seed % 3 else LISTED
        same(fcos_targets(points, gts, CONFIG), fcos_batch(points, gts, CONFIG))
        same(fcos3d_targets(points, gts, CONFIG), fcos3d_batch(points, gts, CONFIG))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_on_every_path(name: str, kind: str) -> None:
    config = CONFIGS[name]
    for seed in range(200, 208):
        gts = batch(seed, kind)
        for points in (POINTS, LISTED):
            same(fcos_targets(points, gts, config), fcos_batch(points, gts, config))
            if config.center_sampling:
                same(fcos3d_targets(points, gts, config), fcos3d_batch(points, gts, config))


# Boxes of NaN and inf are meant; numpy, which interprets the kernels, warns of what it computes from them.
@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|underflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("seed", [300, pytest.param(301, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_agree(interpreted: None, name: str, kind: str, seed: int) -> None:
    config, gts = CONFIGS[name], batch(seed, kind)
    # torch's sqrt on a CPU is one unit off in 18 % of all numbers, the kernels' is not
    same(fcos_targets(LISTED, gts, config), fcos_batch(LISTED, gts, config), ulps=1)
    if config.center_sampling:
        same(fcos3d_targets(LISTED, gts, config), fcos3d_batch(LISTED, gts, config), ulps=EXP_ULPS)


def _half(gts: Fcos3dGts, dtype: torch.dtype) -> Fcos3dGts:
    names = ("boxes", "boxes_3d", "centers", "depths")
    return replace(gts, **{name: getattr(gts, name).to(dtype) for name in names})


def _assigned_in_fp32(gts: Fcos3dGts, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    rounded = _half(_half(gts, dtype), torch.float32)
    flat, deep = fcos_batch(POINTS, rounded, CONFIG), fcos3d_batch(POINTS, rounded, CONFIG)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in flat), tuple(
        t.to(dtype) if t.is_floating_point() else t for t in deep
    )


@pytest.mark.parametrize("points", [POINTS, LISTED], ids=["grids", "listed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_assigned_in_fp32_and_rounded_once(points: FcosPoints, dtype: torch.dtype) -> None:
    for seed in range(20):
        gts = batch(seed, "lattice")
        flat, deep = _assigned_in_fp32(gts, dtype)
        same(fcos_targets(points, _half(gts, dtype), CONFIG), flat)
        same(fcos3d_targets(points, _half(gts, dtype), CONFIG), deep)


def test_kernels_take_half_precision(interpreted: None) -> None:
    for seed in range(4):
        gts = batch(seed, "lattice")
        flat, deep = _assigned_in_fp32(gts, torch.float16)
        same(fcos_targets(LISTED, _half(gts, torch.float16), CONFIG), flat, ulps=1)
        same(fcos3d_targets(LISTED, _half(gts, torch.float16), CONFIG), deep, ulps=1)


def _double(points: FcosPoints) -> FcosPoints:
    return FcosPoints(points.xy.double(), points.regress_range.double(), points.stride.double(), points.grids)


def test_double_precision_stays_double(path: str) -> None:
    gts, points = _half(batch(3, "random", images=2), torch.float64), _double(POINTS)
    same(fcos_targets(points, gts, CONFIG), fcos_batch(points, gts, CONFIG), ulps=4)
    same(fcos3d_targets(points, gts, CONFIG), fcos3d_batch(points, gts, CONFIG), ulps=4)


@pytest.mark.parametrize("path", ["grids", "listed", "kernels"], indirect=True)
@pytest.mark.parametrize(("images", "boxes", "total"), [(0, 3, 151), (2, 0, 151), (2, 3, 0), (0, 0, 0)])
def test_nothing_to_assign(images: int, boxes: int, total: int, path: str) -> None:
    points = {"grids": POINTS}.get(path, LISTED) if total else FcosPoints.regular([], [], [])
    assert len(points.xy) == total
    full = batch(1, "random", images=2)
    gts = Fcos3dGts(*(getattr(full, name)[:images, :boxes] for name in full.__dataclass_fields__))
    labels, sides, centerness = fcos_targets(points, gts, CONFIG)
    found = fcos3d_targets(points, gts, CONFIG)
    assert sides.shape == (images, total, 4)
    assert found.boxes_3d.shape == (images, total, 9)
    if boxes == 0:
        assert (labels == 10).all()
        assert (found.attr_labels == 7).all()
        assert not sides.any()
        assert not centerness.any()
        assert not found.boxes_3d.any()
        assert not found.centerness.any()


@pytest.mark.parametrize("points", [POINTS, LISTED], ids=["grids", "listed"])
def test_a_thousand_boxes(points: FcosPoints) -> None:
    gts = batch(0, "random", images=1, most=1)
    while gts.valid.shape[1] == 0 or not gts.valid.all():
        gts = batch(int(torch.randint(0, 10**6, ())), "random", images=1, most=1)
    draw = torch.Generator().manual_seed(0)
    spread = torch.rand(1000, 2, generator=draw) * 100
    many = Fcos3dGts(*(getattr(gts, name).repeat_interleave(1000, 1) for name in gts.__dataclass_fields__))
    many.boxes[0] += spread.repeat(1, 2)
    many.centers[0] += spread
    many.labels[0] = torch.randint(0, 10, (1000,), generator=draw)
    same(fcos_targets(points, many, CONFIG), fcos_batch(points, many, CONFIG))
    same(fcos3d_targets(points, many, CONFIG), fcos3d_batch(points, many, CONFIG))


@pytest.mark.parametrize("path", ["grids", "listed", "kernels"], indirect=True)
def test_of_equal_boxes_the_first_wins(path: str) -> None:
    points = POINTS if path == "grids" else LISTED
    box = torch.tensor([4.0, 4.0, 36.0, 36.0]).expand(1, 5, 4)
    labels = torch.tensor([[9, 3, 1, 2, 0]])
    valid = torch.tensor([[False, True, True, True, True]])
    gts = Fcos3dGts(box, labels, valid, box.new_zeros(1, 5, 9), box[..., :2] + 16, box[..., 0], labels)
    for found in (fcos_targets(points, gts, CONFIG), fcos3d_targets(points, gts, CONFIG)):
        assert set(found.labels.unique().tolist()) == {3, 10}


def test_layouts_and_narrow_labels() -> None:
    gts = batch(5, "random", images=2)
    odd = replace(
        gts,
        boxes=gts.boxes.transpose(0, 1).contiguous().transpose(0, 1),
        centers=gts.centers.repeat(1, 1, 2)[..., ::2].clone().transpose(0, 1).contiguous().transpose(0, 1),
        boxes_3d=gts.boxes_3d.flip(-1).contiguous().flip(-1),
        labels=gts.labels.int(),
        valid=gts.valid.t().contiguous().t(),
    )
    odd = replace(odd, centers=gts.centers.transpose(0, 1).contiguous().transpose(0, 1))
    same(fcos3d_targets(POINTS, odd, CONFIG)[1:], fcos3d_targets(POINTS, gts, CONFIG)[1:])
    assert fcos_targets(POINTS, odd, CONFIG).labels.dtype == torch.int32


def test_references_are_the_published_algorithm_too() -> None:
    for seed in range(20):
        gts = batch(seed, "strange")
        same(fcos_targets_ref(POINTS, gts, CONFIG), fcos_batch(POINTS, gts, CONFIG))
        same(fcos3d_targets_ref(POINTS, gts, CONFIG), fcos3d_batch(POINTS, gts, CONFIG))


def test_a_batch_is_cut_where_it_would_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gts = batch(4, "random", images=3)
    whole = fcos3d_targets(POINTS, gts, CONFIG)
    rule = rule_of(CONFIG, by_distance=True)
    rows = fcos_near._windows(POINTS.grids, rule)
    assert len(fcos_near._chunks(gts.valid, POINTS.grids, rule)) == 1
    cut = [(0, 1), (1, 3)]
    monkeypatch.setattr(fcos_near, "_chunks", lambda *_: cut)
    same(fcos3d_targets(POINTS, gts, CONFIG), whole)
    assert len(rows.dx) == 9 * 2 + 3 * 1 + 1


def test_points_are_those_of_the_published_grid() -> None:
    points = FcosPoints.regular([(2, 3)], [8], [(-1, 48)])
    assert points.xy.tolist() == [[4, 4], [12, 4], [20, 4], [4, 12], [12, 12], [20, 12]]
    assert points.regress_range.tolist() == [[-1, 48]] * 6
    assert points.stride.tolist() == [8] * 6
    nuscenes = [(116, 200), (58, 100), (29, 50), (15, 25), (8, 13)]
    assert len(FcosPoints.regular(nuscenes, [8, 16, 32, 64, 128], [(0, 1)] * 5).xy) == 30_929


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_agrees_and_waits_for_nothing(kind: str, waits_for_nothing: Any) -> None:
    for seed in range(20):
        gts = batch(seed, kind)
        there = Fcos3dGts(*(getattr(gts, name).cuda() for name in gts.__dataclass_fields__))
        points = FcosPoints(POINTS.xy.cuda(), POINTS.regress_range.cuda(), POINTS.stride.cuda())
        with waits_for_nothing():
            flat, deep = fcos_targets(points, there, CONFIG), fcos3d_targets(points, there, CONFIG)
        same(tuple(t.cpu() for t in flat), fcos_batch(LISTED, gts, CONFIG), ulps=1)
        same(tuple(t.cpu() for t in deep), fcos3d_batch(LISTED, gts, CONFIG), ulps=EXP_ULPS)


def _on_gpu(gts: Fcos3dGts) -> tuple[FcosPoints, Fcos3dGts]:
    there = Fcos3dGts(*(getattr(gts, name).cuda() for name in gts.__dataclass_fields__))
    return FcosPoints(POINTS.xy.cuda(), POINTS.regress_range.cuda(), POINTS.stride.cuda()), there


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_takes_half_precision(dtype: torch.dtype) -> None:
    for seed in range(10):
        gts = batch(seed, "lattice")
        flat, deep = _assigned_in_fp32(gts, dtype)
        points, there = _on_gpu(_half(gts, dtype))
        # One unit of the wide sqrt or exp may be one of the narrow dtype.
        same(tuple(t.cpu() for t in fcos_targets(points, there, CONFIG)), flat, ulps=1)
        same(tuple(t.cpu() for t in fcos3d_targets(points, there, CONFIG)), deep, ulps=1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_gpu_compiled_under_autocast() -> None:
    points, there = _on_gpu(batch(5, "random", images=2))

    def both(boxes: Tensor) -> tuple[Tensor, ...]:
        moved = replace(there, boxes=boxes + 1)
        flat = FcosGts(moved.boxes, moved.labels, moved.valid)
        return (*fcos_targets(points, flat, CONFIG), *fcos3d_targets(points, moved, CONFIG))

    with torch.autocast("cuda", torch.bfloat16):
        found = torch.compile(both, fullgraph=True)(there.boxes)
    same(found, both(there.boxes))


def test_targets_carry_no_gradient() -> None:
    gts = batch(5, "random", images=2)
    boxes = gts.boxes.clone().requires_grad_()
    assert not fcos_targets(POINTS, replace(gts, boxes=boxes), CONFIG).boxes.requires_grad


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boxes": torch.zeros(2, 3, 5)}, r"gts.boxes must be \[2, 3, 4\].*Found: \[2, 3, 5\]"),
        ({"labels": torch.zeros(2, 4)}, r"gts.labels must be \[2, 3\]"),
        ({"valid": torch.ones(2, 3)}, "gts.valid must be bool. Found: torch.float32"),
        ({"boxes": torch.zeros(2, 3, 4, dtype=torch.int64)}, "gts.boxes must be floating"),
        ({"labels": torch.zeros(2, 3, device="meta")}, "gts.labels must be on cpu"),
        ({"labels": torch.ones(2, 3)}, r"gts.labels must be integers. Found: torch.float32.*\.long\(\)"),
        ({"attr_labels": torch.ones(2, 3)}, "gts.attr_labels must be integers. Found: torch.float32"),
        ({"depths": torch.ones(2, 3, dtype=torch.int64)}, "gts.depths must be floating. Found: torch.int64"),
        ({"boxes_3d": torch.zeros(2, 3, 2)}, r"gts.boxes_3d must be \[2, 3, 3\]"),
        ({"centers": torch.zeros(2, 3)}, r"gts.centers must be \[2, 3, 2\]"),
        ({"depths": torch.zeros(2, 3, 1)}, r"gts.depths must be \[2, 3\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], reason: str) -> None:
    ones = torch.ones(2, 3, dtype=torch.int64)
    box = torch.zeros(2, 3, 9)
    gts = Fcos3dGts(box[..., :4], ones, ones > 0, box, box[..., :2], box[..., 0], ones)
    with pytest.raises(ValueError, match=reason):
        fcos3d_targets(POINTS, replace(gts, **change), CONFIG)


def test_settings_that_make_no_sense_are_refused() -> None:
    gts = batch(5, "random", images=2)
    with pytest.raises(ValueError, match="center_sampling must be True"):
        fcos3d_targets(POINTS, gts, replace(CONFIG, center_sampling=False))
    with pytest.raises(ValueError, match=r"radius must be above 0 strides. Found: 0"):
        FcosConfig(background=1, radius=0)
    with pytest.raises(ValueError, match=r"whole pixels. Found: \[8.5\]"):
        FcosPoints.regular([(1, 1)], [8.5], [(0, 1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"points\.stride must be"):
        fcos_targets(replace(POINTS, stride=POINTS.stride[1:]), gts, CONFIG)


def test_ops_keep_their_contract() -> None:
    gts = batch(5, "random", images=2)
    given = *module._flat(POINTS, CONFIG), [gts.boxes, gts.labels, gts.valid]
    opcheck(module._fcos_op, given)
    opcheck(module._fcos3d_op, (*given, *module._codes(gts)))


def test_torch_compile_keeps_one_graph() -> None:
    gts = batch(5, "random", images=2)

    def both(boxes: Tensor) -> tuple[Tensor, ...]:
        moved = replace(gts, boxes=boxes + 1)
        flat = FcosGts(moved.boxes, moved.labels, moved.valid)
        return (*fcos_targets(POINTS, flat, CONFIG), *fcos3d_targets(POINTS, moved, CONFIG))

    same(torch.compile(both, backend="aot_eager", fullgraph=True)(gts.boxes), both(gts.boxes))


def test_autocast_leaves_the_dtype() -> None:
    gts = batch(5, "random", images=2)
    with torch.autocast("cpu", torch.bfloat16):
        found = fcos3d_targets(POINTS, gts, CONFIG)
    same(found, fcos3d_batch(POINTS, gts, CONFIG))


def test_cost_grows_with_pairs_and_with_what_is_written() -> None:
    small, large = module.cost(8, 30_929, 10, columns=9), module.cost(8, 30_929, 20, columns=9)
    assert large.flops == 2 * small.flops
    assert small.bytes > 8 * 30_929 * (10 * 4 + 16)
