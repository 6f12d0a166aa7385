"""What decides on a GPU, on a CPU: its three calls with played processes, one on the device at a time, rows on disk."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from accel.compile.compiled_calls import repeated_blocks
from benchmarks.device_lock import device_lock, holder
from benchmarks.gpu import decisive, decisive_tables, processes
from benchmarks.gpu import results as gpu_results
from benchmarks.gpu.decisive import COMPILED, compile_plan, compiled_row
from benchmarks.gpu.processes import Job, Queue
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import LIBRARY
from benchmarks.suite import MODELS

ROOT = Path(__file__).resolve().parents[2]
PRINTS = "print('{}')"
PLANNED = compile_plan("ncf")


def holding(lock: Path, then: str) -> list[str]:
    """Return what a process does that takes the lock, notes when it had it, and prints that."""
    code = f"""
    import json, time
    from pathlib import Path
    from benchmarks.device_lock import device_lock
    began = time.time()
    time.sleep(0.1)  # it imports and makes its data
    with device_lock(Path({str(lock)!r})):
        since = time.time()
        {then}
        print(json.dumps(dict(began=began, since=since, until=time.time())), flush=True)
    print("a word at the end")
    """
    return ["-c", textwrap.dedent(code)]


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(processes, "LOOK_S", 0.02)
    return tmp_path / "device.lock"


def forever() -> float:
    return 1e6


# The lock and the queue


def test_one_has_the_device_while_others_prepare_themselves(lock: Path) -> None:
    jobs = [Job({"number": str(n)}, holding(lock, "time.sleep(0.15)"), 0.1, 30) for n in range(3)]
    ended = [each.figures for each in Queue(lock, width=3).run(jobs, forever)]
    spans = sorted((each["since"], each["until"], each["began"]) for each in ended)
    assert len(spans) == 3
    for (_, until, _), (since, _, began) in itertools.pairwise(spans):
        assert began < until <= since
    assert holder(lock) is None


def test_the_lock_says_who_holds_it_and_is_free_when_its_holder_is_killed(lock: Path) -> None:
    process = subprocess.Popen([sys.executable, *holding(lock, "time.sleep(60)")], cwd=ROOT)
    while holder(lock) is None:
        time.sleep(0.01)
    held = holder(lock)
    assert held is not None and held.pid == process.pid and time.time() - held.since < 60
    process.send_signal(signal.SIGKILL)
    process.wait()
    with device_lock(lock):
        held = holder(lock)
        assert held is not None and held.pid == os.getpid()
    with device_lock(None):
        assert holder(lock) is None


def test_who_has_the_device_for_too_long_is_ended_and_the_next_one_has_it(lock: Path) -> None:
    starts = "import subprocess; p = subprocess.Popen(['sleep', '60']); Path(f'{p.pid}.pid'); time.sleep(60)"
    jobs = [Job({}, holding(lock, starts), 0.1, 0.5), Job({}, holding(lock, "pass"), 0.1, 30)]
    ended = {each.job.limit_s: each for each in Queue(lock, width=2).run(jobs, forever)}
    assert ended[0.5].figures == {"failed": "took too long"}
    assert ended[0.5].seconds >= 0.5
    assert "until" in ended[30].figures


def test_what_there_is_no_time_for_is_not_begun() -> None:
    jobs = [Job({}, ["-c", PRINTS], 90.0, 99.0), Job({}, ["-c", PRINTS], 1.0, 99.0)]
    long, short = sorted(Queue().run(jobs, lambda: 50.0), key=lambda each: -each.job.expected_s)
    assert (long.figures, long.is_whole) == ({"failed": "not begun: 50 s were left"}, False)
    assert (short.figures, short.is_whole) == ({}, True)
    (late,) = Queue().run([jobs[1]], lambda: 0.0)
    assert (late.figures["failed"], late.is_whole) == ("the time of the call ran out", False)


def test_they_run_together_as_far_as_memory_and_width_allow() -> None:
    nap = "import json, time; a = time.time(); time.sleep(0.3); print(json.dumps(dict(a=a, b=time.time())))"
    jobs = [Job({}, ["-c", nap], 0.0, 30.0, gb=gb) for gb in (10, 10, 90)]
    one, two, three = sorted((each.figures for each in Queue(gb=24).run(jobs, forever)), key=lambda each: each["a"])
    assert max(one["a"], two["a"]) < min(one["b"], two["b"])
    assert three["a"] > max(one["b"], two["b"])  # more than there is: alone


def test_what_is_printed_after_the_figures_is_none() -> None:
    last = 'print("{\\"rate\\": 2}"); print("{not figures}")'
    (ended,) = Queue().run([Job({}, ["-c", last], 0.0, 30.0)], forever)
    assert ended.figures == {"rate": 2}


def test_a_process_that_fails_says_why() -> None:
    jobs = [Job({}, ["-c", "raise SystemExit('no device')"], 0.0, 30.0), Job({}, ["-c", "print('words')"], 0.0, 30.0)]
    failures = {each.figures["failed"] for each in Queue().run(jobs, forever)}
    assert failures == {"exit status 1: no device", "it printed no figures"}


# The three calls


def course(steps: int, rate: float, kept: list[str]) -> dict[str, Any]:
    rows = [
        {"name": name, "status": "kept", "setting": "", "gain": 1.5, "gain_low": 1.4, "gain_high": 1.6, "why": ""}
        for name in kept
    ]
    gains = {"setting": "", "gain": None, "gain_low": None, "gain_high": None}
    rows += [
        {"name": name, "status": "not tried", "why": "no room", **gains} for name in ("torch_compile", "cuda_graphs")
    ]
    return {
        "ends_s": [1 + number / rate for number in range(steps)],
        "losses": [5 - number / 100 for number in range(steps)],
        "held_s": (steps - 3) / rate,
        "peak_mb": 2000.0,
        "settled_rate": rate,
        "settled_peak_mb": 1000.0,
        "rows": rows if kept else [],
        "remembered": ", ".join(kept),
        "state": "done" if kept else "",
    }


COURSES = {
    "plain": course(30, 10.0, []),
    "by hand: tf32": course(40, 15.0, []),
    "compile": course(40, 15.0, []),
    COMPILED: course(60, 40.0, []),
    "reduced": course(60, 36.0, ["autocast_bf16"]),
    "reordered": course(40, 11.0, ["pin_memory"]),
}

PLAYED = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
Path({log!r}).open("a").write(" ".join(words) + "\\n")
if "benchmarks.gpu.sections" in words:
    figures = dict(rows=[dict(way="by hand", us=9.0, low=8.0, high=10.0)]) if "overhead" in words else dict(tflops={{}})
    part = Path(words[-1] + ".part")
    part.write_text(json.dumps(figures))
    part.replace(words[-1])  # as sections do: it is read at any time
elif "pytest" in words:
    print("5 passed in 3.00s")
else:
    sys.path.insert(0, {root!r})
    from benchmarks.device_lock import device_lock
    lock = next(word for word in words if word.startswith("--lock=")).partition("=")[2]
    with device_lock(Path(lock)):
        courses = json.loads({courses!r})
        if words[3] not in courses:
            sys.exit("no such variant")
        print(json.dumps(courses[words[3]]))
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Give what runs a call at size tiny, in whose place of Python a script plays all processes."""
    script, log = tmp_path / "played", tmp_path / "log"
    script.write_text(PLAYED.format(python=sys.executable, log=str(log), root=str(ROOT), courses=json.dumps(COURSES)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(processes, "LOOK_S", 0.02)
    monkeypatch.setattr(gpu_results, "FOLDER", tmp_path / "nothing recorded")
    monkeypatch.setattr(decisive, "REPEATED", ("ncf",))
    before = signal.getsignal(signal.SIGTERM)

    def run(part: str, *options: str) -> Result:
        folders = [f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"]
        return CliRunner().invoke(decisive.main, [part, "--size=tiny", "--model=ncf", *folders, *options])

    yield run
    signal.signal(signal.SIGTERM, before)


def figures(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "out").glob("gpu-cpu-*.json")
    written: dict[str, Any] = json.loads(path.read_text())
    assert written == json.loads((folder / "cache" / "figures.json").read_text())
    return written


def ran(folder: Path) -> list[str]:
    """Return what was started since this was asked last."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_prewarm_measures_compiles_and_tests_once(call: Callable[..., Result], tmp_path: Path) -> None:
    done = call("prewarm")
    assert done.exit_code == 0, done.output
    written = figures(tmp_path)
    rows = {row["variant"]: row for row in written["compiling"]["rows"]}
    assert rows[COMPILED]["compile_s"] == pytest.approx(1 - 1 / 40)
    assert rows[PLANNED]["failed"] == "exit status 1: no such variant"
    assert written["tests"]["green"] and written["tests"]["line"] == "5 passed in 3.00s"
    assert len(ran(tmp_path)) == 4  # ceilings, tests, by hand, a plan
    assert f"- ncf, {COMPILED}: 1 s" in done.output

    call("prewarm")
    assert [line.split()[3] for line in ran(tmp_path)] == ["planned:"]  # what failed


def test_a_table_has_each_way_and_is_not_measured_twice(call: Callable[..., Result], tmp_path: Path) -> None:
    done = call("table")
    assert done.exit_code == 0, done.output
    rows = {row["way"]: row for row in figures(tmp_path)["table"]["rows"]}
    assert list(rows) and set(rows) == set(decisive.WAYS) - {"second"}
    assert rows["reduced"]["kept"] == ["autocast_bf16"]
    command = (
        f"python -m benchmarks.whole_process ncf reduced --size=tiny --seconds={1.5 * decisive.WAYS['reduced'].run_s}"
    )
    assert rows["reduced"]["command"] == f"{command} --settled={decisive.SETTLED_S} --budget=25s"
    assert "| ncf | reduced | 0.90x | done | 1.0, 2.0 | 4.7550 | 1.0 | `autocast_bf16` |" in done.output
    assert "| ncf | 10 | 1.50x | 1.50x | 4.00x | 1.10x | 3.60x | |" in done.output
    assert "| geometric mean, over by hand | | 0.38x | 0.38x | 1.00x | 0.28x | 0.90x | |" in done.output
    assert "- ncf, reduced, reordered: `torch_compile`, `cuda_graphs` not tried: no room" in done.output
    started = ran(tmp_path)
    assert len(started) == 7
    assert all("--lock=" in line and "--size=tiny" in line for line in started)
    assert sum("--budget=25s" in line for line in started) == 2

    assert call("table").exit_code == 0
    assert ran(tmp_path) == []


def test_the_second_call_has_what_the_first_remembered(call: Callable[..., Result], tmp_path: Path) -> None:
    folders: dict[str, str] = {}
    settings = decisive.Settings(tmp_path, size="tiny")
    for way in ("reduced", "second", "reordered"):
        job = decisive._job("ncf", way, settings)
        assert job.environ is not None
        folders[way] = job.environ["ACCEL_CACHE"]
    assert folders["reduced"] == folders["second"] != folders["reordered"]

    call("second")
    assert "second" not in figures(tmp_path)  # there is nothing to remember yet
    call("table")
    done = call("second")
    assert done.exit_code == 0, done.output
    written = figures(tmp_path)
    assert [row["way"] for row in written["second"]["rows"]] == ["second"]
    assert written["overhead"]["rows"][0]["us"] == 9.0
    assert "a step of a small network, by hand: 9 µs [8, 10]" in done.output
    assert "| ncf | second | 0.90x | done |" in done.output
    assert r"| second over by hand, geometric mean | >= 0.97x | 0.9 | not judged |" in done.output
    ran(tmp_path)
    call("second")
    assert ran(tmp_path) == []


def test_a_call_that_is_ended_keeps_its_rows_and_shows_them(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Results.add

    def added(results: Results, *arguments: Any) -> None:
        add(results, *arguments)
        if len(results.rows("table")) == 2:
            raise KeyboardInterrupt  # as by a signal

    monkeypatch.setattr(Results, "add", added)
    done = call("table")
    assert done.exit_code == 1
    assert "ended by a signal" in done.output and "Plain steps a second" in done.output
    kept = {row["way"] for row in figures(tmp_path)["table"]["rows"]}
    assert len(kept) == 2
    ran(tmp_path)

    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "played"))
    call("table")
    assert {row["way"] for row in figures(tmp_path)["table"]["rows"]} == set(decisive.WAYS) - {"second"}
    assert len(ran(tmp_path)) == 5


def test_a_search_that_has_not_ended_is_compared_with_nothing() -> None:
    rows = [row("bert", "plain", 10.0), row("bert", "reduced", 38.0, search="searching")]
    assert decisive_tables.ratios(decisive_tables.ways({"table": {"rows": rows}}), "reduced", "plain") == {}


def test_full_size_needs_a_gpu(call: Callable[..., Result], tmp_path: Path) -> None:
    done = call("table", "--size=full")
    assert (done.exit_code, done.output) == (2, "no CUDA device: nothing was run\n")
    assert not (tmp_path / "out").exists()


def test_the_calls_fit_fifteen_minutes() -> None:
    assert sum(decisive.LIMITS_S.values()) <= 15 * 60 - 120  # the start of a machine, and transfers
    first = sum(way.run_s + decisive.SETTLED_S + way.start_s for way in map(decisive.WAYS.get, decisive.FIRST) if way)
    assert decisive.FIRST_MODELS * first <= decisive.LIMITS_S["table"]


@pytest.mark.slow
def test_the_calls_in_real_processes(tmp_path: Path) -> None:
    options = ["--size=tiny", "--model=ncf", "--pace=0.1", "--no-tests", "--limit-s=300"]
    options += [f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1"}
    for part in decisive.PARTS:
        command = [sys.executable, "-m", "benchmarks.gpu.decisive", part, *options]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = figures(tmp_path)[{"prewarm": "compiling"}.get(part, part)]["rows"]
        assert rows and not [row for row in rows if "failed" in row]


# What is made of the figures


def row(model: str, way: str, rate: float, **more: Any) -> dict[str, Any]:
    shown = {"steps_per_s": rate, "search": "done", "first_step_s": 1.0, "peak_mb": 2000.0, "kept": []}
    more = {"settled_peak_mb": 1000.0, "losses": [5.0], "strategies": [], "remembered": "a plan", **more}
    return {"model": model, "way": way, **shown, **more}


def test_the_table_is_held_to_what_is_asked() -> None:
    rows = [
        row("bert", "plain", 10.0, losses=[5.0, 4.0, 2.0]),
        row("bert", "plain, another seed", 10.0, losses=[5.0, 4.1]),
        row("bert", "by hand", 40.0, losses=[5.0]),
        row("bert", "reduced", 38.0, losses=[5.0, 4.05, 3.0]),
        row("gpt", "plain", 10.0),
        row("gpt", "by hand", 40.0),
        row("gpt", "reduced", 9.0, settled_peak_mb=2000.0),
        {"model": "gpt", "way": "reordered", "failed": "no memory"},
    ]
    second = [row("bert", "second", 39.0, losses=[5.0, 4.2, 3.0], settled_peak_mb=1040.0)]
    second += [row("gpt", "second", 40.0, settled_peak_mb=3000.0, kept=["cuda_graphs"])]
    second += [row("swin", "second", 1.0, remembered="")]  # a first run: its cache was gone
    models = decisive_tables.ways({"table": {"rows": rows}, "second": {"rows": second}})
    found = {line: value for line, _, _, _, value in decisive_tables.lines_of(models)}
    assert found["reduced over by hand, geometric mean"] == pytest.approx((0.95 * 0.225) ** 0.5)
    assert found["second over by hand, geometric mean"] == pytest.approx((0.975 * 1.0) ** 0.5)
    assert found["accel over plain, the least of all"] == pytest.approx(0.9)
    assert found["memory of second over plain, without graphs, the most"] == pytest.approx(1.04)
    assert found["loss: |accel - plain| / |plain - another seed|, the most"] == pytest.approx(2.0)
    assert decisive_tables.loss(models["bert"], "by hand") is None  # it has not seen as many samples
    tests = {"green": True, "line": "5", "sources": gpu_results.sources(*LIBRARY, "tests")}
    header = {"command": "c", "date": "d", "device": "NVIDIA T1", "torch": "t", "tests": tests}
    text = decisive_tables.text({**header, "table": {"rows": rows}, "second": {"rows": second}})
    assert "| reduced over by hand, geometric mean | >= 0.9x | 0.462 | **missed** |" in text
    tests["sources"] = "of other sources"
    assert "**missed**" not in decisive_tables.text({**header, "table": {"rows": rows}})


def test_what_compiling_took_is_what_steps_took_beyond_the_shortest() -> None:
    plan = {"name": "torch_compile", "status": "kept", "why": "faster"}
    found = compiled_row({"ends_s": [10.0, 12.0, 13.0, 14.0], "rows": [plan]})
    assert found == {"compile_s": 10.0, "status": "kept", "why": "faster"}
    assert compiled_row({"failed": "took too long"}) == {"failed": "took too long"}


def test_what_is_recorded_and_unchanged_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_results, "FOLDER", tmp_path)
    now = gpu_results.header("make gpu")
    mark = gpu_results.sources(*gpu_results.SECTIONS["graphs"].sources)
    tests = {"green": True, "sources": gpu_results.sources(*LIBRARY, "tests")}
    old = {**now, "date": "2020-01-01", "tests": tests, "graphs": {"rows": [], "sources": mark}}
    (tmp_path / "gpu-cpu-2020-01-01.json").write_text(json.dumps({**old, "faults": {"sources": "others"}}))
    (tmp_path / "gpu-t1-2021-01-01.json").write_text(json.dumps({**old, "device": "NVIDIA T1", "optimizers": {}}))
    results = Results.opened("make gpu", tmp_path / "out", tmp_path / "cache")
    assert results.is_known("graphs") and results.figures["graphs"]["run"] == "2020-01-01"
    assert not results.is_known("faults") and not results.is_known("optimizers")
    assert results.figures["date"] == now["date"] and results.figures["tests"] == tests
    results.put("graphs", {"failed": "no device", "sources": mark})
    assert not results.is_known("graphs") and results.figures["partial"]


def test_what_is_recorded_stays_until_a_section_has_run_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_results.targets, "judged", lambda figures, green: [])
    results = Results({"graphs": {"rows": [{"model": "mlp"}]}}, (tmp_path / "figures.json",))
    ends = {"rows": [], "failed": "took too long"}
    monkeypatch.setattr(processes, "section", lambda name, limit_s, publish, _: (publish({"rows": []}), ends)[1])
    settings = decisive.Settings(tmp_path)
    decisive.run_section("graphs", results, settings, 1.0)
    assert results.rows("graphs") == [{"model": "mlp"}]
    decisive.run_section("optimizers", results, settings, 1.0)
    assert results.figures["optimizers"]["failed"] == "took too long"
    ends = {"rows": [{"model": "transformer"}]}
    decisive.run_section("graphs", results, settings, 1.0)
    assert results.rows("graphs") == [{"model": "transformer"}]


@pytest.mark.parametrize("model", decisive.MODELS[1:])  # the tiny ResNet is one of fewer blocks
def test_what_is_compiled_ahead_is_what_a_search_compiles_first(model: str) -> None:
    repeats = repeated_blocks(MODELS[model]("tiny").model)
    assert bool(repeats) is (model in decisive.REPEATED)
