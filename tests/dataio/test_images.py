"""The data set of images: the same batch whoever reads it, torchvision's results, errors that name the file."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from accel.dataio.image_geometry import Placement, RandomResizedCrop, Resize, ResizeCenterCrop, Transform
from accel.dataio.images import ImageDataset, ImageFolder, collate_images, tar_samples
from tests.dataio.pictures import Image, encoded, jpeg, scene
from tests.dataio.test_images_sources import shard
from tests.kernels.hosts import need

pytest.importorskip("simplejpeg", reason="needs simplejpeg, which the extra `images` brings")

SIZES = [(60, 80), (81, 47), (1, 1), (33, 200), (64, 64), (40, 40), (300, 400)]


@pytest.fixture(scope="module")
def samples() -> list[tuple[bytes, int]]:
    return [(jpeg(*SIZES[i % len(SIZES)], seed=i), i * 10) for i in range(21)]


def make(samples: Sequence[Any], transform: Transform | None = None, **settings: Any) -> ImageDataset:
    return ImageDataset(samples, transform or RandomResizedCrop(24), **settings)


# What is read


def theirs(data: bytes, place: Placement, out: tuple[int, int]) -> np.ndarray:
    """Return Pillow's result for a placement."""
    top, left, tall, wide = place.box
    with Image.open(io.BytesIO(data)) as image:
        part = image.convert("RGB").crop((left, top, left + wide, top + tall))
    resized = np.asarray(part.resize(place.size[::-1], Image.Resampling.BILINEAR))
    y, x = place.offset
    window = resized[y : y + out[0], x : x + out[1]]
    return window[:, ::-1] if place.flip else window


@pytest.mark.parametrize("transform", [RandomResizedCrop(24), ResizeCenterCrop((20, 24)), Resize((17, 31))])
def test_images_are_pillows(samples: list[tuple[bytes, int]], transform: Transform) -> None:
    dataset = make(samples, transform, reducing_gap=None)
    batch = dataset.__getitems__(range(len(samples)))
    for index, (data, label) in enumerate(samples):
        with Image.open(io.BytesIO(data)) as image:
            place = dataset.placement(index, image.height, image.width)
        image, found = batch[index]
        expected = theirs(data, place, transform.size).astype(int)
        assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1
        assert found == label


def test_evaluation_is_torchvisions(tmp_path: Path) -> None:
    need("torchvision")
    from torchvision import transforms
    from torchvision.datasets import ImageFolder as Theirs

    for index, size in enumerate(SIZES):
        path = tmp_path / f"class{index % 3}" / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(*size))
    steps = [transforms.Resize(40), transforms.CenterCrop(32), transforms.PILToTensor()]
    reference = Theirs(str(tmp_path), transforms.Compose(steps))
    dataset = ImageFolder(tmp_path, ResizeCenterCrop(32, 40), reducing_gap=None)
    assert (dataset.classes, dataset.class_to_idx, dataset.targets) == (
        reference.classes,
        reference.class_to_idx,
        reference.targets,
    )
    for ours, expected in zip(dataset.__getitems__(range(len(dataset))), reference, strict=True):
        assert (ours[0].int() - expected[0].int()).abs().max() <= 1
        assert ours[1] == expected[1]


def test_sources_of_all_kinds_give_the_same(tmp_path: Path) -> None:
    data = jpeg(50, 70)
    (tmp_path / "a.jpg").write_bytes(data)
    record = tar_samples(shard(tmp_path / "0.tar", ("1.cls", b"0"), ("1.jpg", data)))[0][0]
    sources = [data, str(tmp_path / "a.jpg"), tmp_path / "a.jpg", record]
    images = make([(source, 0) for source in sources], Resize(20)).__getitems__([0, 1, 2, 3]).images
    assert all(torch.equal(image, images[0]) for image in images)


# The same batch, whoever reads it


def batch_of(dataset: ImageDataset) -> Tensor:
    return collate_images(dataset.__getitems__(range(len(dataset))))[0]


@pytest.mark.parametrize("threads", [2, 3, 8, 40])
def test_threads_change_nothing(samples: list[tuple[bytes, int]], threads: int) -> None:
    expected = batch_of(make(samples, threads=1))
    several = make(samples, threads=threads)
    for _ in range(3):
        assert torch.equal(batch_of(several), expected)


def test_work_is_shared_between_threads(samples: list[tuple[bytes, int]]) -> None:
    seen = set()
    waiting = threading.Barrier(3, timeout=100)

    class Meet(Resize):
        def place(self, height: int, width: int, draws: Sequence[float]) -> Placement:
            if threading.get_ident() not in seen:
                seen.add(threading.get_ident())
                waiting.wait()  # passes only when three threads are here at once
            return super().place(height, width, draws)

    batch_of(make(samples, Meet(8), threads=3))
    assert len(seen) == 3


