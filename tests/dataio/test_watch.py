"""Every change of a dataset must reach the copies of live workers, or be known to need new ones."""

from __future__ import annotations

import copy
import math
import multiprocessing
import random
import tempfile
import threading
import time
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.dataset import walk
from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.dataset.numbers import Forecast, differing, numbers_of, set_numbers
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import Fetch, fetch_of
from accel.dataio.loader import ContinuousLoader

Span = namedtuple("Span", "low high")


class Holder:
    """A dataset with whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__weakref__", "strength")

    def __init__(self) -> None:
        self.strength = 0.1


class Guarded:
    """Refuses to be written, but writes itself; and says that it has any attribute."""

    def __init__(self) -> None:
        object.__setattr__(self, "level", 1)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("read only")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise OSError("the file is not open")  # what hasattr() lets through


def watch_of(dataset: Any) -> DatasetWatch:
    return DatasetWatch(Fetch(dataset, list, batched=True))


def is_other(watch: DatasetWatch) -> bool:
    """Return whether new copies are needed."""
    return watch.changed(thoroughly=True, numbers=False)


SENDABLE: dict[str, tuple[Any, Any, Any]] = {
    "attribute": (lambda: Holder(epoch=0), lambda d: setattr(d, "epoch", 1), lambda d: d.epoch),
    "new attribute": (Holder, lambda d: setattr(d, "epoch", 1), lambda d: d.epoch),
    "to true": (lambda: Holder(flag=1), lambda d: setattr(d, "flag", True), lambda d: repr(d.flag)),
    "to nan": (lambda: Holder(fill=0.0), lambda d: setattr(d, "fill", math.nan), lambda d: repr(d.fill)),
    "nested": (
        lambda: Holder(transform=Holder(step=Holder(p=0.1))),
        lambda d: setattr(d.transform.step, "p", 0.5),
        lambda d: d.transform.step.p,
    ),
    "past __setattr__": (Guarded, lambda d: vars(d).update(level=2), lambda d: d.level),
    "module": (lambda: Holder(m=torch.nn.Dropout(0.1)), lambda d: d.m.eval(), lambda d: d.m.training),
}


@pytest.mark.parametrize("case", SENDABLE)
def test_a_change_of_a_number_reaches_a_copy(case: str) -> None:
    make, change, seen = SENDABLE[case]
    dataset = make()
    watch, replica = watch_of(dataset), copy.deepcopy(dataset)
    change(dataset)
    to_send = differing(watch.numbers, numbers_of(dataset))

    assert to_send
    assert watch.changed()
    assert not is_other(watch)
    set_numbers(replica, to_send)
    assert seen(replica) == seen(dataset)


ANEW: dict[str, tuple[Any, Any]] = {
    "deleted attribute": (lambda: Holder(a=1), lambda d: delattr(d, "a")),
    "deleted entry": (lambda: Holder(a={"b": 1}), lambda d: d.a.pop("b")),
    "another key": (lambda: Holder(a={"b": 1}), lambda d: (d.a.pop("b"), d.a.update(c=1))),
    "longer list": (lambda: Holder(a=[1]), lambda d: d.a.append(2)),
    "another list": (lambda: Holder(a=[1]), lambda d: setattr(d, "a", [1])),
    "to none": (lambda: Holder(limit=3), lambda d: setattr(d, "limit", None)),
    "list entry": (lambda: Holder(x=[1, 2]), lambda d: d.x.__setitem__(1, 5)),
    "slot": (lambda: Holder(x=Slotted()), lambda d: setattr(d.x, "strength", 0.9)),
    "another tuple": (lambda: Holder(a=Span(1, 2)), lambda d: setattr(d, "a", Span(1, 3))),
    "another object": (lambda: Holder(a=Holder(b=1)), lambda d: setattr(d, "a", Holder(b=1))),
    "set": (lambda: Holder(a={1, 2}), lambda d: (d.a.add(3), d.a.remove(1))),
    "big set": (lambda: Holder(a=set(range(999))), lambda d: d.a.add(-1)),
    "another array": (lambda: Holder(a=np.arange(3)), lambda d: setattr(d, "a", np.arange(3))),
    "tensor in place": (lambda: Holder(a=torch.ones(3)), lambda d: d.a.add_(1)),
    "weights": (
        lambda: Holder(m=torch.nn.Linear(2, 2)),
        lambda d: torch.nn.init.zeros_(d.m.weight),
    ),
    "generator of torch": (lambda: Holder(g=torch.Generator()), lambda d: d.g.manual_seed(3)),
    "generator of numpy": (lambda: Holder(g=np.random.default_rng(0)), lambda d: d.g.random()),
    "old generator of numpy": (lambda: Holder(g=np.random.RandomState(0)), lambda d: d.g.seed(1)),
    "generator of Python": (lambda: Holder(g=random.Random(0)), lambda d: d.g.random()),
    "key that is an object": (lambda: Holder(a={Holder: Holder(b=1)}), lambda d: setattr(d.a[Holder], "b", 2)),
}


@pytest.mark.parametrize("case", ANEW)
def test_any_other_change_needs_a_new_copy(case: str) -> None:
    make, change = ANEW[case]
    dataset = make()
    watch = watch_of(dataset)
    change(dataset)

    assert is_other(watch)


QUIET: dict[str, Any] = {
    "nan": lambda: Holder(fill=math.nan, best=float("nan"), when=np.float32("nan")),
    "system generator": lambda: Holder(g=random.SystemRandom()),
    "inference tensor": lambda: _inference(),
    "asks for nothing": Guarded,
    "code": lambda: Holder(f=len, g=lambda: 1, h=random, i=Holder),
    "dead weak reference": lambda: Holder(w=weakref.ref(Slotted())),
    "list": lambda: [1, 2, 3],
    "range": lambda: range(9),
    "number": lambda: 3,
    "enough of everything": lambda: Holder(**{kind: make() for kind, (make, *_) in SENDABLE.items()}),
}


def _inference() -> Holder:
    with torch.inference_mode():
        return Holder(t=torch.ones(2))


@pytest.mark.parametrize("case", QUIET)
def test_what_did_not_change_is_no_change(case: str) -> None:
    watch = watch_of(QUIET[case]())

    assert not watch.changed(thoroughly=True)
    assert not watch.unseen_at_all


TABLES = {
    "array": lambda n: np.full(3, n),
    "list": lambda n: [n] * 300,
    "dict": lambda n: dict.fromkeys(range(300), n),
    "object": lambda n: Holder(big=[n] * 300),
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_an_object_at_the_address_of_an_old_one_is_another(make: Any) -> None:
    """Replaced twice, the new one often lies where the first one lay: an id would be the same."""
    for _ in range(20):
        dataset = Holder(table=make(0))
        watch = watch_of(dataset)
        dataset.table = None
        dataset.table = make(1)

        assert is_other(watch)


SCALE = 1.0


def _scaled(value: float) -> float:
    return value * SCALE


class Relabelled:
    level = 1

    def __init__(self) -> None:
        self.read = _scaled

    def __getitem__(self, index: int) -> float:
        return self.read(index)


def _in_a_closure() -> Holder:
    shift = [1]
    return Holder(transform=lambda value: value + shift[0], shift=lambda: shift)


def _set_scale(_: Any) -> None:
    global SCALE
    SCALE += 1.0


class Shift:
    """Shifts a value; and closes over another shift."""

    def __init__(self) -> None:
        self.shift = 0
        other = 0

        def function(value: int) -> int:
            return value + other

        def change(to: int) -> None:
            nonlocal other
            other = to

        self.function, self.change = function, change

    def shifted(self, value: int) -> int:
        return value + self.shift


IN_PLACE: dict[str, tuple[Any, Any]] = {
    "array": (lambda: Holder(a=np.zeros(3)), lambda d: d.a.__setitem__(0, 1)),
    "shuffled array": (
        lambda: Holder(a=np.arange(500.0).reshape(100, 5)),
        lambda d: d.a.__setitem__([0, 1], d.a[[1, 0]]),
    ),
    "view of an array": (lambda: Holder(a=np.arange(9)[::2]), lambda d: d.a.base.__setitem__(4, 7)),
    "array of objects": (lambda: Holder(a=np.array(["a", "bb"], dtype=object)), lambda d: d.a.__setitem__(0, "c")),
    "long list": (lambda: Holder(a=[0] * 257), lambda d: d.a.__setitem__(256, 1)),
    "shuffled list": (lambda: Holder(a=list(range(999))), lambda d: random.Random(1).shuffle(d.a)),
    "long list of tuples": (lambda: Holder(a=[("x.png", 1)] * 300), lambda d: d.a.__setitem__(7, ("x.png", 2))),
    "long list of lists": (lambda: Holder(a=[[n] for n in range(300)]), lambda d: d.a[299].__setitem__(0, -1)),
    "long list of dicts": (lambda: Holder(a=[{"l": n} for n in range(300)]), lambda d: d.a[9].update(l=0)),
    "minus one": (lambda: Holder(a=[-1] * 300), lambda d: d.a.__setitem__(0, -2)),  # of one hash
    "to true": (lambda: Holder(a=[1] * 300), lambda d: d.a.__setitem__(0, True)),
    "long dict": (lambda: Holder(a={n: n for n in range(300)}), lambda d: d.a.update({7: 0})),
    "reordered dict": (lambda: Holder(a={n: 0 for n in range(300)}), lambda d: d.a.update({0: d.a.pop(0)})),
    "big set": (lambda: Holder(a=set(range(999))), lambda d: (d.a.add(-1), d.a.remove(3))),
    "deque": (lambda: Holder(a=deque(range(999))), lambda d: d.a.rotate(1)),
    "bytes": (lambda: Holder(a=bytearray(9)), lambda d: d.a.__setitem__(3, 1)),
    "tensor by way of an array": (lambda: Holder(a=torch.zeros(3)), lambda d: d.a.numpy().__setitem__(0, 1)),
    "tensor of an array": (lambda: Holder(a=torch.from_numpy(np.zeros(3))), lambda d: d.a.numpy().__setitem__(0, 1)),
    "deep": (
        lambda: Holder(a=Holder(b=Holder(c=Holder(d=Holder(e=np.zeros(1)))))),
        lambda d: d.a.b.c.d.e.__setitem__(0, 1),
    ),
    "attribute of a class": (Relabelled, lambda d: setattr(Relabelled, "level", Relabelled.level + 1)),
    "global": (Relabelled, _set_scale),
    "closure": (_in_a_closure, lambda d: d.shift().__setitem__(0, 2)),
    "of a method": (lambda: Holder(a=[Shift().shifted]), lambda d: setattr(d.a[0].__self__, "shift", 1)),
    "of a partial": (lambda: Holder(a=partial(Shift.shifted, Shift())), lambda d: setattr(d.a.args[0], "shift", 1)),
    "variable of a closure": (lambda: Holder(a=Shift()), lambda d: d.a.change(5)),
    "in a tuple": (lambda: Holder(a=(Shift(),)), lambda d: setattr(d.a[0], "shift", 1)),
    "attribute of a list": (lambda: Holder(a=Named([1])), lambda d: setattr(d.a, "name", "other")),
}


class Named(list[int]):
    name = "one"


@pytest.mark.parametrize("case", IN_PLACE)
def test_a_change_in_place_needs_a_new_copy(case: str) -> None:
    make, change = IN_PLACE[case]
    dataset = make()
    if case == "tensor by way of an array":
        dataset.a.numpy()  # as who writes it so has done
    watch = watch_of(dataset)
    assert not watch.unseen_at_all
    change(dataset)

    assert is_other(watch)


def test_a_file_that_each_process_opens_for_itself_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"abc")
    dataset = Holder(file=None)
    watch = watch_of(dataset)
    with (tmp_path / "records").open("rb") as dataset.file:
        assert not is_other(watch)
        dataset.file.read(1)
        assert not is_other(watch)
        with (tmp_path / "records").open("rb") as dataset.file:
            assert is_other(watch)


UNSEEN: dict[str, Any] = {
    "big array": lambda: Holder(a=np.zeros(walk.MOST_SLOW_BYTES // 8 + 1)),
    "long list": lambda: Holder(a=[0] * (walk.MOST_SLOW_ENTRIES + 1)),
    "mapped for writing": lambda: Holder(a=np.memmap(tempfile.TemporaryFile(), shape=(3,), mode="w+")),  # noqa: SIM115
    "iterator": lambda: Holder(a=iter([1, 2])),
    "memory": lambda: Holder(a=memoryview(bytearray(3))),
    "C code": lambda: Holder(a=ElementTree.Element("a")),
    "shared number": lambda: Holder(a=multiprocessing.Value("i", 0)),
    "too many": lambda: Holder(a=[[[0] for _ in range(200)] for _ in range(60)]),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("case", UNSEEN)
def test_what_can_not_be_inspected_is_reported(case: str) -> None:
    watch = watch_of(UNSEEN[case]())

    assert watch.unseen_at_all
    assert watch.unseen


def test_an_object_that_is_reached_twice() -> None:
    shared = Holder(p=1)
    dataset = Holder(far=Holder(a=Holder(b=shared)), near=shared)
    dataset.itself = dataset
    shared.parent = dataset
    watch, replica = watch_of(dataset), copy.deepcopy(dataset)
    shared.p = 2
    set_numbers(replica, differing(watch.numbers, numbers_of(dataset)) or {})

    assert not is_other(watch)
    assert replica.near.p == replica.far.a.b.p == 2


def test_the_cost_is_bounded() -> None:
    """A long list, deep tables, everything linked with everything, a model: each once was 256**4 values, or more."""
    nodes = [Holder() for _ in range(200)]
    for node in nodes:
        node.others = nodes
    dataset = Holder(
        long=list(range(10**6)),
        table={n: n for n in range(10**6)},
        deep=[[[0] * 50 for _ in range(100)] for _ in range(100)],
        nodes=nodes,
        model=torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(200)]),
    )
    began = time.process_time()
    watch_of(dataset).changed(thoroughly=True)

    assert time.process_time() - began < 5  # 0.5 s on an idle core


def test_an_epoch_counter_is_expected() -> None:
    dataset = Holder(epoch=0, name="a", inner=Holder(step=10), flag=True, span=(0, 5))
    forecast, first = Forecast(Fetch(dataset, list, batched=True)), numbers_of(dataset)
    dataset.epoch, dataset.inner.step, dataset.flag = 1, 7, False
    second = numbers_of(dataset)
    forecast.saw(first, second)
    dataset.epoch, dataset.inner.step = 2, 4

    assert forecast.next(second) == numbers_of(dataset)


# What a dataset's constructor names is of no account: fetching calls none.

SETTINGS: dict[str, Any] = {"scale": 1.0, "folders": [{"deep": [{"deeper": [{"deepest": {"end": [1]}}]}]}]}


def _unpacked(folder: Path) -> list[Any]:
    return _found_in(folder) or _made_for(folder)


def _found_in(folder: Path) -> list[Any]:
    return [_read(folder / str(entry)) for entry in SETTINGS["folders"]]


def _made_for(folder: Path) -> list[Any]:
    return _found_in(folder.parent)


def _read(path: Path) -> Any:
    return Parser(path).parsed()


class Parser:
    """Made by whatever is read."""

    def __init__(self, path: Path) -> None:
        self.scale = SETTINGS["scale"]

    def parsed(self) -> float:
        return float(self.scale)


class FromFiles:
    """A dataset as most are: a constructor that finds, unpacks and parses, and tensors."""

    def __init__(self) -> None:
        self.x = torch.zeros(4)
        if len(self.x) > 4:
            _unpacked(Path("here"))

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]

    def __len__(self) -> int:
        return 4


class ParsesEach(FromFiles):
    """Makes another object for each sample, so that what that one's constructor names counts."""

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index] * Parser(Path("there")).parsed()


