"""A proxy answers every operator and container method as the loader that it stands for."""

from __future__ import annotations

import copy
import operator
import pickle
import random
from collections import UserList, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from accel.dataio.passes.proxy import LoaderProxy, is_proxy
from tests.dataio.engines import Silent


class Plain:
    """Has nothing but an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


class Rich(Plain):
    """Has methods of many kinds."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def __enter__(self) -> Rich:
        self.found.append("entered")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.found.append(kind)
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rich) and self.found == other.found

    def __hash__(self) -> int:
        return 7

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return "rich"

    def __format__(self, spec: str) -> str:
        return f"rich {spec}"

    def __index__(self) -> int:
        return 2

    def __neg__(self) -> int:
        return -2

    def __rsub__(self, other: Any) -> Any:
        return ("from", other)

    def __matmul__(self, other: Any) -> Any:
        return ("at", other)

    def __divmod__(self, other: Any) -> Any:
        return ("divmod", other)

    def __contains__(self, thing: Any) -> bool:
        return bool(thing == 2)


MAKERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [3, 1, 2],
    "tuple": lambda: (3, 1, 2),
    "deque": lambda: deque([3, 1, 2], maxlen=9),
    "dict": lambda: {0: 3, 1: 1},
    "set": lambda: {1, 2, 3},
    "range": lambda: range(3),
    "str": lambda: "312",
    "user list": lambda: UserList([3, 1, 2]),
}
OTHERS: list[Callable[[], Any]] = [
    *MAKERS.values(),
    *(lambda value=value: value for value in (1, -1, 2.5, None, "x", slice(0, 2))),
]
ONE: dict[str, Callable[[Any], Any]] = {
    **{name.__name__: name for name in (len, bool, callable, next, abs, vars, sorted, list)},
    "reversed": lambda it: list(reversed(it)),
    "star": lambda it: (lambda *a: a)(*it),
    "copy": lambda it: (copy.copy(it), copy.deepcopy(it)),
    "shuffle": lambda it: random.Random(0).shuffle(it),
    "pop": lambda it: it.pop(),
}
TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "and_", "or_", "iadd", "imul", "ior")},
    **{name: getattr(operator, name) for name in ("lt", "eq", "ne", "contains", "getitem", "delitem")},
    "set item": lambda it, other: operator.setitem(it, 0, other),
}


def _outcome(ask: Callable[..., Any], *given: Any) -> Any:
    """Return what a question gives, or the kind of error that it raises."""
    try:
        return ask(*given)
    except Exception as error:
        return type(error)


def _proxy_of(thing: Any) -> Any:
    return LoaderProxy(thing, Silent())


def _shown(found: Any) -> Any:
    """Return an answer in words; what differs by object only is left out."""
    if isinstance(found, tuple):
        return tuple(map(_shown, found))
    thing = found._accel_loader if is_proxy(found) else found
    return type(thing), (sorted(thing, key=repr) if isinstance(thing, set) else repr(thing))


@pytest.mark.parametrize("kind", MAKERS)
def test_it_answers_as_what_it_stands_for(kind: str) -> None:
    questions = [(f"{name} of {kind}", ask) for name, ask in ONE.items()]
    for name, ask in TWO.items():
        for other in OTHERS:
            questions.append((f"{name} of {kind} and {other()!r}", lambda it, ask=ask, other=other: ask(it, other())))
    for what, question in questions:
        plain, behind = MAKERS[kind](), MAKERS[kind]()
        assert _shown(_outcome(question, _proxy_of(behind))) == _shown(_outcome(question, plain)), what
        assert _shown(behind) == _shown(plain), what


def test_what_is_extended_in_place_stays_the_same_object() -> None:
    proxy = same = _proxy_of([3, 1, 2])
    proxy += [4]
    assert proxy is same and proxy == [3, 1, 2, 4]


def test_a_class_s_own_methods_are_asked() -> None:
    rich = Rich()
    proxy = _proxy_of(rich)
    with proxy as entered:
        assert is_proxy(entered)  # what is iterated in there is listened to
        raise ValueError("which it swallows")
    assert rich.found == ["entered", ValueError]
    assert proxy(1, a=2) == ((1,), {"a": 2})
    assert (str(proxy), f"{proxy:x}", hash(proxy), bool(proxy), 2 in proxy) == ("rich", "rich x", 7, False, True)
    assert (4 - proxy, proxy @ proxy, divmod(proxy, 3), [0, 1, 9][proxy]) == (
        ("from", 4),
        ("at", rich),
        ("divmod", 3),
        9,
    )
    assert proxy == rich and rich == proxy and proxy != Plain()
    proxy.more = 1
    assert vars(rich)["more"] == 1
    del proxy.more
    assert not hasattr(rich, "more")


@pytest.mark.parametrize("make", [lambda: [3, 1, 2], lambda: {0: 3}, Rich])
def test_a_copy_and_another_process_get_the_plain_loader(make: Callable[[], Any]) -> None:
    plain = make()
    for copied in (
        copy.copy(_proxy_of(plain)),
        copy.deepcopy(_proxy_of(plain)),
        pickle.loads(pickle.dumps(_proxy_of(plain))),
    ):
        assert type(copied) is type(plain)
        assert copied == plain
        assert copied is not plain


def test_iterating_alone_is_listened_to() -> None:
    class Counts(Silent):
        epochs = 0

        def epoch_begins(self) -> None:
            Counts.epochs += 1

    proxy = LoaderProxy([3, 1, 2], Counts())
    assert proxy[0] in proxy and proxy == [3, 1, 2] and list(reversed(proxy)) == [2, 1, 3] and 2 * proxy
    random.shuffle(proxy)
    assert Counts.epochs == 0
    assert sorted(proxy) == [1, 2, 3]
    assert Counts.epochs == 1


def test_an_iterator_that_is_asked_for_its_next_is_listened_to() -> None:
    """`next(loader)` of a generator: no step was ever seen, and the message told to iterate what was iterated."""

    class Counts(Silent):
        heard: ClassVar[list[str]] = []

        def epoch_begins(self) -> None:
            self.heard.append("begins")

        def batch_delivered(self, batch: Any) -> None:
            self.heard.append(str(batch))

        def epoch_ended(self) -> None:
            self.heard.append("ended")

    proxy = LoaderProxy((number for number in range(4)), Counts())
    assert [next(proxy), next(proxy), *proxy] == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        next(proxy)
    assert Counts.heard[:3] == ["begins", "0", "1"]
    assert [each for each in Counts.heard if each.isdigit()] == ["0", "1", "2", "3"]
    assert next(LoaderProxy(iter([7]))) == 7


def test_an_iterator_that_begins_anew_by_itself_does_so() -> None:
    class Endless:
        number = 0

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.number = (self.number + 1) % 4
            if not self.number:
                raise StopIteration
            return self.number

    held = iter(LoaderProxy(Endless(), Silent()))
    assert [list(held), list(held)] == [[1, 2, 3], [1, 2, 3]]


def test_a_loader_that_is_its_own_iterator_begins_anew_when_it_is_asked_to() -> None:
    """As prefetchers on CUDA: `iter(loader)` in each epoch, then `next(loader)`. The second epoch had no batch."""

    class Rearmed:
        def __iter__(self) -> Iterator[int]:
            self.left = 3
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    proxy = LoaderProxy(Rearmed(), Silent())
    for _ in range(2):
        iter(proxy)
        batches = []
        while (batch := next(proxy, None)) is not None:
            batches.append(batch)
        assert batches == [2, 1, 0]
