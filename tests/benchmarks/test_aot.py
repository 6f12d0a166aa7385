"""The ahead-of-time gate: every kernel variant compiles to what the committed table says."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util

import pytest

from benchmarks import aot
from benchmarks.aot import Row

ROW = Row("op forward", 90, 128, 0, 4096, "wgmma.mma_async")
RECORDED_WITH = "3.6"


def test_every_variant_compiles_to_its_row() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton, which is not installed")
    if not importlib.metadata.version("triton").startswith(RECORDED_WITH):
        pytest.skip(f"the table was made with triton {RECORDED_WITH}; another version allots other registers")
    found = aot.compile_all(aot.names(), jobs=2)

    assert aot.problems(found, aot.read()) == []


def test_half_precision_uses_tensor_cores() -> None:
    rows = [
        row
        for row in aot.read()
        if "window_attention" in row.variant and ("fp16" in row.variant or "bf16" in row.variant)
    ]
    assert rows
    assert all(row.tensor_cores for row in rows)


def test_a_spill_is_a_problem() -> None:
    spilled = dataclasses.replace(ROW, stack_bytes=8)
    assert aot.problems([spilled], [spilled]) == ["op forward, sm_90: 8 bytes of stack (spills)"]


def test_a_known_spill_is_none_until_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aot.KNOWN_SPILLS, "op forward", 8)
    for stack, told in ((8, 0), (16, 1)):
        row = dataclasses.replace(ROW, stack_bytes=stack)
        assert len(aot.problems([row], [row])) == told


def test_a_change_is_a_problem() -> None:
    more = dataclasses.replace(ROW, registers=140)
    assert aot.problems([more], [ROW]) == ["op forward, sm_90: registers 128 → 140; if that is meant, record it"]


def test_rows_on_one_side_only_are_problems() -> None:
    other = dataclasses.replace(ROW, architecture=80)
    assert aot.problems([ROW], [other]) == [
        "op forward, sm_90: not in aot.csv; record it",
        "op forward, sm_80: in aot.csv, but there is no such variant",
    ]


def test_the_table_survives_its_file() -> None:
    rows = aot.read()
    assert aot.text_of(rows) == aot.TABLE.read_text(encoding="utf-8")