@pytest.fixture
def other_scale(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setitem(SETTINGS, "scale", 2.0)


def test_what_the_constructor_of_an_object_made_for_a_sample_names_counts(other_scale: Callable[[], None]) -> None:
    watch = watch_of(ParsesEach())
    other_scale()
    assert is_other(watch)


def test_attributes_and_methods_of_the_class_count(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ParsesEach()
    watch = watch_of(dataset)
    monkeypatch.setattr(FromFiles, "__getitem__", lambda self, index: self.x[index] + 1)
    assert is_other(watch)
    watch = watch_of(dataset)
    dataset.__class__ = FromFiles
    assert is_other(watch)


class MadeOfAnIterator(FromFiles):
    def __init__(self) -> None:
        super().__init__()
        self.first = next(ROWS)


ROWS = iter([1])


def test_what_can_not_be_seen_and_only_a_constructor_names_ends_no_worker() -> None:
    dataset = MadeOfAnIterator()
    with ContinuousLoader(DataLoader(dataset, batch_size=2), mode="fork", num_workers=1) as loader:  # type: ignore[arg-type]
        workers = set()
        for _ in range(3):
            list(loader)
            workers |= {process.pid for process in loader._core.worker_processes()}
        assert len(workers) == 1


# Lists of paths, as most datasets of files have them.


@pytest.mark.parametrize(
    "entry", [lambda path: path, lambda path: (path, 3), lambda path: {"file": path, "label": [1]}]
)
@pytest.mark.parametrize("count", [5, 3000])
def test_lists_of_paths_are_looked_into(count: int, entry: Callable[[Path], Any]) -> None:
    dataset = Holder(files=[entry(Path("a") / str(number)) for number in range(count)], root=Path("a"))
    watch = watch_of(dataset)
    assert not watch.unseen_at_all
    assert not watch.changed(thoroughly=True)
    dataset.files[-1] = entry(Path("b"))
    assert is_other(watch)
    watch = watch_of(dataset)
    dataset.root = Path("b")
    assert is_other(watch)


def test_too_many_paths_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MOST_SLOW_BYTES", 20_000)
    assert not watch_of(Holder(files=[Path("a" * 10)] * 100 + [{}] * 300)).unseen_at_all
    assert watch_of(Holder(files=[Path("a" * 10), {}] * 15_000)).unseen_at_all
    assert not watch_of(Holder(files=["a" * 10] * 30_000)).unseen_at_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_long_lists_of_tensors_are_looked_into(dtype: torch.dtype) -> None:
    for change in (
        lambda samples: samples[700][0].__setitem__((1, 1), 1),
        lambda samples: samples.__setitem__(700, (torch.zeros(2, 3).to(dtype), 700)),
    ):
        dataset = Holder(samples=[(torch.zeros(3, 2).to(dtype), number) for number in range(1000)])
        watch = watch_of(dataset)
        assert not watch.unseen_at_all
        assert not watch.changed(thoroughly=True)
        change(dataset.samples)
        assert is_other(watch)


def test_long_lists_of_what_can_t_be_looked_into_may_have_changed() -> None:
    assert watch_of(Holder(samples=[threading.Lock() for _ in range(300)])).unseen_at_all


# A fetch that leaves anything behind is seen to, wherever the dataset keeps it


CALLS = [0]


def _count_globally(data: Any) -> None:
    CALLS[0] += 1


class Data(Dataset[Any]):
    def __init__(self, leave: Callable[[Any], Any]) -> None:
        self.leave = leave
        self.array = np.zeros(64)
        self.large = np.zeros(walk.MOST_SLOW_BYTES // 32)

    def __getitem__(self, index: int) -> int:
        self.leave(self)
        return index


# Of the kinds of changes that a `DatasetWatch` sees, see test_watch.py.
LEAVES: dict[str, Callable[[Any], Any]] = {
    "array": lambda data: data.array.__setitem__(3, data.array[3] + 1),
    "large array": lambda data: data.large.__setitem__(-1, data.large[-1] + 1),
    "attribute": lambda data: setattr(data, "calls", 1),
    "global list": _count_globally,
}


@pytest.mark.parametrize("where", LEAVES)
def test_what_a_fetch_changes(where: str) -> None:
    data = Data(LEAVES[where])
    watch = FetchWatch(data)
    watch.before()
    data[0]
    watch.after()

    assert watch.finding == "fetching a sample changes the dataset"


def test_a_fetch_that_leaves_nothing() -> None:
    data = Data(lambda data: None)
    watch = FetchWatch(data)
    for index in range(5):
        watch.before()
        data[index]
        watch.after()
        data.array += 1  # the loop's own affair

    assert watch.finding == ""


class Masks:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, samples: list[int]) -> Any:
        return torch.tensor(samples), self.random.random(len(samples))


def test_what_a_collate_function_keeps_is_watched_too() -> None:
    loader = DataLoader(list(range(12)), 4, collate_fn=Masks())
    watch = FetchWatch(fetch_of(loader))
    batches = iter(loader)
    watch.around(lambda: next(batches))

    assert watch.finding == "making a batch changes what the collate function keeps"


def test_a_dataset_that_changes_is_seen_behind_an_array_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays after one that was too large were not looked at any more, and such a dataset was moved."""
    monkeypatch.setattr(walk, "MOST_SLOW_BYTES", 4096)
    monkeypatch.setattr(walk, "MOST_SLOW_ENTRIES", 1000)

    class Counts(Data):
        def __init__(self, leave: Callable[[Any], Any]) -> None:
            self.data = np.zeros(8192)
            self.seen = np.zeros(4)
            self.lists = [[0] for _ in range(walk.MOST_SLOW_ENTRIES + 1)]
            self.known = [0] * 300
            self.leave = leave

    for leave in (_write_seen, _write_known):
        data = Counts(leave)
        watch = FetchWatch(data)
        watch.around(partial(data.__getitem__, 0))
        assert watch.finding == "fetching a sample changes the dataset"


def _write_seen(data: Any) -> None:
    data.seen[0] += 1


def _write_known(data: Any) -> None:
    data.known[299] += 1


class Answers(Data):
    """Answers to every name, or to none: what is asked of a dataset must bear it."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.__dict__["answer"] = answer
        super().__init__(lambda data: None)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["answer"](name)

    @property
    def epoch(self) -> int:
        raise RuntimeError("ask later")

    def __len__(self) -> int:
        return 12


def _refuse(name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize("mode", ["auto", "inline", "threads", "fork"])
@pytest.mark.parametrize("answer", [lambda name: None, _refuse, lambda name: name], ids=["none", "refuses", "anything"])
def test_datasets_that_answer_in_their_own_way(mode: Any, answer: Any) -> None:
    data = Answers(answer)
    if answer("x") != "x" if answer is not _refuse else True:
        data.__dict__["__getitems__"] = None  # torch itself asks for that one
        with ContinuousLoader(DataLoader(data, 4), mode=mode, num_workers=1) as loader:
            for _ in range(3):
                assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
