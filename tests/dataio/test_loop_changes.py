"""What a loop may change within an epoch, in samplers and datasets, is in the very next batch, whoever makes it."""

from __future__ import annotations

import builtins
import enum
import importlib
import itertools
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.engine.engine import BatchJob, NotAhead
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.fetching.randomness import random_state
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.moved import moved
from accel.dataio.passes.not_ahead import AheadCheck
from accel.dataio.passes.proxy import LoaderProxy
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.loader_workers import LoaderWorkers
from tests.accel.loops import Net
from tests.dataio.engines import Silent
from tests.dataio.numbers import Numbers, indices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers are forked")

LENGTH = 48


def refused(loader: DataLoader[Any], *, exact: bool = True) -> str:
    """Return why `loader_workers` leaves a loader alone."""
    model = Net()
    proxy: Any = LoaderProxy(loader, Silent())
    run = Run(model, loader, [], Gate(model, []), proxy._accel_fetching, 1, cores=4, exact=exact)
    return LoaderWorkers().refusal(run)


# -- samplers ----------------------------------------------------------------------------------------------------------


class Loop:
    """What the loop counts, and what a sampler may read of it."""

    def __init__(self) -> None:
        self.step = 0


class Counting(Sampler[int]):
    """Yields what the loop's counter says."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def __iter__(self) -> Iterator[int]:
        return ((number + self.loop.step) % LENGTH for number in range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


class Growing(Sampler[list[int]]):
    """A batch sampler whose batches grow with the loop's counter."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(LENGTH))
        while left:
            size = 2 + self.loop.step // 3
            yield left[:size]
            left = left[size:]


class Hard(RandomSampler):
    """torch's, but for a loss that it follows."""

    loop: Loop

    def __iter__(self) -> Iterator[int]:
        return (index if self.loop.step % 2 else 0 for index in super().__iter__())


def hard(data: Any, loop: Loop) -> Hard:
    sampler = Hard(data)
    sampler.loop = loop
    return sampler


FOLLOWING: dict[str, Callable[[Any, Loop], DataLoader[Any]]] = {
    "sampler": lambda data, loop: DataLoader(data, 4, sampler=Counting(loop)),
    "batch sampler": lambda data, loop: DataLoader(data, batch_sampler=Growing(loop)),
    "subclass of torch's": lambda data, loop: DataLoader(data, 4, sampler=hard(data, loop)),
    "inside torch's": lambda data, loop: DataLoader(data, batch_sampler=BatchSampler(Counting(loop), 4, False)),
    "list": lambda data, loop: DataLoader(data, 4, sampler=list(range(LENGTH))),
}


@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_sampler_that_is_not_torch_s_is_not_read_ahead(kind: str) -> None:
    """It was, and the batches had another order and other sizes than the loop's."""

    def seen(loader: Any, loop: Loop) -> list[list[int]]:
        torch.manual_seed(0)
        found, order = [], getattr(loader, "sampler", None)
        for _ in range(2):
            for batch in loader:
                found.append(indices(batch))
                loop.step += 1
                if type(order) is list:
                    order[loop.step % LENGTH] = 0
        return found

    made, loop = FOLLOWING[kind](Numbers(LENGTH), Loop()), Loop()
    loader = FOLLOWING[kind](Numbers(LENGTH), loop)
    wanted = seen(loader, loop)

    loop = Loop()
    with ContinuousLoader(FOLLOWING[kind](Numbers(LENGTH), loop)) as continuous:
        assert seen(continuous, loop) == wanted
        assert "is not one of torch's: what it yields may follow the loop" in continuous.explain()
    assert "is not one of torch's: what it yields may follow the loop" in refused(made)

    with pytest.raises(NotAhead, match="is not one of torch's"):
        moved(made, 2, threads=True)


class FollowedIndices(list[int]):
    """Says what it holds by what the loop has set."""


def test_indices_of_the_loop_s_own_class_are_not_read_ahead() -> None:
    sampler = SubsetRandomSampler(FollowedIndices(range(16)))
    assert "a FollowedIndices of indices, which may follow the loop" in refused(
        DataLoader(Numbers(16), batch_size=4, sampler=sampler)
    )


