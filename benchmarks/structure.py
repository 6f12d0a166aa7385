"""Print the sizes of the library, and measure what `tests/test_limits.py` limits.

python -m benchmarks.structure
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import click

from benchmarks.source_tree import LIBRARY, ROOT, imported_modules, library, own_modules, statements, text

LIMITS = {"methods": 15, "imports": 12, "members of Strategy": 12, "patches": 1, "import depth": 16}
"""The most methods of a class, modules of ours imported by a module, members of `Strategy`, modules that patch the
same class or module of torch, and modules of ours of which each imports the next."""

_HOOKS = re.compile(r"\.register_(optimizer_step|module)_\w+$")
"""Hooks that torch calls for every optimizer or module of the process."""

Measures = dict[str, dict[str, int]]
"""Limit → class, module or what is patched → its number."""


@cache
def measures() -> Measures:
    """Return everything that is limited, whether it is over its limit or not."""
    return {
        "methods": methods(),
        "imports": imports(),
        "members of Strategy": {"Strategy": len(members(_classes()["Strategy"][0]))},
        "patches": {owner: len(modules) for owner, modules in patches().items()},
        "import depth": {"library": depth(graph(at_import=True))},
    }


def over(measured: Measures) -> Measures:
    """Return what is over its limit."""
    return {
        limit: {name: number for name, number in sorted(measured[limit].items()) if number > most}
        for limit, most in LIMITS.items()
    }


def breaches(measured: Measures) -> list[str]:
    """Return a sentence for each number over its limit."""
    return [
        f"{name}: {number} {limit}, at most {LIMITS[limit]}"
        for limit, numbers in over(measured).items()
        for name, number in numbers.items()
    ]


# Classes


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    """Return the library's classes by name; private ones may share theirs."""
    named = defaultdict(list)
    for path in library().values():
        for node in statements(ast.parse(text(path)).body):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(node)
    return named


def methods() -> dict[str, int]:
    """Return the number of methods of each class, with those of a base that no other class has."""
    bases = {name: {_last(base) for node in nodes for base in node.bases} for name, nodes in _classes().items()}
    subclasses = Counter(base for names in bases.values() for base in names)

    def own(name: str) -> set[str]:
        nodes = max((_functions(node) for node in _classes()[name]), key=len)
        chapters = (base for base in bases[name] - {name} if base in bases and subclasses[base] == 1)
        return nodes.union(*(own(base) for base in chapters))

    return {name: len(own(name)) for name in bases}


def members(node: ast.ClassDef) -> set[str]:
    """Return the methods and attributes that a class declares, but for private ones."""
    names = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return {name for name in names | _functions(node) if not name.startswith("_")}


def _functions(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def _last(node: ast.expr) -> str:
    """Return the last name of an expression: `Base` for `module.Base[int]`."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# Imports


@cache
def graph(*, at_import: bool) -> dict[str, set[str]]:
    """Return the modules that each module of the library imports."""
    return {
        module: {target for _, target, _ in imported_modules(text(path), module, at_import=at_import)} - {module}
        for module, path in library().items()
    }


def imports() -> dict[str, int]:
    """Return how many modules of ours each module imports; a room's own list of what it holds is not limited."""
    paths = library()
    return {
        module: len(targets) for module, targets in graph(at_import=False).items() if paths[module].stem != "__init__"
    }


def depth(imported_by: Mapping[str, set[str]]) -> int:
    """Return how many modules the longest way has, each of which imports the next."""

    @cache
    def below(module: str) -> int:
        return 1 + max(map(below, imported_by[module]), default=0)

    return max(map(below, imported_by), default=0)


def with_one_importer() -> int:
    """Return how many modules are imported by one other module of the library."""
    importers = Counter(target for targets in graph(at_import=False).values() for target in targets)
    return sum(number == 1 for module, number in importers.items() if library()[module].stem != "__init__")


def loaded() -> int:
    """Return how many modules of ours `accel.optimize` loads."""
    code = "import sys, accel; accel.optimize; print(sum(m == 'accel' or m.startswith('accel.') for m in sys.modules))"
    return int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)


# Patches of torch


def patches() -> dict[str, set[str]]:
    """Return the modules that patch each class or module of torch, or hook it for the whole process."""
    places: dict[str, set[str]] = defaultdict(set)
    for module, path in library().items():
        for owner in patched(text(path)):
            places[owner].add(module)
    return places


def patched(source: str) -> Iterator[str]:
    """Yield the classes and modules of torch of which `source` replaces attributes, and its global hooks."""
    tree = ast.parse(source)
    names = dict(_torch_names(tree))
    owners: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            owners += [_dotted(target.value, names) for target in node.targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and _last(node.func) in {"setattr", "replace"} and len(node.args) > 2:
            owners.append(_dotted(node.args[0], names))
        elif isinstance(node, ast.Call) and _HOOKS.search(_dotted(node.func, names)):
            owners.append(_dotted(node.func, names))
    # What stands under torch.backends are settings.
    yield from (owner for owner in owners if owner and not owner.startswith("torch.backends"))


def _torch_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a file imports from torch, and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    """Return `torch.autograd.backward` for an expression that says so, '' for one that is nothing of torch."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


# Sizes


def lines(folder: str) -> int:
    """Return the lines of Python under a top-level folder."""
    return sum(text(path).count("\n") for path in own_modules(folder))


def function_lengths(paths: list[Path]) -> list[int]:
    """Return the lines of each function."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in paths
        for node in statements(ast.parse(text(path)).body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def sizes() -> dict[str, str]:
    """Return the sizes that are watched, as text."""
    paths = list(library().values())
    written = [line for path in paths for line in text(path).splitlines() if line.strip()]
    return {
        "lines of the library": f"{sum(map(lines, LIBRARY)):,}",
        "lines of accel/": f"{lines('accel'):,}",
        "lines of tests": f"{lines('tests'):,}",
        "lines of benchmarks": f"{lines('benchmarks'):,}",
        "modules of the library": f"{len(paths)}",
        "modules with one importer": f"{with_one_importer()}",
        "modules loaded by accel.optimize": f"{loaded()}",
        "import depth": f"{depth(graph(at_import=True))}",
        "lines of a function (median)": f"{statistics.median(function_lengths(paths)):g}",
        "lines over 100 characters": f"{sum(len(line) > 100 for line in written) / len(written):.1%}",
    }


@click.command(help=__doc__)
def main() -> None:
    """Print the sizes, and how much is over a limit."""
    excess = over(measures())
    rows = {
        **sizes(),
        **{f"over the limit of {most} {limit}": f"{len(excess[limit])}" for limit, most in LIMITS.items()},
    }
    for name, size in rows.items():
        click.echo(f"{name:<40}{size:>8}")


if __name__ == "__main__":
    main()
