"""Step times of the suite's models under pytest-benchmark, and that accel is not slower than plain.

    make suite
    python -m pytest -p benchmark benchmarks/suite [-k ncf] [--variant reordered --variant compile …] [--size full]

All variants of a model are measured first, in turns (`benchmarks.step_times`); pytest-benchmark is then given each
variant's times by a clock that plays them back, so that its tables, its JSON and `--benchmark-compare` have them.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.step_times import LIMIT, against_plain, slower
from benchmarks.suite.conftest import Field
from benchmarks.variants import VARIANTS


class _Clock:
    now_s = 0.0


def played() -> float:
    """Return the time of the played clock, s."""
    return _Clock.now_s


@pytest.mark.benchmark(timer=played)
def test_step_time(model: str, variant: str, field: Field, benchmark: Any) -> None:
    """Give pytest-benchmark the step times of a variant."""
    if reason := VARIANTS[variant].why_not():
        pytest.skip(reason)
    steps = field[model][variant]
    if steps.failed and not VARIANTS[variant].allow and variant != "plain":
        pytest.skip(f"{variant} fails on {model}: {steps.failed.splitlines()[-1]}")
    assert not steps.failed, steps.failed
    benchmark.group = model
    benchmark.extra_info.update(steps.facts, settle_s=steps.settle_s)
    if variant != "plain" and not field[model]["plain"].failed:
        benchmark.extra_info["over_plain"] = str(against_plain(field[model], variant))
    times = iter(steps.times_s)

    def step() -> None:
        _Clock.now_s += next(times)

    benchmark.pedantic(step, rounds=len(steps.times_s))


def test_accel_is_not_slower(model: str, field: Field) -> None:
    """Compare accel with plain in the same run: no figure of another machine comes in."""
    results = field[model]
    slow = [name for name in results if VARIANTS[name].allow and slower(results, name)]
    words = ", ".join(f"{name} takes {against_plain(results, name)} of a plain step" for name in slow)
    assert not slow, f"{model}: {words}; the limit is {LIMIT}"
