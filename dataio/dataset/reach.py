"""Walk through everything that fetching a batch can reach: what the dataset holds, and what its code names.

| from | to |
|---|---|
| an object | its attributes and slots, and those of its class, but for constructors |
| a class of the user's that code names | its attributes and methods, and its base classes |
| a function of the user's | closure, defaults, and the globals that its code names; of the user's own modules too |
| a container | its entries, of a long one the first 256 |
| `functools`: partial, lru_cache | the function, its arguments, what is cached |

The code of libraries is not followed, unless the dataset's or the collate function's own class is
of that library.
"""

from __future__ import annotations

import dis
import functools
import gc
import logging
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from itertools import chain, islice
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from accel.profiler.interruptions import ours

# Enough for a dataset, its transforms and what they hold; it takes about 10 ms.
MOST = 10_000
LOOKED = 256
"""Entries of a container that are looked into."""
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_FLAT = frozenset({int, float, bool, str, bytes, complex, type(None)})
_Named = tuple[str, Any]


def reachable(*roots: _Named, cached: bool = True) -> Iterator[_Named]:
    """Yield what can be reached from `roots`, with a name for each, nearest first; at most `MOST` things.

    What raises when it is looked into is followed by an iterator, of which nobody knows what it
    yields.

    Args:
        roots: names and things to begin with.
        cached: also what an `lru_cache` keeps.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> [name for name, thing in reachable(("the dataset", {"a": [[], 1.5]})) if isinstance(thing, float)]
        ["the dataset['a'][1]"]
    """
    followed = packages(*(thing for _, thing in roots))
    seen: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(seen) < MOST:
        name, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that no other thing gets its id meanwhile
        yield name, thing
        try:
            is_cache = isinstance(thing, functools._lru_cache_wrapper)
            waiting.extend(_cached(name, thing) if cached and is_cache else _parts(name, thing, followed))
        except ours():  # a class of the user's may raise whatever it likes
            yield name, iter(())


# What a constructor names (where files lie, how they are unpacked) is of no account for an object that is there.
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__class_getitem__"})


def bases(kind: type, followed: set[str]) -> list[type]:
    """Return a class and its base classes, as far as they are looked into."""
    return [base for base in kind.__mro__ if is_followed(base.__module__, followed)]


def _own_parts(kind: type) -> list[_Named]:
    own = [(key, value) for key, value in vars(kind).items() if is_code(value) or not key.startswith("__")]
    return [(f"{kind.__qualname__}.{key}", value) for key, value in own]


def _parts(name: str, thing: Any, followed: set[str]) -> Iterator[_Named]:
    if isinstance(thing, str | bytes | int | float | complex | Tensor | types.ModuleType | logging.Logger):
        return
    if isinstance(thing, np.ndarray):
        if thing.dtype.hasobject:
            yield from _entries(name, thing.ravel()[:LOOKED])
    elif is_code(thing):
        yield from code_parts(name, thing, followed)
    else:
        if isinstance(thing, CONTAINERS):
            yield from _entries(name, thing)
        if type(thing) not in CONTAINERS:
            yield from ((f"{name}.{key}", value) for key, value in attributes(thing))
            for base in bases(type(thing), followed):
                yield from (part for part in _own_parts(base) if part[0].rpartition(".")[2] not in _MAKING)


def _cached(name: str, thing: Any) -> list[_Named]:
    return [(f"what {name} has cached", value) for value in gc.get_referents(thing)]  # only the collector sees it


def _entries(name: str, thing: Any) -> Iterator[_Named]:
    if is_flat(thing):
        return
    if isinstance(thing, dict):
        yield from ((f"a key of {name}", key) for key in islice(list(thing), LOOKED) if type(key) not in _FLAT)
    entries = list(thing.items()) if isinstance(thing, dict) else enumerate(list(thing))
    yield from ((f"{name}[{key!r:.40}]", value) for key, value in islice(entries, LOOKED))


def is_flat(entries: Iterable[Any]) -> bool:
    """Return whether entries are numbers, texts and tuples of these."""
    if isinstance(entries, dict):
        return is_flat(entries.keys()) and is_flat(entries.values())
    kinds = set(map(type, entries))
    if tuple in kinds and kinds - _FLAT == {tuple}:
        kinds = set(map(type, chain.from_iterable(entry for entry in entries if type(entry) is tuple)))
    return kinds <= _FLAT


