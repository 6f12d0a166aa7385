"""CONTRIBUTING says what is there: rooms, paths to read; code has the words of the field."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import structure
from benchmarks.source_tree import ROOT, library, own_files
from tests.language import WORDS
from tests.test_rooms import ROOMS

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = dict(re.findall(r"^\*\*(.+)\*\*\n\n((?:\d+\. .*\n(?:   .*\n)*)+)", GUIDE, re.MULTILINE))

# They say that a thing was got, and not what it is.
NOT_NAMES = {"found", "told", "said", "way"}
OLD_TEXTS = {"docs/contributing/history.md", "tests/language.py"}


@pytest.mark.parametrize("folder", ROOMS)
def test_map_has_each_room(folder: str) -> None:
    assert not {room for room in ROOMS[folder] - kernels() if f"`{folder}/{room}/`" not in GUIDE}


def kernels() -> set[str]:
    """Rooms of one op each, which have one row together."""
    return {"codes", "fcos_targets", "optimizers", "rows", "simota", "window_attention"}


def test_there_are_four_paths_to_read() -> None:
    assert len(PATHS) == 4


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_some_files_that_exist(path: str) -> None:
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", PATHS[path], re.MULTILINE)
    assert 5 <= len(files) <= 18
    assert len(files) == len(re.findall(r"^\d+\. ", PATHS[path], re.MULTILINE))
    assert not [file for file in files if not (ROOT / file).is_file()]


def test_a_path_is_short() -> None:
    """All files that one must open count, not only those with a number."""
    lengths = [len(set(re.findall(r"`([\w/]+/\w+\.py)`", text))) for text in PATHS.values()]
    assert all(length <= most for length, most in zip(lengths, (20, 24, 14, 18), strict=True)), lengths


@pytest.mark.parametrize("path", PATHS)
def test_the_files_of_a_path_lead_to_each_other(path: str) -> None:
    """One can go from the first to every other one by imports between them, of whichever direction."""
    modules = {path.resolve(): module for module, path in library().items()}
    named = {modules[(ROOT / file).resolve()] for file in re.findall(r"`([\w/]+/\w+\.py)`", PATHS[path])}
    imports = structure.graph(at_import=False)
    reached, waiting = set[str](), [min(named)]
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting += [other for other in named - reached if other in imports[module] or module in imports[other]]
    assert reached == named


def test_every_file_that_the_guide_names_exists() -> None:
    named = re.findall(r"`((?:accel|profiler|comm|dataio|kernels|benchmarks|tests)/[\w/*]+\.py)`", GUIDE)
    assert not [file for file in named if not list(ROOT.glob(file))]


@pytest.mark.parametrize("word", WORDS)
def test_the_fields_word_is_used(word: str) -> None:
    assert places(re.compile(WORDS[word])) == []


@pytest.mark.parametrize("folder", ROOMS)
def test_names_say_what_a_thing_is(folder: str) -> None:
    files = [path for path in written() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == folder]
    assert files
    assert not [f"{path.relative_to(ROOT)}: {name}" for path in files for name in names(path) & NOT_NAMES]


def names(path: Path) -> set[str]:
    """Return what a file binds: variables, attributes and parameters, without underscores around."""
    bound: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return {name.strip("_") for name in bound}


def places(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in written()
        if pattern.search(text := path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def written() -> list[Path]:
    texts = [path for path in own_files() if path.suffix in {".py", ".md"}]
    return [path for path in texts if path.relative_to(ROOT).as_posix() not in OLD_TEXTS]
