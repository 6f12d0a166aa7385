"""Measurements beside the clocks: the user's source lines, workers, other processes, links."""
