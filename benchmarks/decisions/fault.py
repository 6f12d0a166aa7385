"""A fault in a decision: where it is put, and what stands there then."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Change = Callable[[Any], Any]
"""Makes what stands in the place from what stood there."""


@dataclass(frozen=True)
class Fault:
    """One wrong decision.

    Args:
        name: in one word with underscores.
        decision: whose it is.
        what: it does wrong, in words.
        place: "module:attribute", or "module:Class.attribute".
        change: makes the wrong one from the right one.
        tests: files or folders of the default run, one of whose tests is to fail, the likeliest first.
    """

    name: str
    decision: str
    what: str
    place: str
    change: Change
    tests: tuple[str, ...]

    def missing_tests(self) -> list[str]:
        """Return those of the files that don't exist."""
        return [path for path in self.tests if not (ROOT / path).exists()]

    def put_in(self) -> None:
        """Put the fault in, for the rest of this process: also where the right one has been imported by its name."""
        owner, name = self._place()
        right = inspect.getattr_static(owner, name)
        wrong = self.change(right)
        setattr(owner, name, wrong)
        # A private constant is its own module's; another one of that name may be the same small number.
        if inspect.ismodule(owner) and not (name.startswith("_") and not callable(right)):
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is right:
                    setattr(module, name, wrong)

    def right(self) -> Any:
        """Return what stands in the place.

        Raises:
            AttributeError: if there is nothing of that name any more.
            ImportError: if there is no such module.
        """
        owner, name = self._place()
        return inspect.getattr_static(owner, name)

    def _place(self) -> tuple[Any, str]:
        module, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name


def faults(decision: str, module: str, tests: tuple[str, ...], **rows: tuple[str, str, Change]) -> Iterator[Fault]:
    """Yield the faults of one decision in one module, which the same tests are to catch.

    Args:
        decision: whose they are.
        module: in which they are put.
        tests: as in `Fault`.
        rows: name → what it does wrong, the attribute in the module, and the change of it.
    """
    for name, (what, attribute, change) in rows.items():
        yield Fault(name, decision, what, f"{module}:{attribute}", change, tests)


def returns(value: Any) -> Change:
    """Return the change to a function that always returns `value`."""
    return lambda right: lambda *args, **kwargs: value


def is_now(value: Any) -> Change:
    """Return the change of a constant to `value`."""
    return lambda right: value


def ends_with(value: Any) -> Change:
    """Return the change to a generator that asks for nothing and returns `value`."""

    def change(right: Any) -> Any:
        def ended(*args: Any, **kwargs: Any) -> Any:
            yield from ()
            return value

        return ended

    return change


def result_becomes(alter: Callable[[Any], Any]) -> Change:
    """Return the change to a function whose result is altered."""
    return lambda right: lambda *args, **kwargs: alter(right(*args, **kwargs))


def generator_becomes(alter: Callable[[Any], Any]) -> Change:
    """Return the change to a generator whose result is altered."""

    def change(right: Any) -> Any:
        def altered(*args: Any, **kwargs: Any) -> Any:
            return alter((yield from right(*args, **kwargs)))

        return altered

    return change


def property_becomes(alter: Callable[[Any, Any], Any]) -> Change:
    """Return the change to a property that is `alter(self, right value)`."""
    return lambda right: property(lambda self: alter(self, right.fget(self)))
