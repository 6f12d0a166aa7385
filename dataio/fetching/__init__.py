"""Fetching one batch: what it calls, what it draws, and with which random state."""
