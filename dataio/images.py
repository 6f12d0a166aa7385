"""Images from files to uint8 batches, in threads of this process.

Decoding and resizing are library calls that give up the GIL, so threads do them at once on all cores, and nothing is
pickled, copied or sent between processes: for 500 x 375 photographs that costs a worker process more than the resize.
A batch is allocated once and each image is written straight to its place. It lies in memory as (B, H, W, 3) and is
returned as its view (B, 3, H, W), which is torch's channels_last: the resize kernel writes it so, and cutting it apart
again (93 CPU-µs an image in `default_collate`) is avoided.

A sample is a pair (source, label). A source is a path, the bytes of a file, or a `Slice` of a
larger file, which is how a record of a tar shard is read at random: one `pread`, nothing unpacked.
"""

from __future__ import annotations

import copy
import functools
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from accel.dataio.image.pixels import Interpolation, Resizer, decode, size_of
from accel.dataio.image_geometry import Placement, Transform, uniforms
from accel.profiler import renamed
from accel.profiler.errors import InvalidArgument, check_numbers
from accel.profiler.host import usable_cores
from accel.profiler.torch_threads import compute_alone

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's


class Slice(NamedTuple):
    """Part of a file."""

    path: str
    offset: int
    """Bytes before it."""
    size: int
    """Bytes of it."""


Source: TypeAlias = "str | Path | bytes | Slice"
Sample = tuple[Source, int]


def read(source: Source) -> bytes:
    """Return the encoded image."""
    if isinstance(source, bytes):
        return source
    if not isinstance(source, Slice):
        with open(source, "rb", buffering=0) as file:
            return file.read()
    file_number = os.open(source.path, os.O_RDONLY)
    try:
        data = os.pread(file_number, source.size, source.offset)
    finally:
        os.close(file_number)
    if len(data) != source.size:
        raise OSError(f"it must hold {source.size} bytes, got {len(data)}; the shard has changed or is cut off")
    return data


def name(source: Source) -> str:
    """Return what a person needs to find the image."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes in memory"
    if isinstance(source, Slice):
        return f"{source.path}, {source.size} bytes from byte {source.offset} on"
    return str(source)


def folder_samples(root: str | Path, extensions: Sequence[str] = EXTENSIONS) -> tuple[list[str], list[Sample]]:
    """Return the classes and samples of a folder of class folders, in the order of torchvision's `ImageFolder`.

    Args:
        root: holds one folder for each class; images may lie deeper in these, links are followed.
        extensions: of images, lower case; others are left out.

    Raises:
        FileNotFoundError: if `root` holds no folder, or a class has no image.
    """
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        raise FileNotFoundError(f"{root} must hold a folder for each class, got none; pass the folder above the images")
    samples: list[Sample] = []
    for label, each in enumerate(classes):
        paths = list(_images(os.path.join(root, each), tuple(extensions)))
        if not paths:
            raise FileNotFoundError(
                f"each class must have an image, {each!r} in {root} has none; remove the folder, or name the "
                f"extensions: they are {', '.join(extensions)}"
            )
        samples += [(path, label) for path in paths]
    return classes, samples


def _images(folder: str, extensions: tuple[str, ...]) -> Iterator[str]:
    for place, _, files in sorted(os.walk(folder, followlinks=True)):
        for file in sorted(files):
            if file.lower().endswith(extensions):
                yield os.path.join(place, file)


def tar_samples(paths: str | Path | Iterable[str | Path]) -> list[Sample]:
    """Return the samples of WebDataset shards: tar files with `KEY.jpg` (or another image) and `KEY.cls`.

    A sample's members stand next to each other and share what comes before the first dot of the file name; `.cls` holds
    the label as a decimal number. Other members are left alone. Each shard is read through once, headers only.

    Args:
        paths: one or several uncompressed tar files.

    Raises:
        InvalidArgument: if a file is no uncompressed tar, or an image has no label or more than one image.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    return [sample for path in listed for sample in _shard(str(path))]


def _shard(path: str) -> Iterator[Sample]:
    try:
        with tarfile.open(path, "r:") as shard:
            group: dict[str, Slice] = {}
            before = None
            for member in shard:
                if not member.isfile():
                    continue
                folder, file = os.path.split(member.name)
                key, _, extension = file.partition(".")
                if (folder, key) != before:
                    yield from _sample(path, before, group)
                    group, before = {}, (folder, key)
                group["." + extension.lower()] = Slice(path, member.offset_data, member.size)
            yield from _sample(path, before, group)
    except tarfile.ReadError as error:
        raise InvalidArgument(
            f"shards must be uncompressed tar files, {path} is not ({error}); unpack it first"
        ) from error


def _sample(path: str, key: tuple[str, str] | None, group: dict[str, Slice]) -> Iterator[Sample]:
    images = [part for extension, part in group.items() if extension in EXTENSIONS]
    if not images:
        return
    label = read(group[".cls"]).strip() if ".cls" in group else b""
    if len(images) != 1 or not label.isdigit():
        raise InvalidArgument(
            f"each sample must have one image and a number in .cls, {'/'.join(key or ())} in {path} has "
            f"{len(images)} images and the label {label!r}; pass other layouts as a list of (Slice, label)"
        )
    yield images[0], int(label)


