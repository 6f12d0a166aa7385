"""Ways from JPEG files to (batch, 3, 224, 224) uint8: ours and what else there is.

Each takes the files, the batch size and the job, and returns a function that reads one epoch and returns the number of
images. The job is "resize", the whole image to 224 x 224, or "train", a random resized crop, mirrored half the time.
Ours and DALI's own reader draw their crops, the others are given them. What is antialiased: ours, Pillow, DALI; not
OpenCV's bilinear filter, which is less work.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.image_geometry import Placement, RandomResizedCrop, Resize, uniforms
from accel.dataio.images import ImageDataset, collate_images

SIZE = 224
WIDTH, HEIGHT = 500, 375  # of the files
THREADS = 2
Epoch = Callable[[], int]
Decode = Callable[[Path, Placement], Any]


def transform(job: str) -> RandomResizedCrop | Resize:
    """Return the transform of a job."""
    return RandomResizedCrop(SIZE) if job == "train" else Resize(SIZE)


def placements(number: int, job: str) -> list[Placement]:
    """Return the crops that all get."""
    chosen = transform(job)
    drawn = uniforms(0, 0, range(number), chosen.draws).tolist()
    return [chosen.place(HEIGHT, WIDTH, row) for row in drawn]


def with_pillow(path: Path, place: Placement) -> Any:
    """Decode and resize with Pillow, as torchvision's transforms do on Pillow images."""
    from PIL import Image

    top, left, height, width = place.box
    with Image.open(path) as image:
        part = image.convert("RGB").resize(
            (SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + width, top + height)
        )
    if place.flip:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(part)


def with_opencv(path: Path, place: Placement) -> Any:
    """Decode and resize with OpenCV; bilinear, not antialiased."""
    import cv2

    top, left, height, width = place.box
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    pixels: Any = cv2.imdecode(np.fromfile(path, np.uint8), flags)
    pixels = pixels[top : top + height, left : left + width]
    resized = cv2.resize(pixels, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(resized, 1) if place.flip else resized


class OneByOne(Dataset[tuple[Tensor, int]]):
    """A data set as most are written: a sample at a time."""

    def __init__(self, files: Sequence[Path], places: Sequence[Placement], decode: Decode) -> None:
        self.files, self.places, self.decode = files, places, decode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self.decode(self.files[index], self.places[index])
        return torch.from_numpy(pixels).permute(2, 0, 1), index


def _count(batches: Any) -> int:
    return sum(len(images) for images, _ in batches)


def ours(files: Sequence[Path], batch: int, job: str) -> Epoch:
    """Return `ImageDataset` in a DataLoader without workers, two threads."""
    dataset = ImageDataset([(path, index) for index, path in enumerate(files)], transform(job), threads=THREADS)
    loader = DataLoader(dataset, batch, collate_fn=collate_images)
    return lambda: _count(loader)


def _loader(decode: Decode) -> Callable[[Sequence[Path], int, str], Epoch]:
    def make(files: Sequence[Path], batch: int, job: str) -> Epoch:
        dataset = OneByOne(files, placements(len(files), job), decode)
        loader = DataLoader(dataset, batch, num_workers=THREADS, persistent_workers=True)
        return lambda: _count(loader)

    return make


def pillow_threads(files: Sequence[Path], batch: int, job: str) -> Epoch:
    """Return Pillow in two threads of this process, one copy into the batch."""
    places = placements(len(files), job)
    pool = ThreadPoolExecutor(THREADS)

    def batches() -> Iterator[tuple[Tensor, None]]:
        for at in range(0, len(files), batch):
            images = np.stack(list(pool.map(with_pillow, files[at : at + batch], places[at : at + batch])))
            yield torch.from_numpy(images).permute(0, 3, 1, 2), None

    return lambda: _count(batches())


def spdl_opencv(files: Sequence[Path], batch: int, job: str) -> Epoch:
    """Return Meta's SPDL with OpenCV, two threads."""
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder

    work = list(zip(files, placements(len(files), job), strict=True))

    def batches() -> Iterator[tuple[Tensor, None]]:
        built = (
            builder()
            .add_source(work)
            .pipe(lambda item: with_opencv(*item), concurrency=THREADS, output_order="input")
            .aggregate(batch)
            .pipe(lambda images: torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))
            .add_sink(2)
            .build(num_threads=THREADS)
        )
        with built.auto_stop():
            for images in built:
                yield images, None

    return lambda: _count(batches())


def dali_reader(files: Sequence[Path], batch: int, job: str) -> Epoch:
    """Return DALI's own reader and iterator with CPU operators; its resize is antialiased, as it is by default."""
    dali: Any = importlib.import_module("nvidia.dali")
    plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
    fn, types = dali.fn, dali.types
    pipeline = dali.Pipeline(batch_size=batch, num_threads=THREADS, device_id=None)
    with pipeline:
        encoded, labels = fn.readers.file(
            files=[str(path) for path in files], labels=list(range(len(files))), name="reader", pad_last_batch=True
        )
        if job == "train":
            images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
            images = fn.resize(images, resize_x=SIZE, resize_y=SIZE)
            images = fn.flip(images, horizontal=fn.random.coin_flip())
        else:
            images = fn.resize(fn.decoders.image(encoded, device="cpu", output_type=types.RGB), size=(SIZE, SIZE))
        pipeline.set_outputs(images, labels)
    loader = plugin.DALIGenericIterator(
        [pipeline],
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=plugin.LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    return lambda: sum(len(row[0]["labels"]) for row in loader)


def our_dali(files: Sequence[Path], batch: int, job: str) -> Epoch:
    """Return our loader around DALI's CPU operators."""
    from accel.dataio.dali import DaliLoader

    dataset = ImageDataset([(path, index) for index, path in enumerate(files)], transform(job))
    loader = DaliLoader(dataset, batch, device="cpu", threads=THREADS)
    return lambda: _count(loader)


# Name → how it is made, and the modules that it needs.
RIVALS: dict[str, tuple[Callable[[Sequence[Path], int, str], Epoch], tuple[str, ...]]] = {
    "ours": (ours, ("simplejpeg", "PIL")),
    "DataLoader, Pillow": (_loader(with_pillow), ("PIL",)),
    "DataLoader, OpenCV": (_loader(with_opencv), ("cv2",)),
    "threads, Pillow": (pillow_threads, ("PIL",)),
    "SPDL, OpenCV": (spdl_opencv, ("spdl.pipeline", "cv2")),
    "DALI on the CPU": (dali_reader, ("nvidia.dali",)),
    "ours around DALI on the CPU": (our_dali, ("nvidia.dali", "simplejpeg", "PIL")),
}


def missing(name: str) -> list[str]:
    """Return the modules that a rival needs and that are not installed."""
    return [module for module in RIVALS[name][1] if not _found(module)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
