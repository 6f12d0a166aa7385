"""What the generated pages say of the loaders is what was recorded."""

from __future__ import annotations

from typing import Any

from benchmarks import length_balance, loaders, proof


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


def test_a_loader_is_not_named_as_another() -> None:
    job = "512 JPEG 500x375 to 224x224, 30 ms step"
    rows = [("DataLoader, 2 workers", 1.0), ("continuous, auto", 1.6), ("ImageDataset: continuous, auto", 2.0)]
    shown = list(proof._loaders(result(*(row(job, loader, 0.4 / speedup, speedup) for loader, speedup in rows))))
    assert [(line.what.partition(":")[0], line.figure[:5]) for line in shown[:-1]] == [
        ("`ContinuousLoader`", "1.60x"),
        ("`ContinuousLoader` and `ImageDataset`", "2.00x"),
    ]


def test_lengths_have_a_table_for_each_set_padded_and_not() -> None:
    rows = [
        {"lengths": name, "policy": "ours", "padded": padded, "efficiency": 0.5, "padding": 0.25, "steps": 7}
        | {"plan_s_per_100k": None if padded else 0.125}
        for name in ("a", "b")
        for padded in (False, True)
    ]
    text = length_balance.RECORD.block(result(*rows) | {"lengths": ["a: 3 samples", "b: 4 samples"]})

    assert [line for line in text.splitlines() if line.startswith("**")] == [
        "**a, not padded**",
        "**a, padded to the longest of the batch**",
        "**b, not padded**",
        "**b, padded to the longest of the batch**",
    ]
    assert text.count("| ours | 50.0% | 25.0% | 7 | 0.12 s |") == 2
    assert text.count("| ours | 50.0% | 25.0% | 7 |  |") == 2
