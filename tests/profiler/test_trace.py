"""The trace window: what it says of real models, and that the script notices nothing of it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel.profiler.evidence import TraceSummary
from accel.profiler.trace import window as trace
from accel.profiler.trace.events import OperatorCall, Trace
from accel.profiler.trace.window import Window, WindowTaken

CPU = torch.device("cpu")


def many_small() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(60) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(8, 32)


def few_large() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(256, 1024)


def images() -> tuple[nn.Module, torch.Tensor]:
    first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(32 * 49, 10)), torch.randn(64, 1, 28, 28)


def traced(make: Callable[[], tuple[nn.Module, torch.Tensor]], steps: int = 3) -> TraceSummary:
    model, batch = make()
    step = training(model, batch)
    for _ in range(2):
        step()
    window = Window(CPU)
    window.start()
    for _ in range(steps):
        step()
    return window.stop(steps)


def training(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.gpu
def test_a_gpus_window() -> None:
    """Not run yet: what a window of large and of many small products must show on any GPU."""
    large, small = torch.ones(4096, 4096, device="cuda"), torch.ones(16, 16, device="cuda")
    for _ in range(3):
        torch.mm(large, large)
    summaries = []
    for _ in range(2):
        window = Window(torch.device("cuda"), stacks=True)
        window.start()
        for _ in range(20):
            torch.mm(large, large) if not summaries else torch.mm(small, small)
        small.sum().item()
        summaries.append(window.stop(1))
        assert window.unseen == ""
    busy, starved = summaries

    assert busy.ops[0].kind == "matmul" and (busy.ops[0].gflops or 0) > 1000
    assert busy.matmul_share > 0.9 and busy.small_share < 0.1
    assert (busy.busy_ms or 0) > (starved.busy_ms or 0)
    assert starved.small_share > 0.9 and starved.launch_ms > busy.launch_ms
    assert busy.dtypes == {"float32": 1.0}
    sync = next(sync for sync in busy.syncs if sync.name == "item")
    assert Path(sync.file).name == "test_trace.py" and sync.line > 0


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        pytest.param(many_small, 0.7, 1.0, id="60 layers of 32"),
        pytest.param(few_large, 0.0, 0.15, id="3 layers of 1024"),
        pytest.param(images, 0.0, 0.3, id="two convolutions"),
    ],
)
def test_short_calls_are_told_from_long_ones(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], low: float, high: float
) -> None:
    assert low <= traced(make).small_share <= high


def test_the_summary_of_large_layers() -> None:
    summary = traced(few_large)
    rows = {row.name: row for row in summary.ops}

    # Forward: three addmm. Backward: a product for each weight, and for each input but the first.
    assert (rows["addmm"].calls, rows["mm"].calls) == (3, 5)
    assert rows["mm"].kind == "matmul" and not rows["mm"].small
    gflop = (rows["mm"].gflops or 0) * rows["mm"].ms / 1e3
    assert gflop == pytest.approx(5 * 2 * 256 * 1024 * 1024 / 1e9)
    moved = 256 * 1024 + 1024 * 1024 + 256 * 1024  # two inputs and an output, of either product
    assert rows["mm"].intensity == pytest.approx(2 * 256 * 1024 * 1024 / (4 * moved), rel=0.01)
    assert rows["threshold_backward"].kind == "elementwise" and (rows["threshold_backward"].gb_per_s or 0) > 0
    assert summary.matmul_share > 0.7
    assert summary.dtypes == {"float32": 1.0}
    assert (summary.steps, summary.busy_ms, summary.syncs) == (3, None, [])


def test_the_rows_are_the_largest_and_the_shares_parts_of_one() -> None:
    summary = traced(images)

    assert 0 < len(summary.ops) <= 12
    assert [row.ms for row in summary.ops] == sorted((row.ms for row in summary.ops), reverse=True)
    assert sum(row.share for row in summary.ops) <= 1 + 1e-9
    assert 0.5 < summary.matmul_share + summary.elementwise_share <= 1 + 1e-9
    convolution = next(row for row in summary.ops if row.name == "convolution_backward")
    assert convolution.calls == 2 and (convolution.gflops or 0) > 0


def test_operators_are_counted_as_the_script_calls_them() -> None:
    window = Window(CPU)
    window.start()
    for _ in range(2):
        torch.relu(torch.ones(3))  # ones calls empty and fill_, relu calls clamp_min
    assert window.stop(2).ops_per_step == 2


def test_the_dtypes_of_products_share_their_time() -> None:
    double, half = torch.ones(192, 192, dtype=torch.float64), torch.ones(192, 192)
    window = Window(CPU)
    window.start()
    torch.mm(double, double)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.mm(half, half)
    dtypes = window.stop(1).dtypes

    assert dtypes.keys() == {"float64", "bfloat16"}
    assert sum(dtypes.values()) == pytest.approx(1.0)


def test_an_empty_window_has_nothing() -> None:
    window = Window(CPU)
    window.start()
    summary = window.stop(2)

    assert (summary.ops, summary.ops_per_step, summary.small_share, summary.dtypes) == ([], 0, 0, {})


def test_a_device_whose_work_is_not_seen_gets_no_numbers_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    call = OperatorCall(name="aten::mm", start=0, end=10)
    monkeypatch.setattr(trace, "read", lambda *_, **__: Trace(window=(0.0, 10.0), calls=[call], works=[]))
    window = Window(CPU)
    window.start()
    summary = window.stop(1)

    assert (summary.ops, summary.ops_per_step, summary.matmul_share, summary.busy_ms) == ([], 0, 0, None)
    assert window.unseen.startswith("GPU kernels: kineto recorded none")


# -- beside the script's own profiler ----------------------------------------------------------------------------------


def names(profile: torch.profiler.profile) -> list[str]:
    return [event.key for event in profile.key_averages()]


def test_a_profiler_of_the_script_stays_untouched() -> None:
    with torch.profiler.profile() as profile:
        torch.ones(3)
        with pytest.raises(WindowTaken, match="the script uses torch's profiler itself"):
            Window(CPU).start()
        torch.relu(torch.ones(3))

    assert {"aten::ones", "aten::relu"} <= set(names(profile))


def test_a_profiler_that_waits_for_its_turn_stays_untouched() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule) as profile:
        for _ in range(2):  # waiting, then warming up: no profiler is on, and kineto is prepared
            with pytest.raises(WindowTaken):
                Window(CPU).start()
            profile.step()
        torch.relu(torch.ones(3))
        profile.step()

        assert "aten::relu" in names(profile)


def test_a_profiler_of_another_thread_stays_untouched() -> None:
    started, done = threading.Event(), threading.Event()

    def script() -> None:
        with torch.autograd.profiler.profile(use_kineto=True):
            started.set()
            done.wait(10)

    thread = threading.Thread(target=script)
    thread.start()
    assert started.wait(10)
    try:
        with pytest.raises(WindowTaken):
            Window(CPU).start()
    finally:
        done.set()
        thread.join()


def test_a_window_gives_way_to_a_profiler_of_the_script(capfd: pytest.CaptureFixture[str]) -> None:
    window = Window(CPU)
    window.start()
    torch.ones(3)
    with torch.profiler.profile() as profile:
        torch.relu(torch.ones(3))

    assert "aten::relu" in names(profile)
    with pytest.raises(WindowTaken):
        window.stop(1)
    assert "no active profiling session" not in capfd.readouterr().err
    reopened = Window(CPU)
    reopened.start()
    torch.ones(3)
    assert reopened.stop(1).ops_per_step == 1


def test_nothing_stays_changed() -> None:
    prepare, filters = torch.autograd.profiler.profile._prepare_trace, list(warnings.filters)
    variables = dict(os.environ)
    window = Window(CPU)
    window.start()
    window.stop(1)

    assert torch.autograd.profiler.profile._prepare_trace is prepare
    assert (list(warnings.filters), dict(os.environ), gc.isenabled()) == (filters, variables, True)
    assert not torch.autograd.profiler._is_profiler_enabled


SCRIPT = """
import sys, warnings
import torch
from accel.profiler.trace.window import Window

