"""What the generated pages say of the loaders is what was recorded."""

from __future__ import annotations

from typing import Any

from benchmarks import loaders, proof


def row(job: str, loader: str, epoch_s: float, speedup: float, spread: float = 0.1) -> dict[str, Any]:
    low, high = (1.0, 1.0) if speedup == 1.0 else (speedup - spread, speedup + spread)
    times = {"epoch_s": epoch_s, "epoch_low_s": 0.9 * epoch_s, "epoch_high_s": 1.1 * epoch_s}
    speeds = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
    return {"job": job, "loader": loader, "first_ms": 1.0, "first_most_ms": 2.0, "note": "", **times, **speeds}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"command": "c", "date": "2026-01-01", "machine": "m", "torch": "2", "rows": list(rows)}


def test_the_share_of_the_possible_is_told_for_jobs_with_a_step() -> None:
    text = loaders.RECORD.block(
        result(
            row("with", "DataLoader, 2 workers", 0.4, 1.0),
            row("with", "no loading: the steps alone", 0.2, 2.0),
            row("with", "continuous, auto", 0.25, 1.6),
            row("with", "ImageDataset: continuous, auto", 0.2, 2.0),
            row("without", "DataLoader, 2 workers", 0.4, 1.0),
            row("without", "continuous, auto", 0.1, 4.0),
        )
    )

    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- with: 80%, 1.60x of at most 2.00x",
        "- with, by `ImageDataset`: 100%, 2.00x of at most 2.00x",
    ]


def lines(*rows: dict[str, Any]) -> list[tuple[str, str]]:
    return [(line.against, line.figure) for line in proof._loaders(result(*rows))][:-1]


def test_the_best_of_several_numbers_of_workers_is_the_baseline() -> None:
    job = "60,000 tiny samples, no step"
    assert lines(
        row(job, "DataLoader, 1 persistent workers", 1.2, 1.0),
        row(job, "DataLoader, 2 persistent workers", 1.0, 1.2),
        row(job, "continuous, auto", 0.1, 12.0),
    ) == [("DataLoader, 2 persistent workers, the best of 1, 2", "10.0x [8.2, 12.2]")]


def test_a_first_loader_that_is_the_best_has_the_ratios_within_turns() -> None:
    job = "60,000 tiny samples, no step"
    assert lines(
        row(job, "DataLoader, 1 persistent workers", 1.0, 1.0),
        row(job, "DataLoader, 2 persistent workers", 1.2, 0.8),
        row(job, "continuous, auto", 0.1, 10.0),
    ) == [("DataLoader, 1 persistent workers, the best of 1, 2", "10.0x [9.9, 10.1]")]


def test_other_jobs_are_compared_with_their_first_loader() -> None:
    job = "2,000 small images, 3 ms step"
    assert lines(
        row(job, "DataLoader, 2 workers", 0.2, 1.0),
        row(job, "DataLoader, 2 persistent workers", 0.1, 2.0),
        row(job, "continuous, auto", 0.08, 2.5),
    ) == [("DataLoader, 2 workers (persistent ones: 2.00x)", "2.50x [2.40, 2.60]")]
