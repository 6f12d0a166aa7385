"""Do something once the script has imported a module.

Importing torch before the script does would fix what the script may set before: OMP_NUM_THREADS, for one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OWN = "accel."


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` when the module has been imported, at once if it has been already.

    If a module of accel's imports it, `then` waits until that one is whole, since it may need what stands there.

    Args:
        name: of a module at the top, such as `torch`.
        then: must not raise.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Marks each specification of the module that it hands out, for the one that is loaded is seldom the first.

    Libraries ask whether a module is installed, with `importlib.util.find_spec`, and throw the answer away.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._is_imported = False
        self._being_imported: set[str] = set()
        """Modules of accel's own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name and not name.startswith(_OWN):
            return None
        spec = self._of_the_next(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._mark(name, spec.loader)
        return spec

    def _of_the_next(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Return what the finders after this one find; those before it have been asked."""
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else []:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None

    def _mark(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):  # marked twice, where a finder hands out one loader again
                del loader.exec_module
            self._import(name, execute, module)

        loader.exec_module = exec_module

    def _import(self, name: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if name != self._name:
            self._being_imported.add(name)
        try:
            execute(module)
            self._is_imported = self._is_imported or name == self._name
        finally:
            self._being_imported.discard(name)
            if self._is_imported and not self._being_imported and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()
