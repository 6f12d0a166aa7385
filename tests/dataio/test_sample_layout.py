"""The layout of samples: what comes back from bytes is what was packed, in all that a collate function can tell."""

from __future__ import annotations

import math
import pickle
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from accel.dataio.sample_cache import SampleCache
from accel.dataio.samples.store import NotKept, SampleLayout


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Record:
    label: int


def named(tensor: torch.Tensor) -> torch.Tensor:
    tensor.origin = "a.png"  # type: ignore[attr-defined]
    return tensor


# One value, which is no structure; each kind of number at its limits; memory in another order than the dimensions.
KEPT: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "scalar tensor": lambda: torch.tensor(7),
    "one element": lambda: torch.ones(1, 1, 1),
    "bits of floats": lambda: torch.tensor([math.nan, -0.0, math.inf, 1e-45]),
    "bool tensor": lambda: torch.tensor([True, False]),
    "unsigned": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
    "unsigned of 32 bits": lambda: torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
    "half": lambda: torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "as an image is permuted": lambda: torch.arange(24).reshape(4, 2, 3).permute(2, 0, 1),
    "part of a tensor": lambda: torch.arange(6.0)[2:4],
    "array": lambda: np.arange(6, dtype=np.uint8).reshape(2, 3),
    "permuted array": lambda: np.arange(24).reshape(4, 2, 3).transpose(2, 0, 1),
    "times": lambda: np.array(["2026-01-01"], "datetime64[D]"),
    "numpy's scalar": lambda: np.float32(0.1),
    "numbers": lambda: (2**63 - 1, -(2**63), True, -0.0, math.nan, None),
    "texts": lambda: {"name": "käse\0", "bytes": b"\0a\0", "empty": ""},
    "nested": lambda: [Pair(torch.ones(2), 3), {"a": [1, (2.0,)]}],
}


def unpacked(layout: SampleLayout, samples: list[Any], share: bool = False) -> list[Any]:
    parts = [layout.pack(sample) for sample in samples]
    columns = [
        np.frombuffer(bytearray(b"".join(column)), np.uint8).reshape(len(samples), -1)
        for column in zip(*parts, strict=True)  # type: ignore[arg-type]
    ]
    return layout.unpack(columns, share)


