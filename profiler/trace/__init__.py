"""A window of traced steps: what ran, for how long, how much work that was, and what the device can do."""