def warn():
    warnings.warn("shown once")

for _ in range(2):
    window = Window(torch.device("cpu"))
    warn()
    window.start()
    torch.ones(3).sum().item()
    window.stop(1)
    warn()
from pathlib import Path
window.export(Path(sys.argv[1]))
"""


def test_the_script_prints_what_it_printed_before(tmp_path: Path) -> None:
    """In a process of its own: kineto speaks when it starts, and a warning that Python has shown must stay shown."""
    variables = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "trace.json")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**variables, "PYTHONPATH": str(root), "PYTHONWARNINGS": "default"},
    )

    assert (ran.returncode, ran.stdout) == (0, "")
    assert [line for line in ran.stderr.splitlines() if line.strip()] == ["<string>:7: UserWarning: shown once"]
    assert (tmp_path / "trace.json").is_file()


# -- export ------------------------------------------------------------------------------------------------------------


def closed_window() -> Window:
    window = Window(CPU)
    window.start()
    torch.relu(torch.ones(3))
    window.stop(1)
    return window


def test_an_exported_trace_is_whole(tmp_path: Path) -> None:
    closed_window().export(tmp_path / "trace.json")

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "aten::relu" in {event.get("name") for event in events}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match=r"trace\.json"):
        closed_window().export(tmp_path / "trace.json")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        closed_window().export(tmp_path / "file" / "trace.json")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "trace.json"]
