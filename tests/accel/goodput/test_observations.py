"""Step times by configuration: their median, how sure it is, what is kept and dropped, the state."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.goodput import observations as observations_module
from accel.goodput.observations import MISFIT, WINDOW, Configuration, Observations

ONE = Configuration(nodes=1, replicas=1, local_batch=32)
TWO = Configuration(nodes=2, replicas=8, local_batch=16, accumulation=3, communication_scale=0.25)


def filled(*times: float, configuration: Configuration = ONE) -> Observations:
    observations = Observations()
    for seconds in times:
        observations.add(configuration, seconds)
    return observations


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=100))
def test_the_median_of_the_last_steps_stands_for_all(times: list[float]) -> None:
    observations = filled(*times)
    last = times[-WINDOW:]
    assert observations.step_times().seconds[0] == statistics.median_high(last)
    assert observations.count(ONE) == len(times)
    assert len(observations) == 1


def test_a_few_slow_steps_do_not_count() -> None:
    steady, disturbed = [0.1] * 31, [0.1] * 25 + [60.0] * 6
    assert filled(*disturbed).step_times().seconds[0] == 0.1
    assert filled(*disturbed).step_times().deviation[0] == filled(*steady).step_times().deviation[0]


def test_more_steps_are_surer_down_to_the_misfit_of_the_model() -> None:
    draw = np.random.default_rng(0)
    deviations = [
        np.mean([filled(*np.exp(draw.normal(-2, 0.1, count))).step_times().deviation[0] for _ in range(30)])
        for count in (1, 3, 10, 31)
    ]
    assert deviations == sorted(deviations, reverse=True)
    # A median of n normal values varies by 1.25 / √n of one value.
    expected = [math.hypot(MISFIT, 1.2533 * 0.1 / math.sqrt(count)) for count in (1, 3, 10, 31)]
    assert deviations == pytest.approx(expected, rel=0.1)


def test_each_configuration_has_a_row_of_its_own() -> None:
    observations = filled(0.1, 0.3, 0.2)
    observations.add(TWO, 0.5)
    table = observations.step_times()
    columns = ("nodes", "replicas", "local_batch", "accumulation", "communication_scale", "seconds")
    assert [[float(getattr(table, name)[row]) for name in columns] for row in (0, 1)] == [
        [1, 1, 32, 0, 1, 0.2],
        [2, 8, 16, 3, 0.25, 0.5],
    ]
    assert observations.count(Configuration(1, 1, 33)) == 0


def test_the_configuration_not_seen_for_longest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations_module, "LIMIT", 2)
    observations = Observations()
    first, second, third = (Configuration(1, 1, batch) for batch in (1, 2, 3))
    for configuration in (first, second, first, third):
        observations.add(configuration, 0.1)
    assert [observations.count(each) for each in (first, second, third)] == [2, 0, 1]


def test_a_state_goes_through_json() -> None:
    before = filled(*[0.1, 0.2, 0.4] * 20)
    before.add(TWO, 0.5)
    after = filled(7.0, configuration=Configuration(1, 2, 8))
    after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    assert after.state_dict() == before.state_dict()
    assert (after.count(ONE), len(after)) == (60, 2)
    assert after.step_times().deviation.tolist() == before.step_times().deviation.tolist()
    empty = Observations()
    empty.load_state_dict(Observations().state_dict())
    assert len(empty) == 0


KEPT = filled(0.1).state_dict()["configurations"][0]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"must be what state_dict\(\) returned. Found: KeyError: 'configurations'"),
        ({"configurations": [{**KEPT, "more": 1}]}, r"unexpected keyword argument 'more'"),
        ({"configurations": [{**KEPT, "count": "1"}]}, r"must have 1 to count step times, got 1, 1"),
        ({"configurations": [{**KEPT, "seconds": []}]}, r"must have 1 to count step times, got 0, 1"),
        ({"configurations": [{**KEPT, "seconds": [0.1, 0.2]}]}, r"got 2, 1"),
        ({"configurations": [{**KEPT, "seconds": [-1.0]}]}, r"positive and finite, in seconds. Found: -1.0"),
        ({"configurations": [{**KEPT, "nodes": 2}]}, r"must have 1 ≤ nodes ≤ replicas"),
    ],
)
def test_another_state_is_refused_and_changes_nothing(state: dict[str, Any], message: str) -> None:
    observations = filled(0.3)
    with pytest.raises(InvalidArgument, match=message):
        observations.load_state_dict(state)
    assert observations.state_dict() == filled(0.3).state_dict()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_must_be_one(seconds: float) -> None:
    observations = Observations()
    with pytest.raises(InvalidArgument, match=r"the time of a step must be positive and finite, in seconds. Found: "):
        observations.add(ONE, seconds)
    assert len(observations) == 0


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(0, 1, 8),
        Configuration(2, 1, 8),
        Configuration(1, 1, 0),
        Configuration(1, 1, 8, -1),
        Configuration(1, 1, 8, 0, math.nan),
    ],
)
def test_a_configuration_must_be_one(configuration: Configuration) -> None:
    with pytest.raises(InvalidArgument, match=r"a configuration must have 1 ≤ nodes ≤ replicas, .* Found: Conf"):
        Observations().add(configuration, 0.1)


def test_numbers_of_numpy_become_plain_ones() -> None:
    observations = Observations()
    observations.add(Configuration(*np.array([1, 2, 32, 0]), np.float32(0.5)), np.float32(0.25))
    assert json.loads(json.dumps(observations.state_dict())) == observations.state_dict()
    assert observations.count(Configuration(1, 2, 32, 0, 0.5)) == 1
    with pytest.raises(InvalidArgument, match=r"all of a configuration but its scale must be whole. Found: .*8.5"):
        observations.add(Configuration(1, 1, 8.5), 0.1)
