"""How torch was set while steps ran: at the end of a run a context may have put it back long ago."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accel.profiler.clocks.probes import Patches


class TorchSettings:
    """Anomaly mode and number of threads, as most steps had them."""

    def __init__(self) -> None:
        self._looks = self._with_anomaly = 0
        self._threads = 0
        self._was_on = False
        self._patches = Patches()

    def start(self) -> None:
        """Begin to notice a mode that is on within steps only."""
        self._patches.replace(torch, "set_anomaly_enabled", self._noticing)

    def stop(self) -> None:
        """Notice no more."""
        self._patches.remove()

    def look(self) -> None:
        """Look, between two steps."""
        self._looks += 1
        self._with_anomaly += self._was_on or torch.is_anomaly_enabled()
        self._was_on = False
        self._threads = torch.get_num_threads()

    @property
    def anomaly_mode(self) -> bool:
        """Whether it was on in half of the looks or more."""
        return self._looks > 0 and 2 * self._with_anomaly >= self._looks

    @property
    def threads(self) -> int:
        """Threads at the last look."""
        return self._threads or torch.get_num_threads()

    def _noticing(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            self._was_on = self._was_on or mode
            original(mode, check_nan)

        return set_anomaly_enabled
