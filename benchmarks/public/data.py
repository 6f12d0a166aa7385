"""Data in the formats that public scripts read, made here: nothing is downloaded, the bits are always the same."""

from __future__ import annotations

import gzip
import pickle
import random
import struct
from pathlib import Path

import numpy as np
from PIL import Image

_SAMPLES = {"train": 6000, "t10k": 1000}


def mnist(folder: Path) -> None:
    """Write pictures of ten shapes in the form of MNIST, for `torchvision.datasets.MNIST(folder, download=True)`.

    Each is one of ten random patterns of 28 x 28, moved by up to two pixels, with noise: a network can learn them.
    """
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    patterns = np.kron(draw.random((10, 7, 7)) > 0.6, np.ones((4, 4))) * 200
    for part, count in _SAMPLES.items():
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        moved = [np.roll(patterns[label], draw.integers(-2, 3, 2), (0, 1)) for label in labels]
        images = np.clip(np.stack(moved) + draw.normal(0, 40, (count, 28, 28)), 0, 255).astype(np.uint8)
        _write(raw / f"{part}-images-idx3-ubyte", struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes())
        _write(raw / f"{part}-labels-idx1-ubyte", struct.pack(">II", 0x801, count) + labels.tobytes())


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content, mtime=0))


def pictures(folder: Path) -> None:
    """Write train/ and val/ with JPEGs of 320 x 256 in a folder for each of ten classes, for `ImageFolder`.

    Each is one of ten coarse random patterns, moved, with noise.
    """
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 200, (10, 8, 10, 3))
    for part, count in (("train", 480), ("val", 40)):
        for number in range(count):
            place = folder / part / f"class{number % 10}"
            place.mkdir(parents=True, exist_ok=True)
            moved = np.roll(np.kron(patterns[number % 10], np.ones((32, 32, 1))), draw.integers(-16, 17, 2), (0, 1))
            noisy = np.clip(moved + draw.normal(0, 12, moved.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(place / f"{number}.jpg", quality=90)


def wikitext(folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt as in WikiText-2."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("train", 120_000), ("valid", 4_000), ("test", 4_000)):
        (folder / f"{name}.txt").write_text(_text(words), encoding="utf-8")


def characters(folder: Path) -> None:
    """Write train.bin, val.bin and meta.pkl, as nanoGPT's prepare.py of shakespeare_char does."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(100_000)
    letters = sorted(set(text))
    number = {letter: index for index, letter in enumerate(letters)}
    ids = np.array([number[letter] for letter in text], dtype=np.uint16)
    for name, part in (("train", ids[: int(0.9 * len(ids))]), ("val", ids[int(0.9 * len(ids)) :])):
        part.tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": number}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def _text(words: int) -> str:
    """Return that many words, of 2,000 by Zipf's law, where each depends on the one before."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(2000)]
    shares = [1 / (rank + 1) for rank in range(len(vocabulary))]
    follows = {word: draw.choices(vocabulary, shares, k=4) for word in vocabulary}
    lines, word = [], vocabulary[0]
    for _ in range(0, words, 12):
        line = []
        for _ in range(12):
            word = draw.choice(follows[word]) if draw.random() < 0.7 else draw.choices(vocabulary, shares)[0]
            line.append(word)
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"