@pytest.mark.parametrize(("indices", "is_left"), [([1, 0, 2], True), ((1, 0, 2), False), (range(3), False)])
def test_indices_that_the_loop_could_set_are_left_alone_where_bits_must_be_the_same(
    indices: Any, is_left: bool
) -> None:
    loader = DataLoader(Numbers(16), batch_size=2, sampler=SubsetRandomSampler(indices))
    assert ("could set other indices" in refused(loader)) is is_left
    assert not refused(loader, exact=False)


class ByText(Numbers):
    """Looks a number up by a text that is made when it runs."""

    key = "SHIFT"

    def __getitem__(self, index: int) -> float:
        return float(super().__getitem__(index)) + vars(sys.modules[__name__]).get(self.key.lower(), 0)


def test_what_is_looked_up_by_texts_can_not_be_seen() -> None:
    assert "looks things up by texts" in DatasetWatch(Fetch(ByText(8), list, batched=True)).unseen
    assert "looks things up by texts" in refused(DataLoader(ByText(8), batch_size=4))


def test_a_module_that_a_function_imports_by_its_place_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text("SHIFT = 1\n")
    (package / "data.py").write_text(
        "class Data:\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, index):\n"
        "        from . import config\n        from .config import SHIFT\n        return index + SHIFT\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = importlib.import_module("package_of_mine.data").Data()
    data[0]
    watch = DatasetWatch(Fetch(data, list, batched=True))
    assert not watch.changed()
    monkeypatch.setattr(sys.modules["package_of_mine.config"], "SHIFT", 2)
    assert watch.changed()


def test_a_sampler_that_the_loop_puts_in_place_of_torch_s_is_not_read_ahead() -> None:
    def seen(loader: Any) -> list[list[int]]:
        found, loop = [], Loop()
        for _ in range(2):
            for batch in loader:
                found.append(indices(batch))
                loop.step += 1
            loader.batch_sampler.sampler = Counting(loop)
        return found

    wanted = seen(DataLoader(Numbers(LENGTH), 4))
    loader, listener = DataLoader(Numbers(LENGTH), 4), Silent()
    proxy: Any = LoaderProxy(loader, listener)
    workers = proxy._accel_fetching.workers = moved(loader, 2, threads=True)
    assert seen(proxy) == wanted
    assert "is not one of torch's" in listener.failures[0]
    workers.close()


def samplers(data: Any) -> dict[str, Callable[[], Any]]:
    chosen = list(range(0, LENGTH, 2))
    return {
        "sequential": lambda: SequentialSampler(data),
        "random": lambda: RandomSampler(data),
        "random with a generator": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(1)),
        "with replacement": lambda: RandomSampler(data, replacement=True, num_samples=70),
        "subset": lambda: SubsetRandomSampler(chosen.copy()),
        "subset in an array": lambda: SubsetRandomSampler(np.array(chosen)),  # type: ignore[arg-type]
        "weighted": lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH),
        "distributed": lambda: DistributedSampler(data, 2, 0),
        "range": lambda: range(LENGTH),
        "tuple": lambda: tuple(range(LENGTH)),
    }


@given(
    kind=st.sampled_from(sorted(samplers(Numbers(LENGTH)))),
    drop_last=st.booleans(),
    sizes=st.dictionaries(st.integers(0, 15), st.integers(1, 7), max_size=4),
    switches=st.sets(st.integers(0, 15), max_size=6),
    threads=st.integers(1, 3),
)
def test_workers_may_be_switched_and_the_batch_size_set_at_any_batch(
    kind: str, drop_last: bool, sizes: dict[int, int], switches: set[int], threads: int
) -> None:
    """Lists that were drawn before are as they would be drawn now, and numbers that the loop draws are its own."""
    data = Numbers(LENGTH)

    def make() -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=BatchSampler(samplers(data)[kind](), 4, drop_last))

    def seen(loader: Any, switch: Callable[[], None]) -> list[list[int]]:
        torch.manual_seed(0)
        found, outer = [], loader.batch_sampler
        for _ in range(2):
            for number, batch in enumerate(loader):
                found.append([*indices(batch), int(torch.randint(1000, ()))])
                outer.batch_size = sizes.get(number, outer.batch_size)
                if number in switches:
                    switch()
        return found

    wanted = seen(make(), lambda: None)
    loader, listener = make(), Silent()
    proxy: Any = LoaderProxy(loader, listener)
    workers = moved(loader, threads, threads=True)
    alternately = itertools.cycle([workers, None])
    proxy._accel_fetching.workers = next(alternately)
    try:
        made = seen(proxy, lambda: setattr(proxy._accel_fetching, "workers", next(alternately)))
    finally:
        workers.close()
    assert made == wanted
    assert listener.failures == []


