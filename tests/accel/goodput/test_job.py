"""The job's JSON: what is written is read again, everything else is refused with a sentence; speed-ups."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.goodput import BatchLimits, SpeedTable
from accel.goodput.job import JobProfile, LostTime
from accel.goodput.throughput import ThroughputModel
from tests.accel.goodput.goodput_cases import TYPICAL, models, noises

JOB = JobProfile(
    model=TYPICAL,
    noise=NoiseInterval(2000.0, 1200.0, math.inf, batch=256, share=0.5),
    base_batch=128,
    limits=BatchLimits(max_batch_size=8192, local_max=256, max_accumulation=3),
    most_replicas=32,
    restart_s=12.5,
    progress=5000.25,
    total=90000.0,
    lost=LostTime(start=8.0, input=2.5),
)


@given(models(), noises(), st.floats(0, 1e12))
def test_what_is_written_is_read_again(model: ThroughputModel, noise: NoiseInterval, progress: float) -> None:
    job = dataclasses.replace(JOB, model=model, noise=noise, progress=progress)
    text = job.to_json()
    assert "Infinity" not in text
    assert JobProfile.parse(text, "job") == job


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    JOB.save(tmp_path / "job.json")
    assert JobProfile.load(tmp_path / "job.json") == JOB
    assert (tmp_path / "job.json").stat().st_size < 1000
    with pytest.raises(InvalidArgument, match=r"none.json can't be read as a job profile: .*No such file"):
        JobProfile.load(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match=r"bytes.json can't be read as a job profile: 'utf-8' codec"):
        JobProfile.load(tmp_path / "bytes.json")


def changed(path: str, value: Any) -> str:
    """Return the job's JSON with a value changed, or removed if it is `...`."""
    raw = json.loads(JOB.to_json())
    *parents, last = path.split(".")
    part = raw
    for name in parents:
        part = part[name]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return json.dumps(raw)


FIELDS = [
    *("schema", "model", "noise", "base_batch", "limits", "most_replicas", "restart_s", "progress", "total", "lost"),
    *(f"model.{field.name}" for field in dataclasses.fields(ThroughputModel)),
    *(f"noise.{field.name}" for field in dataclasses.fields(NoiseInterval)),
    *(f"limits.{field.name}" for field in dataclasses.fields(BatchLimits)),
    *(f"lost.{field.name}" for field in dataclasses.fields(LostTime)),
]


@pytest.mark.parametrize("path", FIELDS)
def test_no_field_may_be_missing_or_of_another_type(path: str) -> None:
    name = path.rpartition(".")[2]
    with pytest.raises(InvalidArgument, match=rf"a.json is no job profile: .*({name}|schema must be 3, got None)"):
        JobProfile.parse(changed(path, ...), "a.json")
    with pytest.raises(InvalidArgument, match=rf"a.json is no job profile: .*{name} must be"):
        JobProfile.parse(changed(path, "word"), "a.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"it must be JSON"),
        ("[]", r"its schema must be 3, got 'list'; let the job write it again"),
        (changed("schema", 1), r"its schema must be 3, got 1; let the job write it again"),
        (changed("schema", True), r"its schema must be 3, got True"),
        (changed("more", 1), r"job must be without \['more'\]"),
        (changed("model.more", 1), r"job.model must be without \['more'\]"),
        (changed("base_batch", 128.0), r"job.base_batch must be int, got '128.0'"),
        (changed("base_batch", 0), r"base_batch must be at least 1 and finite. Found: 0"),
        (changed("restart_s", math.nan), r"restart_s must be at least 0 and finite. Found: nan"),
        (changed("progress", -1), r"progress must be at least 0 and finite. Found: -1"),
        (changed("model.ring_s", -1), r"ring_s must be in \[0, inf\] and finite. Found: -1"),
        (changed("noise.low", 5000), r"must have 0 ≤ low ≤ phi ≤ high. Found: low 5000"),
        (changed("noise.share", None), r"job.noise.share must be a number, got 'None'"),
        (changed("lost.input", -1.0), r"input must be at least 0 and finite, in seconds. Found: -1.0"),
        (changed("limits.local_max", 0), r"local_max must be at least 1. Found: 0"),
    ],
)
def test_anything_else_is_refused_with_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"a.json is no job profile: .*{message}"):
        JobProfile.parse(text, "a.json")


# Speed-ups


def test_speedup_is_the_ratio_of_the_best_goodputs() -> None:
    nodes, replicas = [1, 1, 2, 4, 3], [1, 2, 8, 16, 7]
    rates = SpeedTable(JOB.model, JOB.base_batch, JOB.limits, nodes, replicas).best(JOB.noise).rate
    assert JOB.speedup(nodes, replicas) == pytest.approx(rates / rates[0], rel=1e-9)
    assert type(JOB.speedup(2, 8)) is float
    table = JOB.speedup(np.array([[1, 2], [1, 4]]), np.array([[2, 8], [1, 16]]))
    assert table.shape == (2, 2)
    assert table[0, 1] == pytest.approx(JOB.speedup(2, 8), rel=1e-12)


@given(models(), noises(), st.integers(1, 64))
def test_speedup_is_never_above_the_number_of_replicas(
    model: ThroughputModel, noise: NoiseInterval, replicas: int
) -> None:
    job = dataclasses.replace(JOB, model=model, noise=noise, limits=BatchLimits(max_batch_size=8192))
    assert 0 <= job.speedup(1, replicas) <= replicas * (1 + 1e-9)


def test_replicas_far_beyond_those_used_promise_nothing_more() -> None:
    job = dataclasses.replace(JOB, most_replicas=2)
    assert job.speedup(1, 2) < job.speedup(1, 4) == job.speedup(1, 8)
    assert job.speedup(8, 64) == job.speedup(4, 4)
    assert JOB.speedup(1, 8) > JOB.speedup(1, 4)


def test_a_bound_is_reckoned_with() -> None:
    assert JOB.speedup(8, 32, bound="low") < JOB.speedup(8, 32) < JOB.speedup(8, 32, bound="high")


def test_a_batch_that_one_replica_cannot_hold_has_a_reference_all_the_same() -> None:
    job = dataclasses.replace(JOB, limits=BatchLimits(max_batch_size=8192, local_max=20))
    assert job.speedup(1, 1) == job.speedup(1, 6) == 0.0
    assert job.speedup(1, 7) > 1
    with pytest.raises(InvalidArgument, match="1 ≤ nodes ≤ replicas"):
        job.speedup(3, 2)
