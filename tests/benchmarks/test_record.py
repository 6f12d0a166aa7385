"""What is recorded of a benchmark, the statistics of its rounds, and the tables that are made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks import record
from benchmarks.readme import BLOCKS, Block
from benchmarks.record import Column, Record, command_line, replaced
from benchmarks.render import table
from benchmarks.spread import Spread, extremes, fifths, median_interval, quartiles


def test_a_column_that_is_not_declared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"columns of made must be declared\. Found: b"):
        Record("made", "a test", {"a": Column("a figure")}).write([{"a": 1, "b": 2}], "command")
    assert not list(tmp_path.iterdir())


def test_a_row_replaces_those_of_its_key_and_has_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    made = Record("made", "a test", {"a": Column("which"), "ms": Column("time, ms")}, key=("a",))
    made.write([{"a": 1, "ms": 2.0}, {"a": 2, "ms": 3.0}], "python -m made --rounds 1")
    made.write([{"a": 1, "ms": 4.0}], "python -m made --rounds 2")
    assert [(row["a"], row["ms"], row["command"][-1]) for row in made.rows()] == [(2, 3.0, "1"), (1, 4.0, "2")]
    result = record.newest("made")
    assert result is not None
    assert result["command"] == "python -m made"
    assert replaced([{"a": 1}], [], ("a",)) == [{"a": 1}]


def test_rows_of_another_day_or_machine_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    made = Record("made", "a test", {"a": Column("which")}, key=("a",))
    about = {"date": "2026-01-01", "machine": "cpu (another)"}
    later = {**about, "date": "2026-01-02"}
    for number, now in enumerate((about, later, {"date": "2026-01-02", "machine": "cpu (this)"})):
        monkeypatch.setattr(record, "header", lambda what, command, now=now: {"what": what, "command": command, **now})
        made.write([{"a": number}], "command")
    of_rows = {row["a"]: {name: row[name] for name in about if name in row} for row in made.rows()}
    assert of_rows == {0: about, 1: {"machine": "cpu (another)"}, 2: {}}
    assert [path.name for path in tmp_path.iterdir()] == ["made-cpu-2026-01-02.json"]


@click.command()
@click.argument("loops", nargs=-1)
@click.option("--only", multiple=True)
@click.option("--rounds", default=5)
@click.option("--launches", default=0)
@click.option("--text", type=click.Path(path_type=Path), default=Path("of/this/machine"))
@click.option("--quick", is_flag=True)
@click.option("--depth", default=24, hidden=True)
@click.option("--record", is_flag=True)
def made_up(**options: object) -> None:
    print(command_line())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--rounds 5"),
        (
            ["mlp", "--only", "a b", "--only", "c", "--quick", "--record"],
            "mlp --only 'a b' --only c --rounds 5 --quick",
        ),
        (["--text", "my/own/folder", "--depth", "2"], "--rounds 5 --text folder"),
    ],
)
def test_the_command_has_all_options_and_no_path_of_this_machine(arguments: list[str], words: str) -> None:
    assert CliRunner().invoke(made_up, arguments).output == f"made-up {words}\n"


def test_the_newest_is_whole_or_has_the_part_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    assert record.newest("gpu") is None
    partial = {"partial": True}
    for date, more in (("2020-01-01", {}), ("2020-01-02", {"table": 1, **partial}), ("2020-01-03", partial)):
        (tmp_path / f"gpu-t1-{date}.json").write_text(json.dumps({"date": date, **more}))
    assert record.newest("gpu") == {"date": "2020-01-01"}
    assert record.newest("gpu", "table") == {"date": "2020-01-02", "table": 1, "partial": True}
    assert record.newest("gpu", "others") is None


def test_a_table_is_its_columns() -> None:
    rows = [{"a": 1.25, "b": "x"}, {"a": 2.0, "b": ""}]
    columns = {"": "{b}", "figure": "{a:.1f}", "if any": lambda row: row["b"] or None}
    assert table(columns, rows) == ["| | figure | if any |", "|---|---|---|", "| x | 1.2 | x |", "|  | 2.0 | |"]


def test_statistics_of_rounds() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0, 6.0]
    assert fifths(values) == (3.5, 2.0, 5.0)
    assert quartiles(values) == (3.5, 2.25, 4.75)
    assert extremes(values) == (3.5, 1.0, 6.0)
    assert fifths([2.0]) == median_interval([2.0]) == Spread(2.0, 2.0, 2.0)
    assert fifths(values).named("ms", "low", "high") == {"ms": 3.5, "low": 2.0, "high": 5.0}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.marker}")
def test_pages_hold_what_was_recorded(block: Block) -> None:
    result = record.newest(block.result, block.part)
    page = (record.ROOT / block.page).read_text(encoding="utf-8")
    if result is None:
        empty = rf"<!-- {block.marker}:begin -->\nNot recorded yet: `python -m [^`]+`\.\n<!-- {block.marker}:end -->"
        assert re.search(empty, page)
        return
    assert f"<!-- {block.marker}:begin -->\n{block.text(result)}\n<!-- {block.marker}:end -->" in page