class Epoch:
    """Number of an epoch, as a plain value that also reaches copies in other processes.

    Worker processes have copies of a dataset. Those of a `ContinuousLoader` are sent what changed,
    and may be an epoch ahead of the loop. Those that a `DataLoader` keeps are sent nothing, so the
    newest number lies in shared memory as well. A copy counts how often the number has changed, and
    takes the shared one if that has changed more often.

    Args:
        number: to begin with.
        changes: how often it has changed before.
    """

    accel_hides: ClassVar[frozenset[str]] = frozenset({"_shared"})  # what lies there reaches worker processes by itself

    def __init__(self, number: int = 0, changes: int = 0) -> None:
        self._number, self._changes = number, changes
        self._shared: Tensor = torch.tensor([number, changes], device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    @property
    def number(self) -> int:
        """The newest number."""
        shared = self._shared.numpy()
        # The count first: the number is written before it.
        return int(shared[0]) if shared[1] > self._changes else self._number

    def set(self, number: int) -> None:
        """Change the number, here and in copies that share its memory."""
        if number == self.number:
            return
        shared = self._shared.numpy()
        self._number, self._changes = int(number), max(self._changes, int(shared[1])) + 1
        shared[0] = self._number
        shared[1] = self._changes

    def at(self, number: int) -> Epoch:
        """Return one that has memory of its own, as this one will be once it is set to `number`."""
        return Epoch(number, self._changes + (number != self.number))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]  # a deep copy's is not


class ImageBatch(Sequence[tuple[Tensor, int]]):
    """A whole batch, that is also the sequence of its samples, which any collate function understands.

    Attributes:
        images: (B, 3, H, W) uint8 in channels_last.
        labels: (B,) int64.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: Any) -> Any:
        return self.images[at], int(self.labels[at])

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(self.images, self.labels.tolist(), strict=True)


def collate_images(batch: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return (images, labels) without copying a batch that `ImageDataset` made; `collate_fn` of a loader."""
    if isinstance(batch, ImageBatch):
        return batch.images, batch.labels
    images, labels = zip(*batch, strict=True)
    stacked = torch.stack([image.permute(1, 2, 0) for image in images])
    return stacked.permute(0, 3, 1, 2), torch.tensor(labels)