def is_scalar(thing: Any) -> bool:
    """Return whether a thing is a number, a text or a path that has no attributes of its own."""
    return type(thing) in _FLAT or (
        isinstance(thing, np.number | np.bool_ | PurePath) and type(thing).__dictoffset__ == 0
    )


_CODE = (types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial, type)


# Functions that Cython and numba compiled; the first by the module of their type, which has a version in its name.
_COMPILED = ("_cython", "numba", "_dispatcher")


def is_code(thing: Any) -> bool:
    """Return whether `thing` is a function, a class, or what makes one of another."""
    return isinstance(thing, _CODE) or type(thing).__module__.startswith(_COMPILED)


def packages(*roots: Any) -> set[str]:
    """Return the packages that the classes of `roots` are of, or where they are functions they themselves."""
    inner = [_inner(thing) for thing in roots]
    of_classes = {_package(type(thing).__module__) for thing in inner}
    return of_classes | {_package(getattr(thing, "__module__", None) or "") for thing in inner}


def _inner(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def code_parts(name: str, thing: Any, followed: set[str]) -> Iterator[_Named]:
    """Yield what a piece of code refers to; looked into is the user's code, and that of the packages `followed`."""
    if isinstance(thing, types.FunctionType):
        if is_followed(thing.__module__, followed):
            yield from _of_function(thing)
    elif isinstance(thing, types.MethodType):
        named, own = names_of_method(thing), own_attributes(thing.__self__) or {}
        yield name, thing.__func__
        yield from ((f"{name}.{each}", getattr(type(thing.__self__), each)) for each in sorted(named.code))
        yield from ((f"{name}.{each}", own[each]) for each in sorted(named.all & own.keys()))
    elif isinstance(thing, staticmethod | classmethod):
        yield name, thing.__func__
    elif isinstance(thing, property):
        yield from ((name, part) for part in (thing.fget, thing.fset) if part is not None)
    elif isinstance(thing, functools.partial):
        yield from ((name, part) for part in (thing.func, *thing.args, *thing.keywords.values()))
    elif isinstance(thing, type) and is_followed(thing.__module__, followed):
        yield from _own_parts(thing)
        yield from ((base.__qualname__, base) for base in thing.__bases__)


def own_attributes(thing: Any) -> dict[str, Any] | None:
    """Return an object's `__dict__` without asking the object: its `__getattr__` may do anything."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def attributes(thing: Any) -> Iterator[_Named]:
    """Yield an object's attributes and slots without asking the object.

    Classes of this package name in `accel_hides` what is their own affair and says nothing of the
    samples.
    """
    hidden = getattr(type(thing), "accel_hides", ())
    yield from [each for each in (own_attributes(thing) or {}).items() if each[0] not in hidden]
    for slot in slots_of(type(thing)):
        try:
            yield slot.__name__, slot.__get__(thing)
        except AttributeError:  # not set
            continue


def slots_of(kind: type) -> list[MemberDescriptorType]:
    declaring = (vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base))
    return [slot for members in declaring for slot in members if isinstance(slot, MemberDescriptorType)]


def _of_function(function: types.FunctionType) -> Iterator[_Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name} of {function.__qualname__}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"a default of {function.__qualname__}", value) for value in defaults)
    yield from ((f"{function.__qualname__}.{name}", value) for name, value in vars(function).items())
    for name in names_of(function.__code__).globals & function.__globals__.keys():
        if not isinstance(value := function.__globals__[name], types.ModuleType):
            yield f"the global {name}", value
    for module, parts in named_modules(function):
        yield from ((f"{module.__name__}.{part}", vars(module)[part]) for part in parts if part in vars(module))


def named_modules(function: types.FunctionType) -> list[tuple[types.ModuleType, list[str]]]:
    """Return the user's own modules that a function names or imports, with what it may name of each."""
    names = names_of(function.__code__)
    named = [function.__globals__.get(name) for name in names.globals]
    for imported in names.imported:
        try:
            module = resolve_name(imported, function.__globals__.get("__package__") or "")
        except ImportError:  # a relative one, outside of a package
            continue
        named += [sys.modules.get(each) for each in (module, *(f"{module}.{part}" for part in names.all))]
    modules = {each.__name__: each for each in named if isinstance(each, types.ModuleType)}
    return [(each, sorted(names.all)) for name, each in modules.items() if not is_library(name)]


class Names(NamedTuple):
    """What a function's code names, with functions within it."""

    globals: frozenset[str]
    all: frozenset[str]
    """Attributes and methods too."""
    imported: frozenset[str]
    """Modules that it imports when it runs, relative ones with their dots."""

    @property
    def by_text(self) -> bool:
        """Whether it looks things up by texts that may be made when it runs."""
        return not (_LOOKS_UP.isdisjoint(self.globals) and _LOOKS_UP.isdisjoint(self.all))

    @property
    def attributes_by_text(self) -> bool:
        """Whether it may ask an object for an attribute by such a text."""
        return not ASKS_BY_TEXT.isdisjoint(self.all)


class MethodNames(NamedTuple):
    """What a method's code names of its object, with other methods and properties that it uses.

    Of what else an object keeps, a trainer say, much changes in each step.
    """

    code: set[str]
    """Methods and properties of its class."""
    all: set[str]


def names_of_method(method: types.MethodType) -> MethodNames:
    code, named, waiting = set[str](), set[str](), list[Any]([method.__func__])
    while waiting:
        function = waiting.pop()
        text = getattr(getattr(function, "fget", function), "__code__", None)
        for new in (names_of(text).all if isinstance(text, types.CodeType) else frozenset[str]()) - named:
            named.add(new)
            if is_code(of_class := getattr(type(method.__self__), new, None)):
                code.add(new)
                waiting.append(of_class)
    return MethodNames(code, named)


_LOOKS_UP = frozenset(
    {
        *("__import__", "eval", "exec", "import_module", "modules", "globals", "__globals__", "f_globals"),
        *("_getframe", "currentframe", "builtins", "__builtins__"),
    }
)
ASKS_BY_TEXT = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "getattr_static"})


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    """Return what code names; texts in it too where it asks for something by a text."""
    inner = [names_of(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    steps = list(dis.get_instructions(code))
    asked = {(each.opname, each.argval) for each in steps}
    loaded = {name for kind, name in asked if kind in ("LOAD_GLOBAL", "LOAD_NAME")}
    levels = [(steps[at - 2].argval, each.argval) for at, each in enumerate(steps) if each.opname == "IMPORT_NAME"]
    imported = {"." * level + name if isinstance(level, int) else name for level, name in levels}
    texts = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    return Names(
        frozenset(loaded | (texts if "globals" in loaded else set())).union(*(each.globals for each in inner)),
        frozenset({*code.co_names, *(texts if "getattr" in loaded else ())}).union(*(each.all for each in inner)),
        frozenset(imported).union(*(each.imported for each in inner)),
    )


def _package(module: str) -> str:
    return module.partition(".")[0]


def is_followed(module: str | None, followed: set[str]) -> bool:
    """Return whether the code of a module is looked into: the user's own, and that of `followed` packages."""
    package = _package(module or "builtins")
    return not is_library(package) or (package in followed and package not in _NEVER)


# Their datasets and collate functions hold what they use.
_NEVER = frozenset({"accel", "builtins", "functools", "torch", "torchvision"})


def is_library(module: str) -> bool:
    """Return whether a module comes with Python or was installed."""
    return _library(_package(module))


@functools.cache
def _library(package: str) -> bool:
    if package in _NEVER or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return False
    # An environment with `--system-site-packages` imports from directories that sysconfig doesn't name.
    if not {"site-packages", "dist-packages"}.isdisjoint(PurePath(file).parts):
        return True
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(file.startswith(path) for path in paths if path)


class _PlainObject:
    pass


def native(kind: type) -> bool:
    """Return whether instances of a class have room for more than Python objects."""
    return (kind.__basicsize__ > _PlainObject.__basicsize__ and not _only_slots(kind)) or kind.__itemsize__ != 0


def _only_slots(kind: type) -> bool:
    """Return whether it is `__slots__` alone that make the instances of a class larger."""
    return all(base is object or "__slots__" in vars(base) or _is_python(base) for base in kind.__mro__)


def _is_python(kind: type) -> bool:
    base = kind.__base__
    return base is None or kind.__basicsize__ - base.__basicsize__ <= _PlainObject.__basicsize__ - object.__basicsize__


def native_base(kind: type) -> type:
    """Return the class that brings the native part."""
    return next((base for base in reversed(kind.__mro__[:-1]) if native(base)), kind)
