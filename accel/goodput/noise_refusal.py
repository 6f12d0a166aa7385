"""Why the noise of a step can't be measured."""

from __future__ import annotations


def reason_of(error: Exception) -> str:
    """Return why an error keeps a step from being measured."""
    return str(error) if isinstance(error, Unmeasurable) else f"the measurement failed: {type(error).__name__}: {error}"


class Unmeasurable(Exception):  # not an error of the user's: the meter leaves the step out, and says why
    """The step says nothing of the noise; the text is the reason."""
