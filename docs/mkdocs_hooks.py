"""Fit the manual to a site: API pages from docstrings, and no links to files of the checkout that the site lacks."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import accel

GROUPS = ("comm", "dataio", "elastic", "goodput", "kernels")
PACKAGES = ("amp", "graphs", "optim")


def _api() -> dict[str, list[str]]:
    """Return API page → what is on it: the public names by the folder that holds them, and the packages."""
    pages: dict[str, list[str]] = {"accel": [], **{group: [] for group in GROUPS}}
    for name, module in accel._HOMES.items():
        group = module.split(".")[1]
        pages[group if group in GROUPS else "accel"].append(f"accel.{name}")
    pages["elastic"].append("accel.elastic.scaling_rules")
    pages["integrations"] = ["accel.integrations.lightning", "accel.integrations.transformers"]
    return {**pages, **{package: [f"accel.{package}"] for package in PACKAGES}}


API = _api()

_LINK = re.compile(r"\[([^\]\n]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_startup(command: str, dirty: bool) -> None:
    """Copy the library for mkdocstrings: its reader follows no links and wants an `__init__.py` in each folder."""
    root = Path(__file__).parents[1]
    copy = root / "build" / "api" / "accel"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root / "accel", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):  # the reader takes doctests for code under "Examples:" only
        path.write_text(path.read_text(encoding="utf-8").replace(" Example:\n", " Examples:\n"), encoding="utf-8")
    for folder in {path.parent for path in copy.rglob("*.py")}:
        (folder / "__init__.py").touch()


def on_files(files: Any, config: Any) -> Any:
    """Add a page of the Python API for each row of `API`."""
    from mkdocs.structure.files import File

    for name, shown in API.items():
        content = "\n\n".join((f"# {name}", *(f"::: {each}" for each in shown))) + "\n"
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files that the site lacks into their text, and drop the tag that makes tests run code."""

    def shown(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        return link[1] if target.startswith("..") else link[0]

    return _LINK.sub(shown, markdown.replace("```python run\n", "```python\n"))
