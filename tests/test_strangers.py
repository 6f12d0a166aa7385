"""Eight strangers with a question each find its answer from README by links, in ten minutes at 200 words a minute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
MOST_WORDS = 2000

PATHS = {
    # who and with which question: page after page, or the part under a heading of it; and words of the answer
    "a ResNet on one GPU: what do I gain, by what?": (("docs/one_gpu.md",), 'allow="reduced"'),
    "a Hugging Face Trainer: where does the line go?": (("docs/hugging_face.md",), "callback = TransformersCallback("),
    "two slow nodes: what to try, at what cost?": (("docs/slow_links.md",), "accel's hooks have not run there"),
    "decoding JPEG starves the GPU": (("docs/jpeg.md",), "ImageFolder"),
    "torchrun, nodes come and go": (("docs/index.md", "docs/elastic.md"), "remaining_epochs"),
    "an elastic job on Kubernetes": (
        ("docs/index.md", "docs/kubernetes.md#with-accel-in-the-script", "docs/kubernetes.md#elastic"),
        "torchrun",
    ),
    "why is it slow?": (("docs/profiler.md#profiler", "docs/profiler.md#causes"), "`input.cpu`"),
    "nothing was won: what now?": (("docs/nothing_won.md",), "budget"),
    "add a strategy": (
        (
            "CONTRIBUTING.md#set-up",
            "CONTRIBUTING.md#add-a-strategy",
            "docs/contributing/strategies.md#writing-a-strategy",
        ),
        "exactness",
    ),
    "a sceptic: does it compute the same?": (("docs/guard.md",), "can't see"),
    "a sceptic: what was measured, and how?": (
        ("docs/figures.md#figures", "docs/figures.md#end-to-end"),
        "machine,\nversions, date and command",
    ),
}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def part(place: str) -> str:
    """Return a page, or what stands under a heading of it, up to the next one of its level; of the first up to any."""
    page, _, wanted = place.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    if not wanted:
        return text
    headings = list(HEADING.finditer(FENCE.sub(lambda block: "-" * len(block[0]), text)))
    (at,) = [i for i, each in enumerate(headings) if anchor(each[2]) == wanted]
    level = len(headings[at][1])
    ends = [each.start() for each in headings[at + 1 :] if level == 1 or len(each[1]) <= level]
    return text[headings[at].start() : min(ends, default=len(text))]


def linked(page: str) -> set[str]:
    """Return the pages that a page links to."""
    targets = re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    return {str(((ROOT / page).parent / target).resolve().relative_to(ROOT)) for target in targets}


@pytest.mark.parametrize(("places", "answer"), PATHS.values(), ids=list(PATHS))
def test_a_stranger_reads_at_most_ten_minutes(places: tuple[str, ...], answer: str) -> None:
    pages = ["README.md", *(place.partition("#")[0] for place in places)]
    known = {"README.md"}.union(*map(linked, pages[:-1]))
    assert not set(pages) - known, "no link from a page before"
    words = {place: len(part(place).split()) for place in ("README.md", *places)}
    assert sum(words.values()) <= MOST_WORDS, words
    assert any(answer in part(place) for place in places)
