"""A document as one self-contained web page: no network, no scripts, light and dark.

`page.html.j2` lays the blocks of a document out, `pictures.html.j2` draws its pictures.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from accel.report.blocks import SIGNS, Document
from accel.report.pictures import shade
from accel.report.words import clean


def render(document: Document) -> str:
    """Lay a document out as one HTML page.

    Args:
        document: what to show; any text in it is shown literally.

    Returns:
        The page, which loads nothing: it can be mailed, or opened from a folder.
    """
    return _environment().get_template("page.html.j2").render(document=document, signs=SIGNS)


@cache
def _environment() -> Environment:
    """Return the templates, which show any text literally and `-` for a missing value."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {"shade": shade, "sentence": _sentence}
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    return environment


def _sentence(text: str) -> str:
    """Begin a text with a capital letter, unless it begins with a unit."""
    return text if text.startswith("ms") else text[:1].upper() + text[1:]


def _finalize(value: Any) -> Any:
    """Make a value safe to be escaped and shown; output of macros is safe already."""
    if value is None:
        return "-"
    if isinstance(value, str) and not isinstance(value, Markup):
        return clean(value, keep="\n")
    return value
