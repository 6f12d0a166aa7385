"""Every change that the replica can see must reach a copy, or be known to need a new one."""

from __future__ import annotations

import copy
import dataclasses
import marshal
import math
import random
import tempfile
import time
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel.dataio.dataset import content
from accel.dataio.dataset.snapshot import Forecast, apply_leaves, compare, take_snapshot
from accel.dataio.loader import ContinuousLoader

Span = namedtuple("Span", "low high")


class Holder:
    """A dataset with whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__hidden", "strength", "unset")

    def __init__(self) -> None:
        self.strength, self.__hidden = 0.1, 1

    def hide(self, value: int) -> None:
        self.__hidden = value

    def hidden(self) -> int:
        return self.__hidden


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


def changed(dataset: Any, change: Any) -> tuple[Any, Any]:
    """Return what comparing finds after `change`, and the copy of before that was sent the leaves."""
    old, replica = take_snapshot(dataset), copy.deepcopy(dataset)
    change(dataset)
    difference = compare(old, take_snapshot(dataset))
    if difference.sendable:
        apply_leaves(replica, difference.leaves)
    return difference, replica


SENDABLE: dict[str, tuple[Any, Any, Any]] = {
    "attribute": (lambda: Holder(epoch=0), lambda d: setattr(d, "epoch", 1), lambda d: d.epoch),
    "new attribute": (Holder, lambda d: setattr(d, "epoch", 1), lambda d: d.epoch),
    "to none": (lambda: Holder(limit=3), lambda d: setattr(d, "limit", None), lambda d: d.limit),
    "to true": (lambda: Holder(flag=1), lambda d: setattr(d, "flag", True), lambda d: repr(d.flag)),
    "to nan": (lambda: Holder(fill=0.0), lambda d: setattr(d, "fill", math.nan), lambda d: repr(d.fill)),
    "numpy scalar": (lambda: Holder(n=np.int64(1)), lambda d: setattr(d, "n", np.int64(2)), lambda d: d.n),
    "nested": (
        lambda: Holder(transform=Holder(steps=[Holder(p=0.1), {"q": 0.2}])),
        lambda d: (setattr(d.transform.steps[0], "p", 0.5), d.transform.steps[1].update(q=0.6)),
        lambda d: (d.transform.steps[0].p, d.transform.steps[1]["q"]),
    ),
    "list entry": (lambda: Holder(x=[1, 2]), lambda d: d.x.__setitem__(1, 5), lambda d: d.x),
    "deque entry": (lambda: Holder(x=deque([1, 2])), lambda d: d.x.__setitem__(1, 5), lambda d: list(d.x)),
    "dict entry": (lambda: Holder(x={"a": 1, 2: 3}), lambda d: d.x.update({2: 4}), lambda d: d.x),
    "through a tuple": (lambda: Holder(x=(Holder(p=1),)), lambda d: setattr(d.x[0], "p", 2), lambda d: d.x[0].p),
    "slot": (lambda: Holder(x=Slotted()), lambda d: setattr(d.x, "strength", 0.9), lambda d: d.x.strength),
    "private slot": (lambda: Holder(x=Slotted()), lambda d: d.x.hide(9), lambda d: d.x.hidden()),
    "slot set for the first time": (
        lambda: Holder(x=Slotted()),
        lambda d: setattr(d.x, "unset", 4),
        lambda d: d.x.unset,
    ),
    "past __setattr__": (Guarded, lambda d: vars(d).update(level=2), lambda d: d.level),
    "module": (
        lambda: Holder(m=torch.nn.Dropout(0.1)),
        lambda d: (d.m.eval(), setattr(d.m, "p", 0.3)),
        lambda d: (d.m.training, d.m.p),
    ),
}


@pytest.mark.parametrize("case", SENDABLE)
def test_a_change_of_a_leaf_reaches_a_copy(case: str) -> None:
    make, change, seen = SENDABLE[case]
    dataset = make()
    difference, replica = changed(dataset, change)

    assert difference.leaves
    assert difference.sendable
    assert seen(replica) == seen(dataset)


ANEW: dict[str, tuple[Any, Any]] = {
    "deleted attribute": (lambda: Holder(a=1), lambda d: delattr(d, "a")),
    "deleted entry": (lambda: Holder(a={"b": 1}), lambda d: d.a.pop("b")),
    "another key": (lambda: Holder(a={"b": 1}), lambda d: (d.a.pop("b"), d.a.update(c=1))),
    "longer list": (lambda: Holder(a=[1]), lambda d: d.a.append(2)),
    "another list": (lambda: Holder(a=[1]), lambda d: setattr(d, "a", [1])),
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
    old = take_snapshot(dataset)
    change(dataset)
    difference = compare(old, take_snapshot(dataset))

    assert difference
    assert not difference.sendable


QUIET: dict[str, Any] = {
    "nan": lambda: Holder(fill=math.nan, best=float("nan"), when=np.float32("nan")),
    "system generator": lambda: Holder(g=random.SystemRandom()),
    "inference tensor": lambda: _inference(),
    "asks for nothing": Guarded,
    "code": lambda: Holder(f=len, g=lambda: 1, h=random, i=Holder),
    "dead weak reference": lambda: Holder(w=weakref.ref(Slotted0())),
    "list": lambda: [1, 2, 3],
    "range": lambda: range(9),
    "number": lambda: 3,
    "enough of everything": lambda: Holder(**{kind: make() for kind, (make, *_) in SENDABLE.items()}),
}


class Slotted0:
    __slots__ = ("__weakref__",)


def _inference() -> Holder:
    with torch.inference_mode():
        return Holder(t=torch.ones(2))


@pytest.mark.parametrize("case", QUIET)
def test_what_did_not_change_is_no_change(case: str) -> None:
    dataset = QUIET[case]()

    assert not compare(take_snapshot(dataset), take_snapshot(dataset))


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
        old = take_snapshot(dataset)
        dataset.table = None
        dataset.table = make(1)

        assert not compare(old, take_snapshot(dataset)).sendable


def test_states_keep_no_big_array() -> None:
    dataset = Holder(table=np.arange(1000), picture=torch.ones(1000))
    array, tensor = weakref.ref(dataset.table), weakref.ref(dataset.picture)
    state = take_snapshot(dataset)
    dataset.table = dataset.picture = None

    assert array() is None
    assert tensor() is None
    assert state.rest


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
    "attribute of a list": (lambda: Holder(a=Named([1])), lambda d: setattr(d.a, "name", "other")),
}


class Named(list[int]):
    name = "one"


@pytest.mark.parametrize("case", IN_PLACE)
def test_a_change_in_place_needs_a_new_copy_or_reaches_it(case: str) -> None:
    make, change = IN_PLACE[case]
    dataset = make()
    if case == "tensor by way of an array":
        dataset.a.numpy()  # as who writes it so has done
    old = take_snapshot(dataset)
    assert old.whole
    change(dataset)

    assert compare(old, take_snapshot(dataset))


def test_a_file_that_each_process_opens_for_itself_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"abc")
    dataset = Holder(file=None)
    before = take_snapshot(dataset)
    with (tmp_path / "records").open("rb") as dataset.file:
        during = take_snapshot(dataset)
        assert not compare(before, during)
        dataset.file.read(1)
        assert not compare(during, take_snapshot(dataset))
        with (tmp_path / "records").open("rb") as dataset.file:
            assert compare(during, take_snapshot(dataset))
            assert not compare(during, take_snapshot(dataset)).sendable


UNSEEN: dict[str, Any] = {
    "big array": lambda: Holder(a=np.zeros(content.MOST_BYTES // 8 + 1)),
    "long list": lambda: Holder(a=[0] * (content.MOST_ENTRIES + 1)),
    "list of objects": lambda: Holder(a=[Holder() for _ in range(300)]),
    "mapped for writing": lambda: Holder(a=np.memmap(tempfile.TemporaryFile(), shape=(3,), mode="w+")),  # noqa: SIM115
    "iterator": lambda: Holder(a=iter([1, 2])),
    "memory": lambda: Holder(a=memoryview(bytearray(3))),
    "C code": lambda: Holder(a=ElementTree.Element("a")),
    "too deep": lambda: Holder(a=[[[[[[[[[0]]]]]]]]]),
    "too many": lambda: Holder(a=[[list(range(100)) for _ in range(200)] for _ in range(2)]),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("case", UNSEEN)
def test_what_can_not_be_inspected_is_reported(case: str) -> None:
    assert not take_snapshot(UNSEEN[case]()).whole


@pytest.mark.parametrize("case", QUIET)
def test_everyday_things_can_be(case: str) -> None:
    assert take_snapshot(QUIET[case]()).whole


def test_an_object_that_is_reached_twice_is_looked_into_from_the_nearest() -> None:
    shared = Holder(p=1)
    dataset = Holder(far=Holder(a=Holder(b=shared)), near=shared)
    dataset.itself = dataset
    shared.parent = dataset
    old, replica = take_snapshot(dataset), copy.deepcopy(dataset)
    shared.p = 2
    difference = compare(old, take_snapshot(dataset))
    apply_leaves(replica, difference.leaves)

    assert len(difference.leaves) == 1
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
    state = take_snapshot(dataset)

    assert len(state.leaves) + len(state.rest) <= 10_001
    assert time.process_time() - began < 5  # 0.03 s on an idle core


def test_an_epoch_counter_is_expected() -> None:
    dataset = Holder(epoch=0, name="a", inner={"step": 10}, flag=True)
    forecast = Forecast()
    first = take_snapshot(dataset)
    dataset.epoch, dataset.inner["step"], dataset.flag = 1, 7, False
    second = take_snapshot(dataset)
    forecast.saw(first, second)
    expected = forecast.next(second)
    dataset.epoch, dataset.inner["step"] = 2, 4

    assert not compare(expected, take_snapshot(dataset))


def test_a_tuple_that_counts_is_not_expected() -> None:
    """Its new values could not be set in a copy."""
    dataset = Holder(span=(0, 5))
    forecast = Forecast()
    first = take_snapshot(dataset)
    dataset.span = (1, 6)
    second = take_snapshot(dataset)
    forecast.saw(first, second)

    assert not compare(second, forecast.next(second))


def test_frozen_and_slotted_dataclasses() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        strength: float

    dataset = Holder(options=Frozen(0.1))
    old = take_snapshot(dataset)
    object.__setattr__(dataset.options, "strength", 0.2)
    difference = compare(old, take_snapshot(dataset))
    replica = Holder(options=Frozen(0.1))
    apply_leaves(replica, difference.leaves)

    assert replica.options.strength == 0.2


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


def test_what_a_constructor_names_may_be_as_deep_as_it_likes(other_scale: Callable[[], None]) -> None:
    dataset = FromFiles()
    old = take_snapshot(dataset)
    assert old.whole
    other_scale()
    assert not compare(old, take_snapshot(dataset))


def test_what_the_constructor_of_an_object_made_for_a_sample_names_counts(other_scale: Callable[[], None]) -> None:
    dataset = ParsesEach()
    old = take_snapshot(dataset)
    other_scale()
    assert not compare(old, take_snapshot(dataset)).sendable


def test_attributes_and_methods_of_the_class_count(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ParsesEach()
    old = take_snapshot(dataset)
    monkeypatch.setattr(FromFiles, "__getitem__", lambda self, index: self.x[index] + 1)
    assert compare(old, take_snapshot(dataset)).sendable is False
    dataset.__class__ = FromFiles
    assert compare(old, take_snapshot(dataset)).sendable is False


def test_workers_of_such_a_dataset_go_on_across_epochs() -> None:
    loader = ContinuousLoader(DataLoader(FromFiles(), batch_size=2), mode="fork", workers=1)  # type: ignore[arg-type]
    try:
        workers = set()
        for _ in range(3):
            list(loader)
            workers |= {process.pid for process in loader._core.worker_processes()}
        assert len(workers) == 1
    finally:
        loader.close()


# Lists of paths, as most datasets of files have them.


@pytest.mark.parametrize(
    "entry", [lambda path: path, lambda path: (path, 3), lambda path: {"file": path, "label": [1]}]
)
@pytest.mark.parametrize("count", [5, 3000])
def test_lists_of_paths_are_looked_into(count: int, entry: Callable[[Path], Any]) -> None:
    dataset = Holder(files=[entry(Path("a") / str(number)) for number in range(count)], root=Path("a"))
    old = take_snapshot(dataset)
    assert old.whole
    assert not compare(old, take_snapshot(dataset))
    dataset.files[-1] = entry(Path("b"))
    assert compare(old, take_snapshot(dataset))
    dataset.files[-1] = entry(Path("a") / str(count - 1))
    dataset.root = Path("b")
    difference = compare(old, take_snapshot(dataset))
    assert difference.leaves == {(("attribute", "root"),): Path("b")}


def test_a_path_is_no_text() -> None:
    old = take_snapshot(Holder(files=[Path(str(number)) for number in range(300)]))
    assert compare(old, take_snapshot(Holder(files=[str(number) for number in range(300)]))).sendable is False


def test_too_many_paths_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_ENTRIES", 3000)
    assert take_snapshot(Holder(files=[Path("a")] * 300)).whole
    assert not take_snapshot(Holder(files=[Path("a")] * 400)).whole
    assert take_snapshot(Holder(files=["a"] * 400)).whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_long_lists_of_tensors_are_looked_into(dtype: torch.dtype) -> None:
    dataset = Holder(samples=[(torch.zeros(3, 2).to(dtype), number) for number in range(1000)])
    old = take_snapshot(dataset)
    assert old.whole
    assert not compare(old, take_snapshot(dataset))
    dataset.samples[700][0][1, 1] = 1
    assert compare(old, take_snapshot(dataset)).sendable is False
    dataset.samples[700] = (torch.zeros(2, 3).to(dtype), 700)
    assert compare(old, take_snapshot(dataset)).sendable is False
    dataset.samples[700] = (torch.zeros(3, 2).to(dtype), 700)
    assert not compare(old, take_snapshot(dataset))


def test_long_lists_of_what_can_t_be_looked_into_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not take_snapshot(Holder(samples=[object() for _ in range(300)])).whole
    assert not take_snapshot(Holder(samples=[torch.eye(2).to_sparse() for _ in range(300)])).whole
    monkeypatch.setattr(content, "MOST_BYTES", 1000)
    assert not take_snapshot(Holder(samples=[torch.zeros(3) for _ in range(300)])).whole


def test_what_is_copied_to_be_looked_at_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a list of pictures as bytes all were copied, gigabytes, at each look."""
    sizes = []

    def dumps(value: Any, version: int) -> bytes:
        data = marshal.dumps(value, version)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(content, "marshal", SimpleNamespace(dumps=dumps))
    monkeypatch.setattr(content, "MOST_BYTES", 1 << 20)
    assert not take_snapshot(Holder(a=[bytes(50_000)] * 2000)).whole
    assert sum(sizes) <= 4 << 20
    assert take_snapshot(Holder(a=[bytes(5_000)] * 300)).whole
