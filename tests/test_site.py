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

import accel
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


IMPORTS = re.compile(r"^ *from (accel(?:\.\w+)*) import ([\w, ]+)|^ *import (accel\.[\w.]+)", re.MULTILINE)
GROUPS = {"accel.amp", "accel.graphs", "accel.optim", "accel.integrations.lightning", "accel.integrations.transformers"}
FOR_AUTHORS = {"accel.strategies", "accel.profiler.bottleneck", "accel.run"}
"""Of strategies: they import what the library's own do."""


@pytest.mark.parametrize("page", [*USERS, *(ROOT / "examples").rglob("*.py")], ids=lambda page: page.name)
def test_the_manual_has_one_way_to_import(page: Path) -> None:
    shown = IMPORTS.findall(page.read_text(encoding="utf-8"))
    for module, names, whole in shown:
        assert not whole
        if module == "accel":
            assert set(names.split(", ")) <= {*accel.__all__, "strategies"}
        else:
            assert module in GROUPS | (FOR_AUTHORS if page.stem == "own_strategy" else set())


def test_the_way_to_import_that_the_manual_has_is_seen() -> None:
    text = "from accel import Int8, hook\n    from accel.amp import decorate\nimport accel.comm.hooks\nimport accel"
    assert [tuple(filter(None, found)) for found in IMPORTS.findall(text)] == [
        ("accel", "Int8, hook"),
        ("accel.amp", "decorate"),
        ("accel.comm.hooks",),
    ]


def test_each_public_name_is_on_one_api_page() -> None:
    shown = [name for names in hooks().API.values() for name in names]
    assert len(shown) == len(set(shown))
    public = {f"accel.{name}" for name in accel.__all__} - {"accel.__version__", "accel.scaling_rules"}
    assert set(shown) == {*public, "accel.elastic.scaling_rules", *GROUPS}


def test_nothing_is_loaded_from_the_network() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "offline" not in CONFIG["plugins"]  # it loads a script from unpkg.com
    assert not CONFIG.keys() & {"extra_javascript", "extra_css"}


def test_users_have_no_more_to_read_than_in_an_afternoon() -> None:
    words = {page.name: sum(map(_words, prose(_without_tables(page)))) for page in USERS}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]


def test_the_front_page_the_limits_and_the_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    assert len((DOCS / "limits.md").read_text(encoding="utf-8").split()) <= 500
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
