"""Suspects switched off for a few real steps, interleaved with ordinary ones."""
