"""A batch must be the one that a `DataLoader` makes, however the dataset is asked for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from accel.dataio.fetching.fetch import blame, fetch_of, whole_tensors
from tests.sampling import examples


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyError("no row 13")
        return {"x": torch.full((2,), index), "y": index}


class Many(Rows):
    """Is asked once for a batch."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        return [self[index] for index in indices]


def images(memory_format: torch.memory_format = torch.contiguous_format) -> TensorDataset:
    return TensorDataset(torch.rand(20, 3, 4, 5).contiguous(memory_format=memory_format), torch.arange(20))


DATASETS: dict[str, Any] = {
    "rows": Rows,
    "many": Many,
    "tensors": images,
    "channels last": lambda: images(torch.channels_last),
    "strided": lambda: TensorDataset(torch.rand(40, 3)[::2], torch.rand(3, 20).t()),
    "expanded": lambda: TensorDataset(torch.rand(1, 3).expand(20, 3)),
    "no columns": lambda: TensorDataset(torch.empty(20, 0)),
    "types": lambda: TensorDataset(*(torch.arange(20).to(t) for t in (torch.bool, torch.bfloat16, torch.complex64))),
    "subset": lambda: Subset(images(), [3, 3, 1, *range(17)]),
    "subset of places in an array": lambda: Subset(images(), np.arange(20)[::-1]),  # type: ignore[arg-type]
    "subset of places in a tensor": lambda: Subset(images(), torch.arange(20)),  # type: ignore[arg-type]
    "subset of a subset": lambda: Subset(Subset(images(), range(20)), range(20)),
    "joined": lambda: ConcatDataset([images(), images()]),
    "gradients": lambda: TensorDataset(torch.rand(20, 2, requires_grad=True)),
}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), other.requires_grad)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", DATASETS)
@settings(max_examples=examples(25))
@given(indices=st.lists(st.integers(-20, 19).filter(lambda n: n % 20 != 13), min_size=1, max_size=6))
def test_batches_are_those_of_a_dataloader(kind: str, indices: list[int]) -> None:
    torch.manual_seed(0)
    dataset = DATASETS[kind]()
    (plain,) = DataLoader(dataset, batch_sampler=[indices])

    assert_same(fetch_of(DataLoader(dataset, batch_size=4))(indices), plain)


KINDS = {
    "tuple": (1, 2),
    "range": range(1, 3),
    "tensor": torch.tensor([1, 2]),
    "array": np.array([1, 2]),
    "tensors": [torch.tensor(1), torch.tensor(2)],
    "scalars": [np.int32(1), np.int32(2)],
    "keys": {1: None, 2: None}.keys(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", ["tensors", "subset", "rows"])
def test_indices_of_any_kind(kind: str, data: str) -> None:
    fetch = fetch_of(DataLoader(DATASETS[data](), batch_size=2))

    assert torch.equal(_label(fetch(KINDS[kind])), _label(fetch([1, 2])))


def _label(batch: Any) -> Tensor:
    label: Tensor = batch["y"] if isinstance(batch, dict) else batch[1]
    return label


REFUSED = [(data, indices) for data in ("tensors", "subset") for indices in ([], [20], [-21], ["a"])]


@pytest.mark.parametrize(("data", "indices"), [*REFUSED, ("rows", []), ("rows", [1, 13]), ("many", [])], ids=str)
def test_what_a_dataloader_refuses_is_refused(data: str, indices: list[Any]) -> None:
    dataset = DATASETS[data]()
    with pytest.raises(Exception) as plain:  # noqa: PT011  (whatever it is)
        list(DataLoader(dataset, batch_sampler=[indices]))

    with pytest.raises(plain.type):
        fetch_of(DataLoader(dataset, batch_size=2))(indices)


def test_a_list_is_one_call() -> None:
    dataset = Many()
    fetch_of(DataLoader(dataset, batch_size=4))([1, 2, 3])

    assert dataset.calls == 1


def test_the_users_collate_function_gets_the_samples() -> None:
    fetch = fetch_of(DataLoader(images(), batch_size=4, collate_fn=lambda samples: [int(s[1]) for s in samples]))

    assert fetch([5, 6]) == [5, 6]


def test_tensors_and_places_that_the_loop_replaces_are_seen() -> None:
    dataset, part = images(), Subset(images(), [1, 2, 3])
    whole, some = fetch_of(DataLoader(dataset, batch_size=2)), fetch_of(DataLoader(part, batch_size=2))
    whole([0]), some([0])
    dataset.tensors = (torch.zeros(20, 1), torch.arange(20) + 100)
    part.indices = [7, 8, 9]

    assert whole([0, 1])[1].tolist() == [100, 101]
    assert some([0, 1])[1].tolist() == [7, 8]


@pytest.mark.parametrize("make", [Rows, Many])
def test_blame(make: Any) -> None:
    with pytest.raises(KeyError, match="no row 13") as caught:
        fetch_of(DataLoader(make(), batch_size=4))([1, 13, 2])

    assert blame(caught.value, [1, 13, 2]) == ("sample 13" if make is Rows else "samples [1, 13, 2]")


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([1, 2], "samples [1, 2]"),
        (list(range(9)), "samples [0, 1, 2, 3, 4, 5, 6, 7, …] (9)"),
        (5, "sample 5"),
        ("a.jpg", "sample 'a.jpg'"),
    ],
)
def test_blame_without_a_culprit(indices: Any, text: str) -> None:
    assert blame(ValueError(), indices) == text


def test_the_end_of_an_iterator_is_not_the_end_of_the_epoch() -> None:
    class Ends(Rows):
        def __getitem__(self, index: int) -> Any:
            return next(iter(()))

    with pytest.raises(RuntimeError, match="raised StopIteration at sample 4") as caught:
        fetch_of(DataLoader(Ends(), batch_size=4))([4])

    assert isinstance(caught.value.__cause__, StopIteration)


def test_only_plain_tensors_are_indexed_whole() -> None:
    class Own(TensorDataset):
        pass

    assert whole_tensors(images()) is not None
    assert whole_tensors(Rows()) is None
    assert whole_tensors(Own(torch.ones(1))) is None
    assert whole_tensors(TensorDataset(torch.nn.Parameter(torch.ones(2)))) is None
