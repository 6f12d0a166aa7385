"""Saving a training under way: when and how, and what of the process belongs to its state."""
