"""Where images come from: torchvision's numbers for folders, any record of a tar shard at random."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from accel.dataio.images import Slice, folder_samples, read, tar_samples
from tests.kernels.hosts import need


def tree(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(file.encode())
    return root


def shard(path: Path, *members: tuple[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for member, data in members:
            header = tarfile.TarInfo(member)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


def test_classes_and_order_are_torchvisions(tmp_path: Path) -> None:
    need("torchvision")
    from torchvision.datasets import ImageFolder

    # Capital letters before small ones, numbers as text, deeper folders, upper-case endings, links, files of no class.
    root = tree(
        tmp_path / "set",
        *("b/2.jpg", "b/10.jpg", "b/1.JPG", "B/x.png", "10/a.webp", "9/a.jpeg", "9/deep/er/b.bmp", "9/deep/a.tiff"),
        *("9/notes.txt", "stray.jpg", "b/sub/0.jpg"),
    )
    tree(tmp_path / "elsewhere", "linked/z.jpg")
    (root / "b" / "link").symlink_to(tmp_path / "elsewhere" / "linked")
    theirs = ImageFolder(root)
    classes, samples = folder_samples(root)
    assert classes == theirs.classes
    assert samples == theirs.samples
    assert len(samples) == 10


def test_folder_without_classes_or_a_class_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold a folder for each class, got none"):
        folder_samples(tmp_path)
    tree(tmp_path, "cat/1.jpg", "dog/readme.md")
    with pytest.raises(FileNotFoundError, match=r"each class must have an image, 'dog' in .* has none"):
        folder_samples(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        folder_samples(tmp_path / "absent")


def test_folder_takes_the_endings_asked_for(tmp_path: Path) -> None:
    tree(tmp_path, "cat/1.jpg", "cat/2.dat")
    assert folder_samples(tmp_path, (".dat",))[1] == [(str(tmp_path / "cat" / "2.dat"), 0)]


def test_records_of_shards_are_read_at_random(tmp_path: Path) -> None:
    members = [(f"train/{i:03}.{kind}", data) for i in range(20) for kind, data in pair(i)]
    first = shard(tmp_path / "0.tar", *members[:24])
    second = shard(tmp_path / "1.tar", *members[24:])
    samples = tar_samples([first, str(second)])
    assert [label for _, label in samples] == list(range(20))
    for index in (19, 0, 7):
        assert read(samples[index][0]) == b"image %d" % index
    assert tar_samples(first) == samples[:12]


def pair(index: int) -> list[tuple[str, bytes]]:
    found = [("jpg", b"image %d" % index), ("cls", b"%d\n" % index)]
    return found if index % 2 else [*found[::-1]]


def test_members_that_are_no_image_or_label_are_left_alone(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "0.tar",
        ("a/1.seg.png", b"no"),
        ("a/1.PNG", b"yes"),
        ("a/1.json", b"{}"),
        ("a/1.cls", b"4"),
        ("a/readme", b"text"),
        ("b/1.cls", b"5"),
        ("b/1.jpeg", b"too"),
    )
    samples = tar_samples(path)
    assert [(read(source), label) for source, label in samples] == [(b"yes", 4), (b"too", 5)]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.jpg", b"x")], "1 in .* has 1 images and the label b''"),
        ([("1.jpg", b"x"), ("1.cls", b"cat")], "label b'cat'"),
        ([("1.jpg", b"x"), ("1.png", b"x"), ("1.cls", b"1")], "has 2 images"),
    ],
)
def test_sample_without_a_clear_image_and_label_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tar_samples(shard(tmp_path / "0.tar", *members))


def test_compressed_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar.gz", ("1.jpg", b"x"), mode="w:gz")
    with pytest.raises(ValueError, match="must be uncompressed tar files"):
        tar_samples(path)


def test_a_shard_that_was_cut_off_since_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"12345")
    assert read(Slice(str(path), 1, 3)) == b"234"
    with pytest.raises(OSError, match="must hold 3 bytes, got 1"):
        read(Slice(str(path), 4, 3))
