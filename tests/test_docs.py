"""The manual says what the code does: links lead somewhere, code runs, tables match, examples work."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import accel
from accel import entry, strategies
from accel.guard.guard import Tolerance
from accel.profiler.trial import TrialConfig
from accel.report import report
from accel.search.plan import Plan
from accel.search.state import Pace
from accel.strategies import Exactness
from tests import warm
from tests.accel.loops import QUIET

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "docs/contributing/history.md"  # the old changelog: its figures and words stay as they were
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != HISTORY)]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
MARKERS = [f"<!-- {block}:{end} -->" for block in ["proof"] for end in ("begin", "end")]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the anchors that a reader of Markdown makes from headings."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_blocks() -> list[tuple[str, str, str]]:
    """Return (page:line, tag, code) of each block of Python."""
    found = []
    for page in PAGES:
        source = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(source):
            if match[1].split()[:1] == ["python"]:
                line = source.count("\n", 0, match.start(2)) + 1
                found.append((f"{page.relative_to(ROOT)}:{line}", match[1].strip(), match[2]))
    return found


def rows(page: str) -> list[list[str]]:
    """Return the cells of each table row of a page."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text(page).splitlines() if line[:1] == "|"
    ]


def names_in_first_cells(page: str) -> set[str]:
    return {name for cells in rows(page) for name in re.findall(r"`(\w+)`", cells[0])}


def knobs() -> dict[str, str]:
    return {
        cells[0].strip("`"): cells[1].strip("`")
        for cells in rows("docs/contributing/controller.md")
        if cells[0].startswith(("`TrialConfig.", "`Pace."))
    }


@pytest.fixture
def registry() -> Iterator[None]:
    """Put back what a block of code registers, optimizes or sets for the process."""
    before, precision = list(strategies.REGISTRY), torch.backends.mkldnn.matmul.fp32_precision
    yield
    for model in list(entry.MODELS):
        accel.undo(model)
    strategies.REGISTRY[:] = before
    torch.backends.mkldnn.matmul.fp32_precision = precision


# Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def test_every_page_is_reached_from_the_index() -> None:
    for folder in ("docs", "docs/contributing"):
        linked = {target.partition("#")[0] for target in LINK.findall(text(f"{folder}/index.md"))}
        assert {page.name for page in (ROOT / folder).glob("*.md")} - {"index.md"} <= linked
    assert "contributing/index.md" in LINK.findall(text("docs/index.md"))
    assert "docs/index.md" in LINK.findall(text("README.md"))


# Code