def test_order_batch_and_negative_index_change_nothing(samples: list[tuple[bytes, int]]) -> None:
    dataset = make(samples)
    expected = batch_of(dataset)
    assert torch.equal(dataset.__getitems__([5, 3, 5]).images, expected[[5, 3, 5]])
    assert torch.equal(dataset[-1][0], expected[-1])
    assert torch.equal(Subset(dataset, [4, 2]).__getitems__([1, 0]).images, expected[[2, 4]])  # type: ignore[attr-defined]


def test_crops_follow_seed_and_epoch(samples: list[tuple[bytes, int]]) -> None:
    dataset = make(samples, seed=1)
    epochs = []
    for epoch in (0, 1, 2):
        dataset.set_epoch(epoch)
        assert dataset.epoch == epoch
        epochs.append(batch_of(dataset))
    assert not torch.equal(epochs[0], epochs[1])
    dataset.set_epoch(1)
    assert torch.equal(batch_of(dataset), epochs[1])
    assert not torch.equal(batch_of(make(samples, seed=2)), epochs[0])
    centre = make(samples, ResizeCenterCrop(24))
    before = batch_of(centre)
    centre.set_epoch(5)
    assert torch.equal(batch_of(centre), before)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_epoch_reaches_workers_that_are_kept(samples: list[tuple[bytes, int]], workers: int, context: str) -> None:
    dataset = make(samples, threads=2)
    expected = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        expected.append(batch_of(dataset))  # in threads, before the workers are forked
    settings = {"persistent_workers": True, "multiprocessing_context": context} if workers else {}
    loader = DataLoader(dataset, batch_size=5, num_workers=workers, collate_fn=collate_images, **settings)  # type: ignore[arg-type]
    for epoch in range(3):
        dataset.set_epoch(epoch)
        found = list(loader)
        assert torch.equal(torch.cat([images for images, _ in found]), expected[epoch])
        assert torch.cat([labels for _, labels in found]).tolist() == [label for _, label in samples]


def test_copies_and_pickles(samples: list[tuple[bytes, int]]) -> None:
    dataset = make(samples, threads=2, seed=3)
    dataset.set_epoch(4)
    expected = batch_of(dataset)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert torch.equal(batch_of(other), expected)
        other.set_epoch(5)
        assert dataset.epoch == 4


# The batch


def test_batch_is_channels_last_without_a_copy(samples: list[tuple[bytes, int]]) -> None:
    batch = make(samples).__getitems__(range(4))
    images, labels = collate_images(batch)
    assert images.data_ptr() == batch.images.data_ptr()
    assert images.shape == (4, 3, 24, 24)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64


def test_other_collate_functions_see_samples(samples: list[tuple[bytes, int]]) -> None:
    dataset = make(samples)
    images, labels = collate_images(dataset.__getitems__(range(6)))
    for other in (default_collate, collate_images):
        one_by_one = other([dataset[index] for index in range(6)])
        whole = other(dataset.__getitems__(range(6)))
        for found in (one_by_one, whole):
            assert torch.equal(found[0], images)
            assert torch.equal(found[1], labels)
    assert collate_images([dataset[0], dataset[1]])[0].is_contiguous(memory_format=torch.channels_last)


def test_empty_batch_and_empty_dataset() -> None:
    dataset = make([])
    assert len(dataset) == 0
    assert dataset.__getitems__([]).images.shape == (0, 3, 24, 24)


# Errors


@pytest.mark.parametrize("threads", [1, 4])
def test_corrupt_file_is_named(tmp_path: Path, threads: int) -> None:
    good, bad = jpeg(50, 50), tmp_path / "broken.jpg"
    bad.write_bytes(good[:300])
    dataset = make([(good, 0)] * 6 + [(bad, 1)] + [(good, 2)] * 6, threads=threads)
    with pytest.raises(ValueError, match=r"sample 6 \(.*broken\.jpg\) is not: OSError: .*; remove or replace it"):
        dataset.__getitems__(range(13))
    # The threads go on with the next batch.
    assert len(dataset.__getitems__(range(6))) == 6


@pytest.mark.parametrize("index", [21, -22])
def test_index_out_of_range(samples: list[tuple[bytes, int]], index: int) -> None:
    with pytest.raises(IndexError):
        make(samples)[index]
    with pytest.raises(IndexError):
        make(samples).__getitems__([0, index])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"reducing_gap": 0.9}, "reducing_gap must be at least 1, or None, got 0.9"),
        ({"interpolation": "nearest"}, "interpolation must be one of"),
    ],
)
def test_argument_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([], **settings)


def test_settings_reach_the_decoder() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(scene(64, 400), exif=exif)
    upright = make([(data, 0)], Resize((40, 8)), exif=True)[0][0]
    lying = make([(data, 0)], Resize((40, 8)))[0][0]
    assert not torch.equal(upright, lying)
    bicubic = make([(data, 0)], Resize((40, 8)), interpolation="bicubic")[0][0]
    assert not torch.equal(bicubic, lying)
    large = jpeg(400, 400)
    reduced = make([(large, 0)], Resize(40))[0][0]
    full = make([(large, 0)], Resize(40), reducing_gap=None)[0][0]
    assert not torch.equal(reduced, full)
    assert (reduced.int() - full.int()).abs().float().mean() < 1.5
