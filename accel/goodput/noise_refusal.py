"""Why the noise of a step can't be measured."""

from __future__ import annotations


class Unmeasurable(Exception):  # not an error of the user's: the meter leaves the step out, and says why
    """The step says nothing of the noise; the text is the reason."""