def test_a_generator_that_the_loop_draws_from_too_is_not_drawn_from_early() -> None:
    def seen(loader: Any) -> list[list[int]]:
        drawn = torch.Generator().manual_seed(3)
        loader.sampler.generator = drawn
        return [[*indices(batch), int(torch.randint(1000, (), generator=drawn))] for _ in range(2) for batch in loader]

    wanted = seen(DataLoader(Numbers(), 4, shuffle=True))
    loader, listener = DataLoader(Numbers(), 4, shuffle=True), Silent()
    proxy: Any = LoaderProxy(loader, listener)
    workers = proxy._accel_fetching.workers = moved(loader, 2, threads=True)
    assert seen(proxy) == wanted
    assert not listener.failures
    workers.close()


# -- datasets ----------------------------------------------------------------------------------------------------------

LEVEL = 0
NESTED: dict[str, Any] = {"transform": {"strength": [0]}}
SETTINGS: Any = types.ModuleType("settings_of_a_script")
SETTINGS.offset = 0
CONTEXT = ContextVar("CONTEXT", default=0)


class Parent:
    shift = 0


class Curriculum(Dataset[Tensor]):
    """Sample i is the sum of all that a loop may set."""

    scale = 0

    def __init__(self) -> None:
        self.level, self.parent, self.deep = 0, Parent(), {"a": {"b": ({"c": [0]},)}}
        self.array, self.tensor, self.table = np.zeros(LENGTH), torch.zeros(LENGTH), torch.zeros(3)
        self.shared = torch.from_numpy(np.zeros(LENGTH))
        self.numbers, self.named = [0] * 300, dict.fromkeys(range(300), 0)
        self.pairs = [(str(number), 0) for number in range(9000)]
        self.raw, self.made_of = bytearray(LENGTH), [[0] for _ in range(LENGTH)]

    @property
    def of_parent(self) -> int:
        return self.parent.shift

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        import settings_of_a_script as settings  # type: ignore[import-not-found]

        named = LEVEL + NESTED["transform"]["strength"][0] + settings.offset
        held = self.level + self.scale + self.of_parent + self.deep["a"]["b"][0]["c"][0] + self.made_of[index][0]
        tables = self.array[index] + self.tensor[index] + self.table.sum() + self.shared[index] + self.raw[index]
        long = self.numbers[index] + self.named[index] + self.pairs[index][1]
        outside = int(os.environ.get("ACCEL_TEST_SHIFT", "0"))
        return torch.as_tensor(index + named + held + long + outside + float(tables))


class Shifted:
    """A collate function, and what it reads."""

    def __init__(self) -> None:
        self.shift = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return default_collate(samples) + self.shift


def _global(data: Curriculum, collate: Shifted, value: int) -> None:
    global LEVEL
    LEVEL = value


def _numpy(data: Curriculum, collate: Shifted, value: int) -> None:
    data.tensor.numpy()[:] = value


