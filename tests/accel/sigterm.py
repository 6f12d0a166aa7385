"""SIGTERM, as a scheduler sends it."""

from __future__ import annotations

import os
import signal


def send() -> None:
    """Send it to this process."""
    os.kill(os.getpid(), signal.SIGTERM)
