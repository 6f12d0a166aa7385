"""The ten slowest tests of the default run, held against the list of an earlier one: `make test` must stay short."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("slowest_ten.json")

# Of ten tests together, from run to run: 0.9 to 1.15 of the share that they had before on a quiet machine, up to 1.4 on
# a crowded one, where ranks wait for each other.
MOST_GROWTH = 2.0


@dataclass(frozen=True)
class Slowest:
    """The ten slowest tests of a run, with setup and teardown."""

    tests: int
    total_s: float
    seconds: dict[str, float]

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> Slowest:
        """Return the slowest ten of `seconds`, by test."""
        ten = sorted(seconds.items(), key=lambda item: -item[1])[:10]
        return cls(len(seconds), round(sum(seconds.values()), 1), {name: round(value, 2) for name, value in ten})

    @classmethod
    def read(cls, path: Path = RECORD) -> Slowest:
        """Return what `pytest --record-slowest` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path = RECORD) -> None:
        """Write the list, to be committed."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def growth_over(self, earlier: Slowest) -> str:
        """Say by how much the slowest ten have grown, or ''.

        Compared are shares of the whole run, so that a slow machine is no growth: it slows down all tests. A run of
        some tests only is not compared.
        """
        if self.tests < 0.9 * earlier.tests:
            return ""
        share, before = (sum(run.seconds.values()) / max(run.total_s, 1e-9) for run in (self, earlier))
        if share <= MOST_GROWTH * before:
            return ""
        new = [f"{name} {value:.1f} s" for name, value in self.seconds.items() if name not in earlier.seconds]
        return (
            f"the ten slowest tests take {share:.1%} of the run, {before:.1%} in tests/slowest_ten.json: "
            f"make them faster, mark them slow, or record the list again with pytest --record-slowest "
            f"(new among them: {'; '.join(new) or 'none'})"
        )


class Durations:
    """A pytest plugin: adds up each test's phases, and ends a green run red if the slowest ten have grown."""

    def __init__(self, record: bool, path: Path = RECORD) -> None:
        self._record = record
        self._path = path
        self._seconds: Counter[str] = Counter()
        self._message = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        slowest = Slowest.of(self._seconds)
        if self._record:
            slowest.write(self._path)
        elif exitstatus == pytest.ExitCode.OK and (message := slowest.growth_over(Slowest.read(self._path))):
            self._message = message
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._message:
            terminalreporter.write_line(f"FAILED {self._message}", red=True)
