"""The manual, the front page and messages have none of the words and turns of `tests/language.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.language import PHRASES, WORDS, found, prose

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "docs/contributing/history.md"
OLD = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PAGES = [*OLD, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != HISTORY)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_none(page: Path) -> None:
    uses = [use for part in prose(page.read_text(encoding="utf-8")) for use in found(part)]
    assert uses == []


def test_messages_have_none() -> None:
    uses = [f"{where}: {use}" for where, text in messages() for use in found(text)]
    assert uses == []


def messages() -> Iterator[tuple[str, str]]:
    """Yield the library's texts of some words that are no docstrings."""
    for folder in ("accel", "comm", "dataio", "kernels", "profiler"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder != "accel" or path.relative_to(ROOT).parts[1] not in ("comm", "dataio", "kernels", "profiler"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
                texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
                for node in texts:
                    if isinstance(node.value, str) and node.value.count(" ") > 1:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


@pytest.mark.parametrize(
    "sentence",
    [
        "What saves page faults comes first.",
        "Each of them is told so.",
        "Refused are sparse gradients.",
        "It is undone, and so is the rest.",
        "After that the search begins anew.",
        "The models of the one before are restored and let go of.",
        "The loader comes back as a thin stand-in.",
    ],
)
def test_what_once_was_written_is_found(sentence: str) -> None:
    assert found(sentence)


@pytest.mark.parametrize(
    "sentence",
    ["What now?", "accel explains what it tried, and so on.", "What the search may cost.", "A batch stays in memory."],
)
def test_ordinary_sentences_pass(sentence: str) -> None:
    assert found(sentence) == []


def test_code_and_generated_tables_do_not_count() -> None:
    page = "Text.\n\n```text\nbegins anew\n```\n\n<!-- a:begin -->\nanew\n<!-- a:end -->\n\n    anew\n\n`anew`\n"
    assert not [use for part in prose(page) for use in found(part)]


def test_patterns_are_expressions_and_none_is_listed_twice() -> None:
    patterns = [*WORDS.values(), *PHRASES.values()]
    assert len(set(patterns)) == len(patterns)
    assert all(re.compile(pattern) for pattern in patterns)
