"""Walk through everything that fetching a batch can reach: what the dataset holds, and what its code names.

| from | to |
|---|---|
| an object | its attributes and slots, and what its class has for it: all but how one is made |
| a class of the user's that code names | its attributes and methods, and its base classes |
| a function of the user's | closure, defaults, and the globals that its code names; of the user's own modules too |
| a container | its entries, of a long one the first 64 |
| `functools`: partial, lru_cache | the function, its arguments, what is cached |

The code of libraries is not followed, unless the dataset's or the collate function's own class is of that library.
"""

from __future__ import annotations

import dis
import functools
import gc
import logging
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterator
from importlib.util import resolve_name
from itertools import islice
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

# Enough for a dataset, its transforms and what they hold; it takes about 10 ms.
MOST = 10_000
_LOOKED = 64
_Named = tuple[str, Any]


def reachable(*roots: _Named) -> Iterator[_Named]:
    """Yield what can be reached from `roots`, with a name for each, nearest first; at most `MOST` things.

    Args:
        roots: names and things to begin with.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> [name for name, thing in reachable(("the dataset", {"a": [1.5]})) if isinstance(thing, float)]
        ["the dataset['a'][0]"]
    """
    followed = packages(*(thing for _, thing in roots))
    seen: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(seen) < MOST:
        name, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that no other thing gets its id meanwhile
        if not isinstance(thing, ClassOf):
            yield name, thing
        waiting.extend(_parts(name, thing, followed))


class ClassOf:
    """The class of an object that is there already: nobody makes another one when a batch is fetched.

    What a constructor names (where files lie, how they are unpacked) is of no account then. There is one of each class.
    """

    __slots__ = ("__weakref__", "_kind")
    _all: ClassVar[weakref.WeakKeyDictionary[type, ClassOf]] = weakref.WeakKeyDictionary()

    def __init__(self, kind: type) -> None:
        self._kind = weakref.ref(kind)

    @classmethod
    def object(cls, thing: Any) -> ClassOf:
        """Return that of an object."""
        return cls.of(type(thing))

    @classmethod
    def of(cls, kind: type) -> ClassOf:
        """Return that of a class."""
        own = cls._all.get(kind)
        if own is None:
            own = cls._all[kind] = cls(kind)
        return own

    def bases(self, followed: set[str]) -> list[type]:
        """Return it and its base classes, as far as they are looked into."""
        kind = self._kind()
        return [] if kind is None else [base for base in kind.__mro__ if is_followed(base.__module__, followed)]

    def parts(self, followed: set[str]) -> Iterator[_Named]:
        """Yield attributes and methods, those of the base classes too, and how an object is made."""
        for base in self.bases(followed):
            yield from _own_parts(base)


MAKING = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__class_getitem__"})


def _own_parts(kind: type) -> list[_Named]:
    own = [(key, value) for key, value in vars(kind).items() if is_code(value) or not key.startswith("__")]
    return [(f"{kind.__qualname__}.{key}", value) for key, value in own]


def _parts(name: str, thing: Any, followed: set[str]) -> Iterator[_Named]:
    if isinstance(thing, str | bytes | int | float | complex | Tensor | types.ModuleType | logging.Logger):
        return
    if isinstance(thing, dict):
        yield from ((f"{name}[{key!r:.40}]", value) for key, value in islice(list(thing.items()), _LOOKED))
    elif isinstance(thing, list | tuple | deque):
        yield from ((f"{name}[{place}]", value) for place, value in enumerate(islice(list(thing), _LOOKED)))
    elif isinstance(thing, np.ndarray):
        if thing.dtype.hasobject:
            yield from ((f"{name}[{place}]", value) for place, value in enumerate(thing.ravel()[:_LOOKED]))
    elif isinstance(thing, functools._lru_cache_wrapper):
        # Only the collector sees what is cached.
        yield from ((f"what {name} has cached", value) for value in gc.get_referents(thing))
    elif is_code(thing):
        yield from code_parts(name, thing, followed)
    elif isinstance(thing, ClassOf):
        yield from (part for part in thing.parts(followed) if part[0].rpartition(".")[2] not in MAKING)
    else:
        yield from ((f"{name}.{key}", value) for key, value in attributes(thing))
        yield type(thing).__qualname__, ClassOf.object(thing)


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
    """Yield what a piece of code refers to.

    Args:
        name: of the code.
        thing: the code, see `is_code`.
        followed: packages whose code is looked into, beside the user's.
    """
    if isinstance(thing, types.FunctionType):
        if is_followed(thing.__module__, followed):
            yield from _of_function(thing)
    elif isinstance(thing, types.MethodType):
        yield from ((f"{name}.__self__", thing.__self__), (name, thing.__func__))
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

    Classes of this package name in `accel_hides` what is their own affair and says nothing of the samples.
    """
    hidden = getattr(type(thing), "accel_hides", ())
    yield from [each for each in (own_attributes(thing) or {}).items() if each[0] not in hidden]
    for slot in slots_of(type(thing)):
        try:
            yield slot.__name__, slot.__get__(thing)
        except AttributeError:  # not set
            continue


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """Return the slots that a class and its bases declare."""
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
