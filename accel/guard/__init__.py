"""Checks that strategies compute the same as the plain path: before they run for real, and while they run."""
