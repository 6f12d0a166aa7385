"""The runner of the GPU suite: what fails or runs out of time costs itself alone, and figures are always on disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu import ceilings, decisive, overhead, processes
from benchmarks.gpu import sections as gpu_sections
from benchmarks.gpu import suite as gpu
from benchmarks.gpu.results import Results, sources
from benchmarks.gpu.sections import SECTIONS
from benchmarks.record import ROOT


class Clock:
    """Stands still but where a part takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Play all parts and sections: each takes as long as it may, but at most 100 s, and notes that."""
    return Played(monkeypatch)


class Played:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.limits_s, self.failing = Clock(), dict[str, float](), set[str]()
        self.results = Results({}, ())
        monkeypatch.setattr(decisive, "run_part", lambda name, results, settings, limit_s: self.take(name, limit_s))
        monkeypatch.setattr(decisive, "run_section", lambda name, results, settings, limit_s: self.take(name, limit_s))

    def take(self, name: str, limit_s: float) -> None:
        self.limits_s[name] = limit_s
        self.clock.now += min(limit_s, 100)
        if name in decisive.PARTS:
            self.results.figures.setdefault("seconds", {})[name] = 100.0
        if name in SECTIONS:
            mark = sources(*SECTIONS[name].sources)
            self.results.put(name, {"failed": "no"} if name in self.failing else {"sources": mark})

    def suite(self, limit_s: float, *names: str) -> list[str]:
        self.limits_s.clear()
        began = self.clock.now
        return gpu.suite(names, self.results, decisive.Settings(Path()), limit_s, lambda: self.clock.now - began)


def test_what_decides_comes_first_and_the_next_call_goes_on(played: Played) -> None:
    played.failing = {"overhead"}
    lacking = played.suite(439)
    decisive_ones = {"prewarm": 210, "table": 339, "second": 140}
    assert played.limits_s == {**decisive_ones, "ceilings": 25, "overhead": 25, "swin_graphs": 50, "graphs": 25}
    assert lacking == [name for name in SECTIONS if name not in ("ceilings", "swin_graphs", "graphs")]
    assert played.suite(440)[0] == "overhead"  # which failed again, and cost no more than itself
    assert list(played.limits_s)[3:6] == ["overhead", "gradient_kernels", "simota_warps"]
    assert "failed" not in played.results.figures["gradient_kernels"]


def test_the_next_call_begins_with_what_the_first_did_not_come_to(played: Played) -> None:
    played.suite(219)
    assert list(played.limits_s) == ["prewarm", "table", "ceilings"]  # 19 s were left
    played.suite(320)
    assert list(played.limits_s) == ["second", "table", "prewarm", "overhead"]


def test_the_next_call_begins_with_what_the_first_hardly_came_to(played: Played) -> None:
    played.results.figures["seconds"] = {"prewarm": 140.0, "table": 360.0, "second": 62.0}
    played.suite(190)
    assert next(iter(played.limits_s)) == "second"


def test_sections_have_the_folder_of_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(processes, "section", lambda name, limit_s, publish, environ: given.append(environ) or {})
    settings = decisive.Settings(tmp_path)
    decisive.run_section("swin_graphs", Results({}, ()), settings, 1.0)
    assert given == [{"TORCHINDUCTOR_CACHE_DIR": settings.environ("compiling")["TORCHINDUCTOR_CACHE_DIR"]}]


def test_a_part_has_its_budget_and_no_more_than_is_left(played: Played) -> None:
    assert played.suite(250, "table", "window_attention", "faults") == []
    assert played.limits_s == {"table": 250, "window_attention": 150, "faults": 50}
    assert played.suite(110, "table", "window_attention") == []  # measured before, and asked for
    assert played.limits_s == {"table": 110}


def test_a_section_in_a_process_is_on_disk_as_it_goes_and_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "played"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, subprocess, sys, time\np = subprocess.Popen(['sleep', '60'])\n"
        "part = sys.argv[-1] + '.part'\nopen(part, 'w').write(json.dumps({'rows': [p.pid]}))\n"
        "os.replace(part, sys.argv[-1])\n"
        "print('words', flush=True)\n"
        "sys.exit(3) if sys.argv[3] == 'failing' else time.sleep(60)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    published: list[dict[str, Any]] = []
    slow = processes.section("slow", 1.0, lambda figures: published.append(dict(figures)))
    assert published == [{"rows": slow["rows"]}]
    assert slow["failed"] == "took too long"
    deadline = time.monotonic() + 30
    while _runs(slow["rows"][0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(slow["rows"][0])
    assert processes.section("failing", 60)["failed"] == "exit status 3: words"


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_a_section_keeps_what_it_found_before_it_failed(tmp_path: Path) -> None:
    def section() -> Iterator[tuple[str, Any]]:
        yield "rows", [1, 2]
        raise ValueError("at the third")

    assert not gpu_sections.written(section, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": [1, 2], "failed": "ValueError: at the third"}
    assert gpu_sections.written(lambda: iter([("rows", [3])]), tmp_path / "found.json")


def test_red_tests_name_what_failed() -> None:
    found = processes.read_tests(1, "..F\nFAILED tests/a.py::b\n1 failed")
    assert found == {
        "green": False, "line": "1 failed", "failed": "exit status 1", "lines": ["FAILED tests/a.py::b"]
    }  # fmt: skip
    assert processes.read_tests(0, "..\n2 passed in 1.0s") == {"green": True, "line": "2 passed in 1.0s"}


def test_all_that_figures_depend_on_is_there() -> None:
    paths = {path for section in SECTIONS.values() for path in section.sources}
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_without_a_gpu_nothing_is_run() -> None:
    done = CliRunner().invoke(gpu.main, [])
    assert (done.exit_code, done.output) == (2, "no CUDA device: nothing was run, nothing was written\n")


# Small sections


def test_the_ceilings_of_a_cpu() -> None:
    found = dict(ceilings.everything("cpu", side=64, megabytes=1))
    assert found["copy_gb_per_s"] > 0
    assert set(found["tflops"]) == {"fp32", "bf16"}


def test_the_cost_of_accel_is_that_beyond_a_step_by_hand() -> None:
    rows = dict(overhead.everything("cpu", turns=1, steps=3))["rows"]
    assert [row["way"] for row in rows] == ["by hand", "accel, nothing kept", "accel, fused_optimizer"]
    assert rows[1]["over_by_hand_us"] == pytest.approx(rows[1]["us"] - rows[0]["us"])
    assert all(row["low"] <= row["us"] <= row["high"] for row in rows)
