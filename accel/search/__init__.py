"""What to try next, and what it may cost: decisions, without a hand on the run."""
