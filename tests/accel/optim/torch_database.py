"""torch's database of optimizers, without the rest of its test suite.

The modules that it imports need a package for tests, and forbid for the whole process to set backends' flags. Of them
it takes decorators of tests only, which nothing here runs: they are stood in for while the file is read.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest import mock

_FOLDER = "torch.testing._internal"


class _Anything:
    """Stands for a decorator, or for its arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __call__(self, *arguments: Any, **options: Any) -> _Anything:
        return self


class _StandIn(ModuleType):
    """A module that has whatever is imported from it: which decorators there are depends on the version."""

    def __getattr__(self, name: str) -> type[_Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


def _stand_ins() -> dict[str, ModuleType]:
    names = ("common_device_type", "common_methods_invocations", "common_utils")
    return {f"{_FOLDER}.{name}": _StandIn(f"{_FOLDER}.{name}") for name in names}


def load() -> Any:
    """Return `torch.testing._internal.common_optimizers`, read from its file."""
    package = importlib.util.find_spec("torch")
    assert package is not None and package.submodule_search_locations
    path = f"{package.submodule_search_locations[0]}/testing/_internal/common_optimizers.py"
    spec = importlib.util.spec_from_file_location("torch_optimizer_database", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, _stand_ins()):
        spec.loader.exec_module(module)
    return module


database = load()