CHANGES: dict[str, Callable[[Curriculum, Shifted, int], Any]] = {
    "attribute": lambda data, collate, value: setattr(data, "level", value),
    "global": _global,
    "entry of a global": lambda data, collate, value: NESTED["transform"]["strength"].__setitem__(0, value),
    "dict of a global": lambda data, collate, value: NESTED.update(transform={"strength": [value]}),
    "module": lambda data, collate, value: setattr(SETTINGS, "offset", value),
    "class attribute": lambda data, collate, value: setattr(Curriculum, "scale", value),
    "of a property": lambda data, collate, value: setattr(data.parent, "shift", value),
    "class of a property": lambda data, collate, value: setattr(Parent, "shift", value),
    "nested": lambda data, collate, value: data.deep["a"]["b"][0]["c"].__setitem__(0, value),
    "list of lists": lambda data, collate, value: data.made_of[40].__setitem__(0, value),
    "array": lambda data, collate, value: data.array.fill(value),
    "one element": lambda data, collate, value: data.array.__setitem__(40, value),
    "tensor": lambda data, collate, value: data.tensor.fill_(value),
    "tensor's data": lambda data, collate, value: data.table.data.fill_(value),
    "tensor by way of an array": _numpy,
    "tensor of an array": lambda data, collate, value: data.shared.numpy().fill(value),
    "long list": lambda data, collate, value: data.numbers.__setitem__(40, value),
    "long dict": lambda data, collate, value: data.named.__setitem__(40, value),
    "list of pairs": lambda data, collate, value: data.pairs.__setitem__(40, ("", value)),
    "bytes": lambda data, collate, value: data.raw.__setitem__(40, value),
    "environment": lambda data, collate, value: os.environ.update(ACCEL_TEST_SHIFT=str(value)),
    "collate function": lambda data, collate, value: setattr(collate, "shift", value),
    "nothing": lambda data, collate, value: None,
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "settings_of_a_script", SETTINGS)
    monkeypatch.setenv("ACCEL_TEST_SHIFT", "0")


def _begin() -> tuple[Curriculum, Shifted]:
    data, collate = Curriculum(), Shifted()
    for change in CHANGES.values():
        change(data, collate, 0)
    return data, collate


def batches_of(loader: Any, data: Curriculum, collate: Shifted, change: str, when: set[int]) -> list[Tensor]:
    """Return the batches of two epochs, with a change after each of those in `when`."""
    found = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            found.append(batch.clone())
            if number in when:
                CHANGES[change](data, collate, 7 * epoch + number + 1)
    return found


HOW = ["threads", "fork", "auto"]
WITHIN, BETWEEN = {4}, {11}
GRID = [
    pytest.param(how, change, when, id=f"{how}-{change}-{'within' if when == WITHIN else 'between'}")
    for how in HOW
    for change in CHANGES
    for when in (WITHIN, BETWEEN)
]


@pytest.mark.sample(40)
@pytest.mark.parametrize(("how", "change", "when"), GRID)
def test_a_change_of_any_kind_is_in_the_next_batch(how: str, change: str, when: set[int]) -> None:
    """After the fifth batch, when others had been made, or after the last one, before the next epoch."""
    data, collate = _begin()
    wanted = batches_of(DataLoader(data, 4, collate_fn=collate), data, collate, change, when)
    data, collate = _begin()
    plain, listener = DataLoader(data, 4, collate_fn=collate), Silent()
    assert how == "auto" or not refused(plain)
    if how == "auto":
        loader: Any = ContinuousLoader(plain, num_workers=2)
        closes = loader
    else:
        loader = LoaderProxy(plain, listener)
        closes = loader._accel_fetching.workers = moved(plain, 2, threads=how == "threads", whole=True)
    try:
        made = batches_of(loader, data, collate, change, when)
    finally:
        closes.close()
    assert [batch.tolist() for batch in made] == [batch.tolist() for batch in wanted]
    if how != "auto":
        assert bool(listener.failures) == (change != "nothing" and when == WITHIN)
        assert all("within an epoch" in each for each in listener.failures)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_environment_is_read_anew_in_each_epoch(workers: int) -> None:
    def seen(loader: Any) -> list[float]:
        found = []
        for epoch in range(3):
            os.environ["ACCEL_TEST_SHIFT"] = str(epoch)
            found.append(float(torch.cat(list(loader)).sum()))
        return found

    data, _ = _begin()
    wanted = seen(DataLoader(data, 4))
    with ContinuousLoader(DataLoader(data, 4, num_workers=workers), mode="fork", num_workers=1) as loader:
        assert seen(loader) == wanted


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT", "TRITON_CACHE_DIR"])
def test_what_a_compiler_writes_to_the_environment_is_no_change_of_the_loops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = _begin()
    plain, listener = DataLoader(data, 4), Silent()
    loader = LoaderProxy(plain, listener)
    loader._accel_fetching.workers = workers = moved(plain, 2, threads=True, whole=True)
    try:
        for number, _ in enumerate(loader):
            monkeypatch.setenv(name, str(number))
    finally:
        workers.close()
    assert not listener.failures