collate = renamed.function("collate", collate_images)


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Decode, crop and resize images; map-style, with whole batches in threads.

    What is random about sample i in an epoch depends on (seed, epoch, i) only: not on threads, workers, the batch it is
    in, or what was read before.

    Args:
        samples: pairs (source, label); a source is a path, the bytes of a file, or a `Slice` of a file.
        transform: `RandomResizedCrop`, `ResizeCenterCrop`, `Resize`, or another `Transform`.
        seed: of the crops, default 0.
        threads: that read one batch, this one included; default the cores of this process, at most 8, and 1 inside a
            DataLoader's worker.
        interpolation: "bilinear" or "bicubic", both antialiased as Pillow's.
        reducing_gap: how many times the pixels needed a JPEG decoded at 1/2, 1/4 or 1/8 must still have a side, at
            least 1, default 2; None decodes all of it. As in Pillow's `thumbnail`.
        exif: turn images as their EXIF orientation says; default no, as torchvision's `ImageFolder`.

    Raises:
        InvalidArgument: if an argument is out of range; when a sample is read, if it holds no readable image.

    Example:
        >>> dataset = ImageDataset([("cat.jpg", 0), ("dog.jpg", 1)], RandomResizedCrop(224))
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=collate_images)
        >>> for epoch in range(3):
        ...     dataset.set_epoch(epoch)
        ...     for images, labels in loader:
        ...         outputs = model(normalize(images.to("cuda", non_blocking=True)))
    """

    thread_safe = True
    """Any number of threads may read samples and batches at once."""

    def __init__(
        self,
        samples: Sequence[Sample],
        transform: Transform,
        *,
        seed: int = 0,
        threads: int | None = None,
        interpolation: Interpolation = "bilinear",
        reducing_gap: float | None = 2.0,
        exif: bool = False,
    ) -> None:
        check_numbers(seed=seed, threads=threads, reducing_gap=reducing_gap)
        if isinstance(transform, type) or not hasattr(transform, "place"):
            raise InvalidArgument(
                f"transform must be an accel.RandomResizedCrop, ResizeCenterCrop or Resize, got {transform!r}; apply "
                "other transforms to the batch, on its device"
            )
        if threads is not None and threads < 1:
            raise InvalidArgument(f"threads must be at least 1, got {threads}")
        if reducing_gap is not None and not reducing_gap >= 1:
            raise InvalidArgument(f"reducing_gap must be at least 1, or None, got {reducing_gap}")
        self.samples, self.transform, self.seed, self.threads = samples, transform, seed, threads
        self.reducing_gap, self.exif = reducing_gap, exif
        self._resizer = Resizer(interpolation)
        self._epoch = Epoch()

    @property
    def interpolation(self) -> Interpolation:
        """The filter that images are resized with."""
        return self._resizer.interpolation

    @property
    def epoch(self) -> int:
        """The epoch that the crops are drawn for."""
        return self._epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Draw other crops from the next sample on, in this process and in workers that run already."""
        self._epoch.set(epoch)

    def at_epoch(self, epoch: int) -> ImageDataset:
        """Return this dataset as it is in an epoch, so that its batches can be made before that has begun."""
        other = copy.copy(self)
        other._epoch = self._epoch.at(epoch)
        return other

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image (3, H, W) uint8, label)."""
        batch = self._batch([range(len(self))[index]], 1)
        return batch.images[0], int(batch.labels[0])

    def __getitems__(self, indices: Sequence[int]) -> ImageBatch:
        """Return the batch of these samples."""
        inside = range(len(self))
        return self._batch([inside[index] for index in indices], _threads_of(self))

    def placement(self, index: int, height: int, width: int) -> Placement:
        """Return which part of an image of this size is used for sample `index` in this epoch."""
        return self.transform.place(height, width, self._draws([index])[0])

    def _batch(self, indices: list[int], threads: int) -> ImageBatch:
        images = torch.empty(len(indices), *self.transform.size, 3, dtype=torch.uint8)
        draws = self._draws(indices)
        todo = deque(range(len(indices)))

        def work() -> None:
            while (at := _pop(todo)) is not None:
                try:
                    self._read(indices[at], draws[at], images[at])
                except BaseException:
                    todo.clear()
                    raise

        self._run(work, min(threads, len(indices)))
        labels = torch.tensor([self.samples[index][1] for index in indices], dtype=torch.int64)
        return ImageBatch(images.permute(0, 3, 1, 2), labels)

    def _run(self, work: Callable[[], None], threads: int) -> None:
        others: list[Future[None]] = []
        if threads > 1:
            pool = _pool(threads - 1, os.getpid())
            others = [pool.submit(work) for _ in range(threads - 1)]
        try:
            work()
        finally:
            # One that waits for a thread would find nothing left to do.
            others = [other for other in others if not other.cancel()]
            wait(others)
        for other in others:
            other.result()

    def encoded(self, indices: Sequence[int]) -> Iterator[tuple[bytes, Placement]]:
        """Yield the file of each sample and its placement in this epoch, for a decoder other than the one built in.

        Raises:
            InvalidArgument: if a file cannot be read or is no image.
        """
        for index, draws in zip(indices, self._draws(indices), strict=True):
            with self._named(index):
                data = read(self.samples[index][0])
                height, width = size_of(data, exif=self.exif)
            yield data, self.transform.place(height, width, draws)

    def _read(self, index: int, draws: list[float], slot: Tensor) -> None:
        with self._named(index):
            data = read(self.samples[index][0])
            decoded = decode(
                data,
                lambda height, width: self.transform.place(height, width, draws),
                exif=self.exif,
                reducing_gap=self.reducing_gap,
            )
        self._resizer.into(slot, decoded.pixels, decoded.place)

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"samples must be readable images, sample {index} ({name(self.samples[index][0])}) is not: {error}; "
                "remove or replace it"
            ) from error

    def _draws(self, indices: Sequence[int]) -> list[list[float]]:
        drawn: list[list[float]] = uniforms(self.seed, self.epoch, indices, self.transform.draws).tolist()
        return drawn


def _threads_of(dataset: ImageDataset) -> int:
    if dataset.threads is not None:
        return dataset.threads
    return 1 if get_worker_info() is not None else min(8, _cores())


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return the threads that all datasets of this process share: a dataset with its own would change when it is read.

    Threads do not survive a fork, so each process has other ones.
    """
    return ThreadPoolExecutor(threads, "accel-images", initializer=compute_alone)


def _pop(todo: deque[int]) -> int | None:
    try:
        return todo.popleft()
    except IndexError:
        return None


# Asked for each batch; reading quotas takes 0.2 ms.
_cores = functools.cache(usable_cores)


class ImageFolder(ImageDataset):
    """Images in one folder for each class, numbered as torchvision's `ImageFolder` numbers them.

    Args:
        root: holds the class folders.
        transform: see `ImageDataset`.
        extensions: of images, lower case; default torchvision's.
        **settings: those of `ImageDataset`.

    Raises:
        FileNotFoundError: if there is no class folder, or one without images.

    Example:
        >>> dataset = ImageFolder("imagenet/train", RandomResizedCrop(224), seed=1)
        >>> dataset.classes[dataset[0][1]]
        'n01440764'
    """

    def __init__(
        self, root: str | Path, transform: Transform, *, extensions: Sequence[str] = EXTENSIONS, **settings: Any
    ) -> None:
        self.root = os.path.expanduser(root)
        self.classes, samples = folder_samples(self.root, extensions)
        super().__init__(samples, transform, **settings)
        self.class_to_idx = {each: label for label, each in enumerate(self.classes)}
        self.targets = [label for _, label in samples]
