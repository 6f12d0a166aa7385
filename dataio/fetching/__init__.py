"""Fetching one batch: what it calls, what it draws, with which random state, and how it travels."""