def test_what_the_loop_puts_back_before_it_asks_is_seen_by_threads() -> None:
    """As in an evaluation between two batches: the batches made meanwhile are not those of the training."""

    def seen(loader: Any, data: Curriculum, made: Callable[[], None]) -> list[list[float]]:
        found = []
        for batch in loader:
            found.append(batch.tolist())
            data.level = 100
            made()
            data.level = 0
        return found

    data, _ = _begin()
    wanted = seen(DataLoader(data, 4), data, lambda: None)
    loader, listener = DataLoader(data, 4), Silent()
    proxy: Any = LoaderProxy(loader, listener)
    workers: Any = moved(loader, 2, threads=True)
    proxy._accel_fetching.workers = workers
    assert seen(proxy, data, lambda: wait([future for _, future in workers.engine._futures]) and None) == wanted
    assert "within an epoch" in listener.failures[0]
    workers.close()


class Many(Numbers):
    """Holds more than is looked at before each batch."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.big = np.zeros(1 << 20)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + float(self.big[index])


class OfTheContext(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + CONTEXT.get()


@pytest.mark.parametrize("kind", [Many, OfTheContext])
def test_what_cannot_be_seen_is_left_alone_where_bits_must_be_the_same(kind: Callable[[], Numbers]) -> None:
    loader = DataLoader(kind(), 4)
    assert "within an epoch without being seen: allow='exact' leaves it" in refused(loader)
    assert "without being seen" not in refused(loader, exact=False)


@pytest.mark.parametrize("threads", [True, False])
def test_a_change_that_cannot_be_seen_is_found_by_comparing_batches(threads: bool) -> None:
    data, listener = Many(), Silent()
    loader = DataLoader(data, 4)
    proxy: Any = LoaderProxy(loader, listener)
    workers = proxy._accel_fetching.workers = moved(loader, 1, threads=threads)
    found = []
    for number, batch in enumerate(proxy):
        found.append(batch[:, 0].tolist())
        if number == 2:
            if threads:
                wait([future for _, future in workers.engine._futures])  # type: ignore[attr-defined]
            data.big += 1
            workers.check.switched()
    assert found == [[float(4 * n + i + (n > 2)) for i in range(4)] for n in range(LENGTH // 4)]
    assert "compared with the loop's own" in listener.failures[0]
    workers.close()


def test_comparing_takes_one_in_two_hundred_of_the_time() -> None:
    """Each comparison takes 1 s here, and a step 10 s."""
    now = [0.0]

    class Timed(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            now[0] += 0.25
            return super().__getitem__(index)

    data = Timed(LENGTH)
    check = AheadCheck(DataLoader(data, 4), strict=True, clock=lambda: now[0])
    check.look(Fetch(data, default_collate, batched=True))
    check.switched()
    compared = []
    for _ in range(50):
        check.compare(BatchJob([0, 1, 2, 3], None), default_collate([Numbers.__getitem__(data, i) for i in range(4)]))
        compared.append(check.compared)
        now[0] += 10
    assert (compared[0], compared[19], compared[39], compared[-1]) == (1, 1, 1, 2)
    assert check.seen == 50


def test_a_comparison_draws_no_numbers_of_the_loops() -> None:
    """Threads don't notice that a sample draws: the batch that the loop makes beside theirs does."""

    class Late(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            if index == 5:
                torch.rand(1), random.random(), np.random.rand()
            return super().__getitem__(index)

    check = AheadCheck(DataLoader(Late(LENGTH), 4), strict=True)
    check.look(Fetch(Late(LENGTH), default_collate, batched=True))
    check.switched()
    before = random_state()
    with pytest.raises(NotAhead, match="fetching a sample draws random numbers"):
        check.compare(BatchJob([5], None), default_collate([Numbers(LENGTH)[5]]))
    assert random_state() == before


SCALE = 1


class ArrayWithAttributes(np.ndarray[Any, Any]):
    """An array with a scale."""

    scale = 0


class TextWithAttributes(str):
    """A text with a scale."""

    scale = 0


class Key:
    """Is looked up by what it is, and has a scale."""

    scale = 0


class Mode(enum.Enum):
    """Its members may have attributes."""

    TRAINING = 1


class Reads(Numbers):
    """Sample i is what a function returns, and the function is handed something to read."""

    def __init__(self, read: Callable[[Any, int], Any], held: Any) -> None:
        super().__init__(LENGTH)
        self.read, self.held = read, held

    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(float(self.read(self.held, index)))


def _set_global(held: Any) -> None:
    global SCALE
    SCALE = 2


def _into_builtins(held: Any) -> None:
    builtins.accel_level = 2  # type: ignore[attr-defined]


def _by_text(held: Any, index: int) -> Any:
    return globals()["SCA" + held]


def _of_module_by_text(held: Any, index: int) -> Any:
    import settings_of_a_script as settings

    return getattr(settings, "off" + held)


def _of_builtins(held: Any, index: int) -> Any:
    return getattr(builtins, "accel_level", 0)


def _array_of(held: Any) -> None:
    held.numpy()[:] = 1


HIDDEN: dict[str, tuple[Callable[[Any, int], Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "an attribute of a tensor": (
        lambda held, i: getattr(held, "scale", 0),
        lambda: torch.zeros(3),
        lambda held: setattr(held, "scale", 2),
    ),
    "an attribute of an array": (
        lambda held, i: held.scale,
        lambda: np.zeros(3).view(ArrayWithAttributes),
        lambda held: setattr(held, "scale", 2),
    ),
    "an attribute of a text": (
        lambda held, i: held.scale,
        lambda: TextWithAttributes("a"),
        lambda held: setattr(held, "scale", 2),
    ),
    "an attribute of a member": (
        lambda held, i: getattr(held, "scale", 0),
        lambda: Mode.TRAINING,
        lambda held: setattr(held, "scale", 2),
    ),
    "an attribute of a key": (
        lambda held, i: next(iter(held)).scale,
        lambda: {Key(): 0},
        lambda held: setattr(next(iter(held)), "scale", 2),
    ),
    "an attribute of builtins": (_of_builtins, lambda: None, _into_builtins),
    "another kind of number": (
        lambda held, i: len(repr(held[40])),
        lambda: [1] * 300,
        lambda held: held.__setitem__(40, 1.0),
    ),
    "another kind of number in a table": (
        lambda held, i: len(repr(held[40][1])),
        lambda: [("a", 1)] * 9000,
        lambda held: held.__setitem__(40, ("a", True)),
    ),
    "an array's shape": (
        lambda held, i: held.shape[0],
        lambda: np.zeros((2, 3)),
        lambda held: setattr(held, "shape", (3, 2)),
    ),
    "a large tensor by way of an array": (
        lambda held, i: held[0],
        lambda: torch.zeros(1 << 19),
        _array_of,
    ),
    "a global by a text": (_by_text, lambda: "LE", _set_global),
    "a module's attribute by a text": (
        _of_module_by_text,
        lambda: "set",
        lambda held: setattr(SETTINGS, "offset", 2),
    ),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_is_hard_to_see_is_seen_to_change_or_known_to_be_unseen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1)
    monkeypatch.setattr(SETTINGS, "offset", 0)
    monkeypatch.setattr(builtins, "accel_level", 1, raising=False)
    read, make, change = HIDDEN[kind]
    data = Reads(read, make())
    watch, before = DatasetWatch(Fetch(data, list, batched=True)), data[40]
    assert not watch.changed([40])
    change(data.held)
    assert not torch.equal(data[40], before)
    assert watch.unseen or watch.changed([40])


class Odd(Numbers):
    """Holds what raises whoever looks at it."""

    class Raises(dict[str, int]):
        def __len__(self) -> int:
            raise RuntimeError("not to be counted")

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.odd = self.Raises()


def test_what_raises_when_it_is_looked_at_is_taken_to_be_unseen() -> None:
    watch = DatasetWatch(Fetch(Odd(), default_collate, batched=True))
    assert watch.unseen == "the dataset.odd"
    assert not watch.changed([0])


def test_ordinary_datasets_are_made_elsewhere_where_bits_must_be_the_same() -> None:
    """Of each kind that people have: files in a list, tensors, parts of these."""
    tensors = torch.utils.data.TensorDataset(torch.zeros(1000, 3, 224), torch.zeros(1000))
    pairs = Curriculum()
    for data in (tensors, Subset(tensors, list(range(500))), pairs, Subset(pairs, range(10)), list(range(100_000))):
        assert refused(DataLoader(data, 4, shuffle=True)) == ""  # type: ignore[arg-type]
