"""Slow habits in Python source, found without running it."""
