"""The manual as a site: each page has its place, the API pages have the modules that it names, and it is short."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.language import prose

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
USERS = [ROOT / "README.md", *(page for page in DOCS.glob("*.md"))]
MOST_WORDS = 30_000
"""Of prose that users read, without code and tables."""


class _Loader(yaml.SafeLoader):
    """Reads MkDocs' file, whose tags name objects of Python, without making them."""


_LOADER_TAGS = "tag:yaml.org,2002:python/"
_Loader.add_multi_constructor(_LOADER_TAGS, lambda loader, suffix, node: suffix)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", DOCS / "mkdocs_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        yield from [entry] if isinstance(entry, str) else pages(entry)


def test_each_page_has_one_place_in_the_navigation() -> None:
    listed = list(pages(CONFIG["nav"]))
    own = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*own, *(f"api/{name}.md" for name in hooks().API)])


def test_the_groups_are_tutorials_how_to_reference_explanation_and_contributing() -> None:
    assert [next(iter(group)) for group in CONFIG["nav"][1:]] == [
        "Tutorials",
        "How-to",
        "Reference",
        "Explanation",
        "Contributing",
    ]


def test_each_module_that_the_manual_imports_from_is_on_an_api_page() -> None:
    shown = {module for modules in hooks().API.values() for module in modules}
    imported = {
        module
        for page in DOCS.glob("*.md")
        for module in re.findall(r"^from (accel[\w.]*) import (?!\(?Strategy)", page.read_text(encoding="utf-8"), re.M)
    }
    internal = {"accel.strategies", "accel.strategies.process_setting"}  # of those who write a strategy
    internal |= {module for module in imported if module.startswith("accel.profiler.")}
    missing = {name for name in imported - internal if not any(each.startswith(name) for each in shown)}
    assert not missing


@pytest.mark.parametrize("module", [module for modules in hooks().API.values() for module in modules])
def test_each_module_on_an_api_page_is_there(module: str) -> None:
    path = ROOT / module.replace(".", "/")
    is_name = path.parent.with_suffix(".py").is_file()  # one function of a module
    assert is_name or path.with_suffix(".py").is_file() or path.is_dir()


def test_nothing_is_loaded_from_the_network() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "offline" not in CONFIG["plugins"]  # it loads a script from unpkg.com
    assert not CONFIG.keys() & {"extra_javascript", "extra_css"}


def test_users_have_no_more_to_read_than_in_an_afternoon() -> None:
    words = {page.name: sum(map(_words, prose(_without_tables(page)))) for page in USERS}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]


def test_the_front_page_and_the_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


def _without_tables(page: Path) -> str:
    return re.sub(r"^\|.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _words(part: str) -> int:
    return len(part.split())


@pytest.mark.integration
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs MkDocs: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    loads = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?://[^\" >]+|<link[^>]+href=\"?https?://[^\" >]+")
    found = [load for page in tmp_path.rglob("*.html") for load in loads.findall(page.read_text(encoding="utf-8"))]
    assert found == []
    assert "CommState" in (tmp_path / "api/comm.html").read_text(encoding="utf-8")
