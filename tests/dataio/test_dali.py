"""The DALI loader with DALI's CPU operators: torch's order and batches, our crops, exact resume."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from accel.dataio.dali import DaliLoader
from accel.dataio.image_geometry import RandomResizedCrop, Resize, ResizeCenterCrop, Transform
from accel.dataio.images import ImageDataset, ImageFolder, collate_images, tar_samples
from tests.dataio.pictures import encoded, jpeg, scene, turned
from tests.dataio.test_images_sources import shard

pytest.importorskip("simplejpeg", reason="needs simplejpeg, which the extra `images` brings")
_missing = importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None


def needs_dali(test: Any) -> Any:
    """Mark a test of `make integrations`, which installs DALI where there is a wheel."""
    return pytest.mark.integration(pytest.mark.skipif(_missing, reason="needs DALI: make integrations")(test))


SIZES = [(60, 80), (81, 47), (1, 1), (33, 200), (64, 64), (40, 41), (300, 400)]


@pytest.fixture(scope="module")
def samples() -> list[tuple[bytes, int]]:
    return [(jpeg(*SIZES[i % len(SIZES)], seed=i), i) for i in range(23)]


def make(samples: Sequence[Any], transform: Transform | None = None, **settings: Any) -> ImageDataset:
    return ImageDataset(samples, transform or RandomResizedCrop(24), reducing_gap=None, **settings)


def loader_of(samples: Sequence[Any], batch_size: int = 4, **settings: Any) -> DaliLoader:
    return DaliLoader(make(samples), batch_size, device="cpu", **settings)


def labels_of(batches: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


# What is decoded


@needs_dali
@pytest.mark.parametrize("transform", [RandomResizedCrop(24), ResizeCenterCrop((20, 24)), Resize((17, 31))])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_are_those_of_the_dataset(
    samples: list[tuple[bytes, int]], transform: Transform, interpolation: Any
) -> None:
    dataset = make(samples, transform, seed=5, interpolation=interpolation)
    loader = DaliLoader(dataset, 6, device="cpu")
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        found = list(loader)
        images = torch.cat([images for images, _ in found])
        expected, labels = collate_images(dataset.__getitems__(range(len(dataset))))
        assert torch.equal(torch.cat([labels for _, labels in found]), labels)
        # DALI interpolates chroma within the box, libjpeg within the image, which shows at the box's edges only; and it
        # rounds its sums once, Pillow after each axis.
        difference = (images.int() - expected.int()).abs().float()
        assert difference.mean() <= 0.5
        assert difference.quantile(0.999) <= 4
        assert all(image.is_contiguous(memory_format=torch.channels_last) for image, _ in found)
        assert images.dtype == torch.uint8


@needs_dali
def test_folders_shards_and_other_formats(tmp_path: Path) -> None:
    for index, (kind, name) in enumerate([("JPEG", "jpg"), ("PNG", "png"), ("BMP", "bmp"), ("WEBP", "webp")]):
        path = tmp_path / "set" / f"class{index}" / f"0.{name}"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(scene(40, 60), kind))
    folder = ImageFolder(tmp_path / "set", Resize(24))
    ((images, labels),) = DaliLoader(folder, 4, device="cpu")
    expected, _ = collate_images(folder.__getitems__(range(4)))
    assert labels.tolist() == [0, 1, 2, 3]
    assert (images.int() - expected.int()).abs().float().mean() < 1
    members = [(f"{i}.{kind}", data) for i in range(5) for kind, data in (("jpg", jpeg(30, 40)), ("cls", b"%d" % i))]
    records = tar_samples(shard(tmp_path / "0.tar", *members))
    assert labels_of(loader_of(records, 3)) == [[0, 1, 2], [3, 4]]


@needs_dali
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("exif", [False, True])
def test_exif_orientation(orientation: int, exif: bool) -> None:
    dataset = make([(turned(scene(64, 96), orientation), 0)], RandomResizedCrop(16, scale=(0.2, 0.3)), exif=exif)
    ((images, _),) = DaliLoader(dataset, 1, device="cpu")
    assert (images[0].int() - dataset[0][0].int()).abs().float().mean() < 2


# Order, shards, the last batch


@needs_dali
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("last_batch", ["partial", "drop"])
def test_batches_are_those_of_a_dataloader(samples: list[tuple[bytes, int]], ranks: int, last_batch: Any) -> None:
    drop = last_batch == "drop"
    for rank in range(ranks):
        sampler: Any = DistributedSampler(range(23), ranks, rank, shuffle=True, seed=3, drop_last=drop)  # type: ignore[arg-type]
        theirs = DataLoader(range(23), 4, sampler=sampler, drop_last=drop)  # type: ignore[arg-type]
        ours = loader_of(samples, shuffle=True, seed=3, num_replicas=ranks, rank=rank, last_batch=last_batch)
        assert len(ours) == len(theirs)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert labels_of(ours) == [batch.tolist() for batch in theirs]


def test_fill_completes_the_last_batch_from_the_beginning(samples: list[tuple[bytes, int]]) -> None:
    assert loader_of(samples, last_batch="fill").batches()[-1] == [20, 21, 22, 0]
    assert loader_of(samples, 50, last_batch="fill").batches() == [[*range(23), *range(23), *range(4)]]
    sizes = [len(loader_of(samples, last_batch="fill", num_replicas=3, rank=rank)) for rank in range(3)]
    assert sizes == [2, 2, 2]


# Resume


@needs_dali
@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_resume_gives_the_very_samples_and_crops(samples: list[tuple[bytes, int]], stop: int) -> None:
    settings: dict[str, Any] = {"shuffle": True, "num_replicas": 1, "rank": 0}
    whole = loader_of(samples, **settings)
    whole.set_epoch(2)
    expected = list(whole)
    first = loader_of(samples, **settings)
    first.set_epoch(2)
    for batch, _ in enumerate(first, start=1):
        if batch == stop:
            break
    state = first.state_dict() if stop else loader_state(samples, settings)
    assert state["batch"] == stop
    second = loader_of(samples, **settings)
    second.load_state_dict(state)
    second.set_epoch(2)  # as a loop does: it must leave the place alone
    assert second.dataset.epoch == 2
    rest = list(second)
    assert labels_of(rest) == labels_of(expected[stop:])
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(rest, expected[stop:], strict=True))
    second.set_epoch(3)
    assert len(list(second)) == len(second)


def loader_state(samples: list[tuple[bytes, int]], settings: dict[str, Any]) -> dict[str, int]:
    fresh = loader_of(samples, **settings)
    fresh.set_epoch(2)
    return fresh.state_dict()


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"shuffle": True}, {"batch_size": 5}, {"num_replicas": 2, "rank": 0}, {"last_batch": "drop"}],
    ids=str,
)
def test_state_of_another_loader_is_refused(samples: list[tuple[bytes, int]], other: dict[str, Any]) -> None:
    state = loader_of(samples, **other).state_dict()
    with pytest.raises(ValueError, match=r"of the same samples, .*; go on at the next epoch with set_epoch\(1\)"):
        loader_of(samples).load_state_dict(state)


# Errors


@needs_dali
@pytest.mark.parametrize("content", [b"no image", b"\xff\xd8\xff\xe0 no image", None])
def test_unreadable_file_is_named(samples: list[tuple[bytes, int]], tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.jpg"
    if content is not None:
        path.write_bytes(content)
    loader = loader_of([*samples[:6], (path, 6), *samples[7:]])
    with pytest.raises(ValueError, match=r"sample 6 \(.*broken\.jpg\) is not"):
        list(loader)
    path.write_bytes(samples[6][0])
    assert len(list(loader)) == len(loader), "the loader goes on after an error"


@needs_dali
def test_a_file_whose_header_is_whole_but_not_the_rest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(encoded(scene(64, 64), "PNG")[:400])
    with pytest.raises(ValueError, match=r"sample 0 \(.*broken\.png\) is not"):
        list(loader_of([(path, 0)]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"prefetch_factor": 0}, "prefetch_factor must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"last_batch": "keep"}, r"last_batch must be one of \('partial', 'drop', 'fill'\), got 'keep'"),
        ({"rank": 2, "num_replicas": 2}, "rank must be at least 0 and less than"),
    ],
)
def test_argument_out_of_range_is_refused(
    samples: list[tuple[bytes, int]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(samples, **settings)


def test_missing_dali_names_the_extras(samples: list[tuple[bytes, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.dataio.image import libraries as image_libraries

    image_libraries.dali.cache_clear()
    monkeypatch.setitem(sys.modules, "nvidia.dali.fn", None)
    with pytest.raises(ImportError, match=r"DALI, which cannot be imported .*accel-train\[dali-cu13\]"):
        list(loader_of(samples))


@pytest.mark.gpu
@needs_dali
def test_gpu_decodes_the_same(samples: list[tuple[bytes, int]]) -> None:
    dataset = make(samples)
    for images, labels in DaliLoader(dataset, 8, device="cuda"):
        assert images.is_cuda
        assert labels.is_cuda
        expected = collate_images(dataset.__getitems__(labels.tolist()))[0]
        # nvJPEG's inverse DCT and chroma are its own.
        assert (images.cpu().int() - expected.int()).abs().float().mean() <= 4
