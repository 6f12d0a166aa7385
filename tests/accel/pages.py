"""What tests look for on a page: its tags, its words and its bars."""

from __future__ import annotations

import re
from html.parser import HTMLParser

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


def bars(html: str, title: str) -> list[list[tuple[str, float]]]:
    """Return the parts of each bar of a picture: their fill class, and their width in percent."""
    picture = html[html.index(f'aria-label="{title}') :].partition("\n</div>\n")[0]
    parts = [re.findall(r'<span class="(\w*)" [^>]*style="width: ([^%]*)%"', line) for line in picture.splitlines()]
    return [[(shade, float(width)) for shade, width in each] for each in parts if each]
