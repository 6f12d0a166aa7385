"""What tests look for on a page: its tags, its words and its pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in the order they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, f"<{tag}/> is not closed in HTML"
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append((self.open[-1] if self.open else "", " ".join(data.split())))

    def text(self) -> str:
        return " ".join(word for tag, word in self.words if tag != "style")

    def having(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def shape(self) -> list[tuple[str, list[str]]]:
        """Return the tags with the names of their attributes."""
        return [(tag, sorted(attributes)) for tag, attributes in self.tags]


def pictures(html: str) -> dict[str, ElementTree.Element]:
    """Return the outermost drawings by the first part of their title's id, parsed as XML."""
    drawings: dict[str, ElementTree.Element] = {}
    depth, start = 0, 0
    for match in re.finditer(r"<svg\b|</svg>", html):
        if match[0] == "<svg":
            start = match.start() if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                drawing = ElementTree.fromstring(html[start : match.end()])
                drawings[drawing.get("aria-labelledby", f"bar {len(drawings)}").split("-")[0]] = drawing
    assert depth == 0
    return drawings


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "0").rstrip("%"))


def places(drawings: Iterable[ElementTree.Element]) -> Iterable[float]:
    """Yield every place in percent along the width."""
    for drawing in drawings:
        for element in drawing.iter():
            for name in ("x", "x1", "x2", "width", "cx"):
                if element.get(name, "").endswith("%"):
                    yield number(element, name)
