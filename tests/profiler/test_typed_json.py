"""JSON into dataclasses: what is accepted, and that a refusal says where and what was expected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from accel.profiler.typed_json import UnreadableJson, decode, read


@dataclass(kw_only=True)
class Part:
    name: str
    ms: float = 0.0


@dataclass(kw_only=True)
class Whole:
    steps: int
    state: Literal["open", "done"] = "open"
    flag: bool = False
    parts: list[Part] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    best: Part | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def test_each_value_becomes_what_its_field_declares() -> None:
    text = (
        '{"steps": 3, "state": "done", "flag": true, "parts": [{"name": "a", "ms": 2}], "times": {"forward": 1},'
        ' "best": {"name": "b"}, "settings": {"x": [1, null]}}'
    )

    whole = read(Whole, decode(text), "report")

    expected = Whole(steps=3, state="done", flag=True, parts=[Part(name="a", ms=2.0)], times={"forward": 1.0})
    expected.best, expected.settings = Part(name="b"), {"x": [1, None]}
    assert whole == expected
    assert isinstance(whole.parts[0].ms, float)
    assert read(Whole, {"steps": 1, "best": None}, "report").best is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"report must be an object, got '\[\]'"),
        ({}, r"report is incomplete: it lacks steps"),
        ({"steps": 1, "other": 2}, r"report must be without \['other'\]"),
        ({"steps": 1.5}, r"report.steps must be int, got '1.5'"),
        ({"steps": True}, r"report.steps must be int, got 'True'"),
        ({"steps": 1, "flag": 1}, r"report.flag must be bool, got '1'"),
        ({"steps": 1, "state": "shut"}, r"report.state must be one of 'open', 'done', got 'shut'"),
        ({"steps": 1, "state": []}, r"report.state must be one of 'open', 'done', got '\[\]'"),
        ({"steps": 1, "parts": [{"name": "a"}, {}]}, r"report.parts\[1\] is incomplete: it lacks name"),
        ({"steps": 1, "times": {"forward": None}}, r"report.times.forward must be a number, got 'None'"),
        ({"steps": 1, "times": {"forward": 10**400}}, r"report holds a value that no report has"),
    ],
)
def test_a_refusal_says_where_and_what_was_expected(value: Any, message: str) -> None:
    with pytest.raises(UnreadableJson, match=message):
        read(Whole, value, "report")


def test_a_field_with_a_default_may_be_required() -> None:
    with pytest.raises(UnreadableJson, match="report is incomplete: it lacks parts, times"):
        read(Whole, {"steps": 1}, "report", required=("times", "parts"))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(UnreadableJson, match="it must be JSON, it is not"):
        decode(text)
