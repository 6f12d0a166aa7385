"""Every error that accel raises on purpose is an AccelError, so that one `except` is enough."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle

import pytest

from accel.errors import AccelError, InvalidArgument, InvalidState, InvalidType
from benchmarks.source_tree import library, text

# Of the system, or what Python asks of an object: whoever reads a file, or indexes, expects them by these names.
ALLOWED = {
    *("AttributeError", "EOFError", "FileNotFoundError", "ImportError", "IndexError", "KeyboardInterrupt"),
    *("NotImplementedError", "OSError", "StopIteration", "SystemExit", "TimeoutError"),
}
BUILTIN = {name for name in vars(builtins) if name.endswith(("Error", "Exception", "Exit", "Interrupt", "Iteration"))}


def foreign(source: str) -> list[str]:
    """Return the errors that a file defines or raises beside accel's, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in BUILTIN - ALLOWED:
            found.append(f"{node.lineno}: raises {node.exc.id}")
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in BUILTIN - ALLOWED:
            found.append(f"{node.lineno}: makes {ast.unparse(node.func)}")
        elif isinstance(node, ast.ClassDef) and node.bases:
            bases = [ast.unparse(base) for base in node.bases]
            if set(bases) <= BUILTIN - {"BaseException"}:
                found.append(f"{node.lineno}: {node.name} is no AccelError")
    return found


def test_the_library_raises_its_own_errors() -> None:
    places = [f"{module}:{place}" for module, path in library().items() for place in foreign(text(path))]
    assert places == ["accel.profiler.errors:6: AccelError is no AccelError"]


def test_what_is_foreign_is_seen() -> None:
    lines = ["class Lost(RuntimeError): ...", "def f():", "    raise ValueError('x')", "    raise Lost"]
    source = "\n".join([*lines, "    raise OSError", "    raise TypeError"])
    assert sorted(foreign(source)) == ["1: Lost is no AccelError", "3: makes ValueError", "6: raises TypeError"]


@pytest.mark.parametrize("module", ["accel.comm.ranks.failure", "accel.comm.bandwidth.table", "accel.graphs.obstacles"])
def test_errors_of_other_folders_are_caught_as_accel_s(module: str) -> None:
    kinds = [each for each in vars(importlib.import_module(module)).values() if isinstance(each, type)]
    own = [each for each in kinds if issubclass(each, Exception) and each.__module__ == module]
    assert own and all(issubclass(each, AccelError) for each in own)


@pytest.mark.parametrize(
    ("kind", "builtin"), [(InvalidArgument, ValueError), (InvalidType, TypeError), (InvalidState, RuntimeError)]
)
def test_they_are_errors_of_python_too_and_come_out_of_worker_processes(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    error = pickle.loads(pickle.dumps(kind("size must be above 0. Found: 0")))
    assert isinstance(error, AccelError) and isinstance(error, builtin)
    assert str(error) == "size must be above 0. Found: 0"
