"""The command line and the clock that the scripts of this folder share."""

from __future__ import annotations

import argparse
import json
import time

WARM_UP = 10
"""Steps that are not timed."""


def arguments(description: str | None, steps: int = 260) -> argparse.Namespace:
    """Read `--steps N` and `--fixed`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps, more than {WARM_UP}")
    parser.add_argument("--fixed", action="store_true", help="train without the fault")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be larger than {WARM_UP}. Found: {options.steps}")
    return options


class Stopwatch:
    """Times the steps after the warm-up, with everything between them.

    Args:
        samples: samples of a step, all ranks together.

    Attributes:
        steps: steps done.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.steps = 0
        self._began = self._last = time.perf_counter()

    def lap(self) -> None:
        """End a step."""
        self.steps += 1
        self._last = time.perf_counter()
        if self.steps == WARM_UP:
            self._began = self._last

    def stop(self) -> None:
        """Let the last step end now: a device may have been at work still."""
        self._last = time.perf_counter()

    def line(self) -> str:
        """Return the figures as one line of JSON."""
        seconds = (self._last - self._began) / (self.steps - WARM_UP)
        figures = {"steps": self.steps, "seconds_per_step": seconds, "samples_per_second": self.samples / seconds}
        return json.dumps(figures)
