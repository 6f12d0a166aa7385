"""Short runs: rows of the right way round, and an exit status that can be relied on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import short_runs


def run(monkeypatch: pytest.MonkeyPatch, ratio: float, *arguments: str) -> tuple[Any, list[int]]:
    """Return how it ended where accel takes that many times as many steps, and how many cores were busy."""
    busy: list[int] = []

    def compare(job: Any, names: list[str], rounds: int) -> Iterator[tuple[dict[str, Any], None]]:
        assert names == ["first"] and job.seconds == 20.0
        row = {"plain_steps": 100.0, "ratio": ratio, "low": ratio / 1.01, "high": ratio * 1.01, "kept": ["allocator"]}
        yield row, None

    class Busy:
        def __init__(self, processes: int, limit_s: float) -> None:
            busy.append(processes)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(short_runs, "compare", compare)
    monkeypatch.setattr(short_runs, "busy", Busy)
    return CliRunner().invoke(short_runs.main, ["cnn", *arguments], catch_exceptions=False), busy


@pytest.mark.parametrize(("ratio", "status"), [(1.2, 0), (1.0, 0), (0.97, 0), (0.95, 1)])
def test_it_fails_where_a_run_is_shown_to_be_longer(monkeypatch: pytest.MonkeyPatch, ratio: float, status: int) -> None:
    done, busy = run(monkeypatch, ratio)
    assert done.exit_code == status
    assert f"cnn     20 s, quiet: {1 / ratio:.3f} [{1 / ratio / 1.01:.3f}" in done.output
    assert busy[0] == 0 and busy[1] >= 1
