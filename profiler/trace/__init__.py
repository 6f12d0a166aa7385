"""A window of traced steps: what ran, for how long, how much work it was, and what the device could do."""
