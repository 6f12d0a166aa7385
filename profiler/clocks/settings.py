"""Torch's settings while steps ran: by the end of a run a context manager may have restored them long ago."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accel.profiler.clocks.probes import Patches


class TorchSettings:
    """Anomaly mode and number of threads, as most steps had them."""

    def __init__(self) -> None:
        self._samples = self._with_anomaly = 0
        self._threads = 0
        self._was_on = False
        self._patches = Patches()

    def start(self) -> None:
        """Start noticing a mode that is on within steps only."""
        self._patches.replace(torch, "set_anomaly_enabled", self._noticing)

    def stop(self) -> None:
        """Stop noticing."""
        self._patches.remove()

    def sample(self) -> None:
        """Read the settings, between two steps."""
        self._samples += 1
        self._with_anomaly += self._was_on or torch.is_anomaly_enabled()
        self._was_on = False
        self._threads = torch.get_num_threads()

    @property
    def anomaly_mode(self) -> bool:
        """Whether it was on in half of the samples or more."""
        return self._samples > 0 and 2 * self._with_anomaly >= self._samples

    @property
    def threads(self) -> int:
        """Threads at the last sample."""
        return self._threads or torch.get_num_threads()

    def _noticing(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            self._was_on = self._was_on or mode
            original(mode, check_nan)

        return set_anomaly_enabled
