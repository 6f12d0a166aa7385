"""A training run under way: its events, what is switched on and checked in it, what is said of it."""
