"""Goodput: how fast a job trains at a batch size, how much a step of that size is worth, and the best of both."""
