"""The project's own source files, and what they import: for the tests of its structure and for its sizes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("comm", "dataio", "kernels", "profiler")
LIBRARY = ("accel", *LINKED)

_NOT_OURS = {"__pycache__", "build", "dist", "runs"}


def own_files(folder: Path = ROOT) -> Iterator[Path]:
    """Yield every file of the project once: links, hidden folders (but `.ci`) and build outputs are left out."""
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() or entry.name in _NOT_OURS or entry.name.endswith(".egg-info"):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and (entry.name == ".ci" or not entry.name.startswith(".")):
            yield from own_files(entry)


def own_modules(folder: str) -> list[Path]:
    """Return the Python files under a top-level folder."""
    return [path for path in own_files(ROOT / folder) if path.suffix == ".py"]


def text(path: Path) -> str:
    """Return what a file holds."""
    return path.read_text(encoding="utf-8")


def import_name(path: Path) -> str:
    """Return the name under which the file is imported: kernels/adam.py is accel.kernels.adam."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("accel", *parts) if parts[0] in LINKED else parts)


@cache
def library() -> dict[str, Path]:
    """Return the modules of the library by the names under which they are imported."""
    paths = [path for folder in LIBRARY for path in own_modules(folder)]
    return {import_name(path).removesuffix(".__init__"): path for path in paths}


def statements(body: Sequence[ast.stmt], at_import: bool = False) -> Iterator[ast.stmt]:
    """Yield statements and those within them; `at_import` leaves out what functions and type checkers run."""
    for statement in body:
        yield statement
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if not (at_import and (is_function or for_types)):
            yield from statements(getattr(statement, "body", ()), at_import)
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from statements(part.body, at_import)
        for field in ("orelse", "finalbody"):
            yield from statements(getattr(statement, field, ()), at_import)


def _nodes(source: str, at_import: bool) -> Iterator[ast.AST]:
    """Yield the statements of a file and, where it imports by calls, their expressions, which take far longer."""
    by_call = "import_module" in source or "__import__" in source
    for statement in statements(ast.parse(source).body, at_import):
        yield statement
        if by_call:
            for part in ast.iter_child_nodes(statement):
                if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
                    yield from ast.walk(part)


def imported(source: str, module: str, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything that `source`, imported as `module`, imports.

    `from a import b` yields a.b, where b may be a module; `import_module("a.b")` counts as well.
    """
    for node in _nodes(source, at_import):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def imported_modules(source: str, module: str, *, at_import: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module of the library, name in it or '') of everything that `source` imports from the library."""
    for line, name in imported(source, module, at_import=at_import):
        parent, _, last = name.rpartition(".")
        if name in library():
            yield line, name, ""
        elif parent in library():
            yield line, parent, last
