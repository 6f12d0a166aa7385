"""Where encoded images come from: folders of classes, tar shards, or bytes in memory.

A sample is a pair (source, label). A source is a path, the bytes of a file, or a `Slice` of a larger file, which is how
a record of a tar shard is read at random: one `pread`, nothing unpacked.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from accel.profiler.errors import InvalidArgument

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
