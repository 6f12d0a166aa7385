"""What is claimed of a GPU stands in the records: no run is denied that is there, and no gain claimed without one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import searches
from benchmarks.record import FOLDER, newest

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "docs/contributing/history.md"  # the old changelog: its figures and words stay as they were
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != HISTORY)]
LIBRARY = ("accel", "comm", "dataio", "kernels", "profiler")

GPU = re.compile(r"\bGPUs?\b|\bCUDA\b|\bNCCL\b|\b[AH]\d00\b")
_DONE = r"(?:run|ran|timed|recorded|measured|tried|searched)"
DENIES = re.compile(
    rf"\b(?:not|never) (?:been )?{_DONE}\b(?! at\b)|\b(?:neither|nothing|none) [^;:]{{0,60}}?\b{_DONE}\b"
    r"|\bno (?:\w+ ){0,2}(?:run|search|trial)\b|\b(?:was|were) not\b(?=\s*(?:[.;:)]|$))|\bonly where\b.*\brun on\b",
    re.IGNORECASE,
)
IN_RECORDS = {
    # of what a sentence speaks → by what a record of it is known
    r"\bNCCL\b|\bFSDP2?\b|\bhooks\b|gradients on GPUs|[Ss]everal GPUs|More than one GPU": r"nccl|\"world_size\": [2-9]",
    r"other kinds|A100|generations": r"\"(?:device|machine)\": \"NVIDIA (?!H200)",
    r"\bsearch": r"\"verdict\": \"\d",
    r"\bDALI": r"dali",
    r"in_place": r"in_place",
    r"`async_copy`|async_copy\.py": r"\"async_copy\", \"status\": \"(?:kept|undone)\"",
    r"the strategy has had no trial": r"\"amp_o2\", \"status\": \"(?:kept|undone)\"",
    r"[Bb]y its source": r"memory formats of the state",
    r"comm/": r"nccl",
    r"comparison of compiled code": r"\"search\": \"done\"",  # of benchmarks/gpu/decisive.py
    r"`batched_muon`": r"\"batched_muon\", \"status\"",
    r"`(?:liger|float8)`": r"\"(?:liger|float8)\", \"status\": \"(?:kept|undone)\"",
    r"\bscheduler\b": r"\"scheduler\": \"accel cluster up\"",
    r"this version": r"\"weights\": \"float32\"",  # of benchmarks/gpu/mixed_precision.py
}
TABLE = re.compile(r"^\| \[`(\w+)`\]")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page or a docstring, without its code and its generated blocks."""
    text = re.sub(r"<!-- [\w-]+:begin -->.*?<!-- [\w-]+:end -->|^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=\s*[-|#])", text):
        if not TABLE.match(part.strip()):
            yield from re.split(r"(?<=[.?!])\s+(?=[A-Z`*(\[])", " ".join(part.split()))


def denials(where: str, text: str) -> Iterator[str]:
    """Yield the parts of sentences that say of something that it was not run on a GPU."""
    for sentence in filter(GPU.search, sentences(text)):
        yield from (f"{where}: {part}" for part in sentence.split("; ") if DENIES.search(part))


def library() -> Iterator[tuple[str, str]]:
    """Yield each text of the library's modules, by its module."""
    for folder in LIBRARY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder != "accel" or path.relative_to(ROOT).parts[1] not in LIBRARY:  # there are links
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield str(path.relative_to(ROOT)), node.value


@cache
def records() -> list[str]:
    """Return all records of a GPU."""
    texts = [json.dumps(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.json"))]
    return [text for text in texts if re.search(r"\"(?:device|machine)\": \"NVIDIA", text)]


def wrong(denial: str) -> str:
    """Return what is wrong about a sentence: it is of nothing that the records could hold, or they hold it."""
    known = [pattern for subject, pattern in IN_RECORDS.items() if re.search(subject, denial)]
    if not known:
        return f"say of what in particular, and by what a record of it is known (IN_RECORDS): {denial}"
    return f"a record holds it: {denial}" if any(re.search("|".join(known), text) for text in records()) else ""


def test_no_run_on_a_gpu_is_denied_that_a_record_holds() -> None:
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    found = [denial for where, text in (*texts, *library()) for denial in denials(where, text)]
    assert len(found) > 5  # the expressions find what there is
    assert [said for denial in found if (said := wrong(denial))] == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Its tests pass on one H200, where kernels were timed ([gpu.md](gpu.md)); a whole search and more was not.",
        "Its GPU half has passed its tests on a GPU; the scripts with one fault each have not run there.",
        "Copies to the device are known by their target. No GPU run has been recorded yet.",
        "What it takes longer is a cost of the search (tested with a played device; no search has run on a GPU since).",
        "Neither this nor what is said of fused attention has run on a GPU yet.",
        "Its tests pass on a GPU; how much of the copy it hides has not been recorded (`make gpu` measures it).",
        "The kernels are proven on an H200; trained models have not been timed.",
        "Proven on a CPU; it has not been run on a GPU yet (`make gpu`).",
        "Tested on a GPU; its gain has not been recorded.",
        "- On a GPU this has had a first look only; nothing of it is recorded.",
        "Only where random states and learning rates are kept was it run on a GPU.",
    ],
)
def test_lines_that_once_were_out_of_date_would_be_found(sentence: str) -> None:
    found = list(denials("docs/page.md", sentence))
    assert found and all(map(wrong, found))


def test_a_denial_is_out_of_date_as_soon_as_a_record_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    denial = "docs/comm.md: Their code for NCCL has not been run on GPUs yet."
    assert wrong(denial) == ""
    monkeypatch.setitem(globals(), "records", lambda: ['{"machine": "NVIDIA H200", "backend": "nccl"}'])
    assert wrong(denial).startswith("a record holds it")


def test_where_a_strategy_is_proven_is_where_a_record_has_kept_it() -> None:
    """A gain is not claimed that no record has, and not denied where one has it."""
    found = [json.loads(text) for text in records()]
    kept = set(re.findall(r'"name": "(\w+)", "status": "kept"', json.dumps(found)))
    assert {"autocast_bf16", "pin_memory"} <= kept
    lines = (ROOT / "docs/strategies.md").read_text(encoding="utf-8").splitlines()
    told = {name[1]: line.split("|")[-2] for line in lines if (name := TABLE.match(line))}
    assert {name for name, where in told.items() if "H200" in where} == kept


def test_the_best_search_on_a_gpu_stands_on_the_first_page_with_what_it_is_over() -> None:
    record: dict[str, Any] | None = newest("searches")
    assert record is not None
    best = max(searches.rows(record), key=lambda row: float(row["figure"].partition("x")[0] or 0))
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if best["figure"] in line]
    assert len(rows) == 1
    assert "IEEE float32" in rows[0] and best["model"] in rows[0]


def test_a_figure_of_the_fused_op_has_its_best_rival_and_the_whole_step_beside_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (op,) = [line for line in text.splitlines() if "Swin window attention on" in line]
    assert "the best rival" in op and "timm's fused path" in op
    assert "a whole step of Swin-T with it" in op and "the step: `torch.compile` alone" in op and "; 0.91x [" in op
