"""The ahead-of-time gate: every kernel variant compiles to what the committed table says."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import linecache
import runpy
import statistics
from pathlib import Path

import pytest

from benchmarks import aot
from benchmarks.aot import Row
from benchmarks.kernels.aot_key import digest

ROW = Row("op forward", 90, 128, 0, 4096, "wgmma.mma_async", "0123")
RECORDED_WITH = "3.6.0"
_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of a core, for one program: NVIDIA's tuning guides."""
SAMPLE = ("window_attention forward 7x7 D32 fp16 masked",)  # tensor cores of all three generations


@pytest.fixture
def same_compiler() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton, which is not installed")
    if importlib.metadata.version("triton") != RECORDED_WITH:
        pytest.skip(f"the table was made with triton {RECORDED_WITH}; another version allots other registers")


def test_every_row_was_made_of_what_the_kernels_are_now(same_compiler: None) -> None:
    held = aot.held(aot.read())
    assert [name for name in aot.names() if name not in held] == [], "run python -m benchmarks.aot --record"


def test_the_table_has_no_spill_and_no_row_of_something_else(same_compiler: None) -> None:
    assert aot.problems(aot.read(), aot.read()) == []
    assert [row.variant for row in aot.read()] == [name for name in aot.names() for _ in aot.ARCHITECTURES]


@pytest.mark.slow
def test_a_sample_compiles_to_its_rows(same_compiler: None) -> None:
    found = aot.compile_all(SAMPLE, jobs=1)  # each more is a process that imports torch and triton
    assert aot.problems(found, [row for row in aot.read() if row.variant in SAMPLE]) == []


@pytest.mark.slow
def test_every_variant_compiles_to_its_row(same_compiler: None) -> None:
    assert aot.problems(aot.compile_all(aot.names(), jobs=2), aot.read()) == []


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_programs_of_window_attention_are_as_many_as_a_core_holds(
    same_compiler: None, kind: str, architecture: int
) -> None:
    """By registers and shared memory of the median variant in half precision.

    The numbers were measured on compute capability 9.0; on 8.0 the forward pass takes a few registers too many for one.
    """
    from accel.kernels.window_attention.launchers import _PROGRAMS_PER_CORE

    threads = 4 * 32
    held = [
        min(65536 // (row.registers * threads), _SHARED_BYTES[architecture] // row.shared_bytes)
        for row in aot.read()
        if row.variant.startswith((f"window_attention {kind} 7x7", f"window_attention {kind} 8x8"))
        if row.architecture == architecture and "fp32" not in row.variant
    ]
    assert 0 <= _PROGRAMS_PER_CORE[kind] - statistics.median(held) <= (architecture == 80)


def test_what_is_excused_is_what_the_table_has() -> None:
    """None is allowed more than it has, and none that is gone."""
    assert {(row.variant, row.architecture): row.stack_bytes for row in aot.read() if row.stack_bytes} == (
        aot.KNOWN_SPILLS
    )


def test_half_precision_uses_tensor_cores() -> None:
    rows = [
        row
        for row in aot.read()
        if "window_attention" in row.variant and ("fp16" in row.variant or "bf16" in row.variant)
    ]
    assert rows
    assert all(row.tensor_cores for row in rows)


def test_large_windows_use_the_tensor_cores_of_their_generation() -> None:
    """On Hopper a product of fewer than 64 rows falls back on the older instruction, at some 60 % of the speed."""
    for window, cosine in (("12x12", ""), ("16x16", " cosine")):
        for kind in ("forward", "rows", "columns"):
            name = f"window_attention {kind} {window} D32 fp16 masked{cosine}"
            assert [row.tensor_cores for row in aot.read() if row.variant == name] == [
                "mma.sync",
                "wgmma.mma_async",
                "tcgen05.mma",
            ]


SHIFTED_AND_NOT = {
    "Swin": (("7x7", "12x12"), ""),
    "Swin V2": (("8x8", "16x16"), " cosine"),
}


@pytest.mark.parametrize("model", SHIFTED_AND_NOT)
def test_every_layer_of_a_published_model_has_its_rows(model: str) -> None:
    """Models named after their windows, all with heads of 32 channels; every second block is not shifted."""
    recorded = {row.variant for row in aot.read()}
    windows, cosine = SHIFTED_AND_NOT[model]
    for window in windows:
        layers = [f"{window} D32 {data} masked{cosine}" for data in ("fp32", "fp16", "bf16")]
        layers += [f"{window} D32 fp16{cosine}"]
        ways = ("forward", "backward") if window in ("7x7", "8x8") else ("forward", "rows", "columns")
        wanted = {f"window_attention {way} {layer}" for way in ways for layer in layers}
        assert wanted <= recorded, wanted - recorded


def test_a_spill_is_a_problem() -> None:
    spilled = dataclasses.replace(ROW, stack_bytes=8)
    assert aot.problems([spilled], [spilled]) == ["op forward, sm_90: 8 bytes of stack (spills)"]


def test_too_much_shared_memory_is_a_problem() -> None:
    for architecture, told in ((80, 1), (90, 0)):
        large = dataclasses.replace(ROW, architecture=architecture, shared_bytes=167_936)
        assert len(aot.problems([large], [large])) == told


def test_a_change_is_a_problem() -> None:
    more = dataclasses.replace(ROW, registers=140)
    assert aot.problems([more], [ROW]) == ["op forward, sm_90: registers 128 → 140; if that is meant, record it"]


def test_the_table_survives_its_file() -> None:
    rows = aot.read()
    assert aot.text_of(rows) == aot.TABLE.read_text(encoding="utf-8")


def test_a_record_compiles_what_changed(same_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = aot.read()
    changed = [
        dataclasses.replace(row, key="old", registers=0) if row.variant == "compact bf16" else row for row in rows
    ]
    asked: list[str] = []

    def compile_all(names: list[str], jobs: int) -> list[Row]:
        asked.extend(names)
        return [row for row in rows if row.variant in names]

    monkeypatch.setattr(aot, "compile_all", compile_all)
    assert aot.renewed(changed, 1) == rows
    assert asked == ["compact bf16"]


# -- the digest --------------------------------------------------------------------------------------------------------

KERNEL = """
def helper(x):
    return x + 1

class Kernel:
    def __init__(self, fn):
        self.fn = fn

FACTOR = 2
helper = Kernel(helper)

def kernel(x):
    return helper(x) * FACTOR
"""


def digest_of(path: Path, text: str, **parameters: int) -> str:
    path.write_text(text, encoding="utf-8")
    linecache.checkcache()
    space = runpy.run_path(str(path))
    return digest(space["Kernel"](space["kernel"]), parameters)


def test_the_digest_follows_what_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "kernels.py"
    first = digest_of(path, KERNEL, block=16)
    assert digest_of(path, "# Moved down.\n" + KERNEL.replace("x + 1", "x + 1  # why"), block=16) == first
    others = [
        digest_of(path, KERNEL, block=32),
        digest_of(path, KERNEL.replace("x + 1", "x + 3"), block=16),
        digest_of(path, KERNEL.replace("FACTOR = 2", "FACTOR = 3"), block=16),
        digest_of(path, KERNEL.replace("(x) * FACTOR", "(x) / FACTOR"), block=16),
    ]
    assert len({first, *others}) == 5