def assert_alike(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
        assert not other.requires_grad
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
        assert one.tobytes() == other.tobytes()
        assert isinstance(other, np.generic) or other.flags.writeable
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_alike(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, others in zip(one, other, strict=True):
            assert_alike(mine, others)
    else:
        assert repr(one) == repr(other)  # a NaN, and -0.0


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_samples_come_back_as_they_were(kind: str, share: bool) -> None:
    samples = [KEPT[kind](), KEPT[kind]()]
    for sample, again in zip(samples, unpacked(SampleLayout(samples[0]), samples, share), strict=True):
        assert_alike(sample, again)


def test_a_batch_is_collated_to_the_same_memory_format() -> None:
    images = [torch.rand(2, 5, 3).permute(2, 0, 1) for _ in range(3)]
    plain, again = default_collate(images), default_collate(unpacked(SampleLayout(images[0]), images, share=True))
    assert plain.equal(again) and plain.stride() == again.stride()


@pytest.mark.parametrize("share", [False, True])
def test_what_is_written_into_a_sample_stays_with_it(share: bool) -> None:
    sample = (torch.zeros(2), np.zeros(2))
    first, second = unpacked(SampleLayout(sample), [sample, sample], share)
    first[0].fill_(1.0)
    first[1][:] = 1.0
    assert not second[0].any() and not second[1].any()


@pytest.mark.parametrize(
    "sample",
    [
        lambda: (),
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.ones(4)[::2],
        lambda: torch.ones(1).expand(3),
        lambda: torch.ones(0),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: named(torch.ones(2)),
        lambda: np.array([object()]),
        lambda: np.array(3),  # numpy makes a scalar of it, which is no array to a collate function
        lambda: np.arange(4)[::2],
        lambda: np.broadcast_to(np.ones(1), 3),
        lambda: np.ma.array([1]),
        lambda: np.str_("a"),
        lambda: Record(1),
        lambda: UserDict(a=1),
        lambda: {1, 2},
        lambda: (1, object()),
        lambda: torch._neg_view(torch.ones(2)),
        lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor((2,)),
    ],
)
def test_what_is_not_plain_data_is_not_kept(sample: Callable[[], Any]) -> None:
    with pytest.raises(NotKept):
        SampleLayout(sample())


# The place of one value is that of another, or overlaps it: what the loop writes to one is in both.
TWICE: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: (x, {"again": x}),
    "view": lambda x: (x[:3], {"again": x[1:]}),
    "array of a tensor": lambda x: (x, {"again": x.numpy()}),
    "list": lambda x: (x[0], {"again": [x[1], *2 * ([1],)]}),
    "dict": lambda x: (x[0], {"again": 2 * ({"a": 1},)}),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_sample_that_holds_the_same_memory_twice_is_not_kept(name: str) -> None:
    twice = TWICE[name](torch.arange(4.0))
    with pytest.raises(NotKept, match="the same memory in two places"):
        SampleLayout(twice)
    with pytest.raises(ValueError, match="the same memory in two places"):
        SampleCache([twice])
    if "list" in name or name == "dict":
        once = (torch.ones(()), {"again": [torch.ones(()), [1], [1]] if name == "list" else ({"a": 1}, {"a": 1})})
    else:
        once = tuple(pickle.loads(pickle.dumps(each)) for each in twice)
    layout = SampleLayout(once)
    assert layout.pack(once) is not None
    assert layout.pack(twice) is None and layout.rows([once, twice]) is None


def test_parts_of_one_memory_that_do_not_overlap_are_kept() -> None:
    whole = torch.arange(6.0)
    sample = whole[:2], whole[2:3], whole[3:].numpy(), (whole.clone(), (1, 2), (1, 2))
    (back,) = unpacked(SampleLayout(sample), [sample])
    assert all(map(torch.equal, map(torch.as_tensor, back[:3]), map(torch.as_tensor, sample[:3])))


def test_each_bit_counts() -> None:
    layout = SampleLayout((0.0, torch.zeros(2)))
    assert layout.pack((0.0, torch.zeros(2))) != layout.pack((-0.0, torch.zeros(2)))
    assert layout.pack((0.0, torch.zeros(2))) != layout.pack((0.0, -torch.zeros(2)))


OTHERS: dict[str, tuple[Any, Any]] = {
    "shape": (torch.ones(2), torch.ones(3)),
    "dtype": (torch.ones(2), torch.ones(2).int()),
    "order in memory": (torch.ones(2, 3), torch.ones(3, 2).t()),
    "wants a gradient": (torch.ones(2), torch.ones(2, requires_grad=True)),
    "negated view": (torch.ones(2), torch.complex(torch.ones(2), torch.ones(2)).conj().imag),
    "sparse": (torch.ones(2), torch.ones(2).to_sparse()),
    "elsewhere": (torch.ones(2), torch.ones(2, device="meta")),
    "a subclass": (torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    "gaps": (torch.ones(2), torch.ones(4)[::2]),
    "attributes": (torch.ones(2), named(torch.ones(2))),
    "array": (np.ones(2), np.ones(3)),
    "array for a tensor": (torch.ones(2), np.ones(2, np.float32)),
    "int of more bits": (1, 2**63),
    "number": (1, 1.0),
    "bool": (1, True),
    "long text": ("x", "x" * 300),
    "no text": ("x", "\udcff"),
    "structure": ((1, 2), (1, 2, 3)),
    "kind of structure": ((1, 2), [1, 2]),
    "named tuple": ((1, 2), Pair(1, 2)),
    "keys": ({"a": 1}, {"b": 1}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "inner structure": ((1, (2,)), (1, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_there_are_no_rows_where_one_sample_has_another_layout(name: str) -> None:
    example, other = OTHERS[name]
    layout = SampleLayout(example)
    assert layout.pack(other) is None
    assert layout.rows([example, other]) is None and layout.rows([example, example]) is not None