@pytest.mark.parametrize(("where", "tag", "code"), [pytest.param(*block, id=block[0]) for block in code_blocks()])
def test_python_block_compiles_and_runs_if_tagged(
    where: str, tag: str, code: str, registry: None, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = compile(code, where, "exec")
    assert tag in {"python", "python run"}
    if tag == "python run":
        exec(compiled, {"__name__": "docs"})
        printed = capsys.readouterr()
        assert printed.out
        assert "could not be switched" not in printed.err


def test_some_blocks_run() -> None:
    assert sum(tag == "python run" for _, tag, _ in code_blocks()) >= 4


def test_the_strategy_of_the_manual_gets_a_verdict_and_is_taken_back(
    registry: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    code = next(code for _, _, code in code_blocks() if "CpuBf16Products" in code)
    exec(compile(code, "docs/contributing/strategies.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.split()[0] in {"kept", "undone", "inconclusive"}
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=example.stem, marks=[] if example.stem == "plain_loop" else pytest.mark.slow)
        for example in EXAMPLES
    ],
)
def test_example_runs(example: Path) -> None:
    done = warm.run(["-m", f"examples.{example.stem}"], cwd=ROOT, before=QUIET)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_every_example_is_named_in_the_manual() -> None:
    assert len(EXAMPLES) >= 3
    for example in EXAMPLES:
        docstring = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
        assert f"python -m examples.{example.stem}" in docstring.splitlines()[2]
        assert f"`python -m examples.{example.stem}`" in " ".join(text("docs/index.md").split())


# Tables


def test_every_strategy_is_in_the_table_and_has_a_section() -> None:
    assert set(strategies.names()) <= anchors(ROOT / "docs" / "strategies.md")
    table = {cells[0]: cells for cells in rows("docs/strategies.md") if "](#" in cells[0]}
    assert list(table) == [f"[`{name}`](#{name})" for name in strategies.names()]
    for kind, cells in zip(strategies.REGISTRY, table.values(), strict=True):
        assert set(cells[1].split(", ")) == {bottleneck.value for bottleneck in kind.treats}
        assert cells[2] == kind.exactness.word
        on_shards = not kind.touches & {"model", "ranks"} or "shards" in kind.touches
        assert cells[4] in (("DDP, FSDP2",) if on_shards and kind.name != "batched_muon" else ("DDP", "one process"))
        assert ("opt-in" in cells[3]) == ("run.enabled" in inspect.getsource(kind))


@pytest.mark.parametrize("kind", [TrialConfig, Pace])
def test_the_controllers_numbers_are_those_of_the_code(kind: type[TrialConfig] | type[Pace]) -> None:
    told = {name.partition(".")[2]: ast.literal_eval(value) for name, value in knobs().items() if kind.__name__ in name}
    assert told == dataclasses.asdict(kind())


def test_every_cause_and_phase_of_the_profiler_is_documented_in_its_own_words() -> None:
    from accel.profiler.diagnose.causes import CAUSES
    from accel.profiler.phases import MEANING

    told = dict[str, list[str]]()
    for name, *cells in rows("docs/profiler.md"):
        told.setdefault(name.strip("`"), []).extend(cell.strip("`") for cell in cells)
    for phase, meaning in MEANING.items():
        assert told[phase] == [meaning]
    for cause in CAUSES.values():
        title, _, strategy, remedy = told[cause.name]
        assert (title, strategy, remedy) == (cause.title, cause.strategy, cause.remedy)


def test_the_guards_tolerances_are_those_of_the_code() -> None:
    table = {cells[0].strip("`"): cells[1:] for cells in rows("docs/guard.md") if len(cells) == 4}
    for level in list(Exactness)[:4]:
        tolerance = Tolerance.of(level, torch.float32)
        expected = [tolerance.output, tolerance.gradient, tolerance.scale]
        assert [float(cell) for cell in table[level.word]] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("part", [report.Report, report.StrategyRow, report.Machine, report.Event, Plan])
def test_every_field_of_the_files_is_documented(part: type) -> None:
    pages = text("docs/report.md") + text("docs/optimize.md")
    missing = [field.name for field in dataclasses.fields(part) if f"`{field.name}`" not in pages]
    assert not missing


@pytest.mark.parametrize("literal", [report.Status, report.State])
def test_every_status_is_documented(literal: object) -> None:
    missing = [word for word in literal.__args__ if f"`{word}`" not in text("docs/optimize.md")]  # type: ignore[attr-defined]
    assert not missing


def test_every_argument_of_optimize_and_every_public_call_is_documented() -> None:
    assert set(inspect.signature(accel.optimize).parameters) <= names_in_first_cells("docs/optimize.md")
    calls = [name for name, module in accel._HOMES.items() if module in ("accel.entry", "accel.scores")]
    assert not [name for name in calls if name not in text("docs/optimize.md")]


def test_every_attribute_and_method_of_a_strategy_is_documented() -> None:
    page = text("docs/contributing/strategies.md")
    kind = strategies.Strategy
    own = {name for name in (*vars(kind), *kind.__annotations__) if not name.startswith("_")}
    assert own <= names_in_first_cells("docs/contributing/strategies.md") | set(
        re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)
    )


# Figures


def test_readme_has_the_blocks_for_generated_figures_once_each_and_in_order() -> None:
    places = [text("README.md").index(marker) for marker in MARKERS]
    assert places == sorted(places)
    assert all(text("README.md").count(marker) == 1 for marker in MARKERS)
    figures = [line for line in text("README.md")[slice(*places)].splitlines() if line.startswith("|")]
    assert 1 <= len(figures[2:]) <= 8, "the front page has eight figures at most"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_speed_is_claimed_outside_the_generated_blocks(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    prose = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", prose, flags=re.DOTALL)
    assert not re.findall(r"\b\d[\d.,]*\s?[x×]\B|\b\d[\d.]*x\b|\d\s?samples/s|\d\s?% faster", prose)
