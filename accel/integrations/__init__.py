"""accel in frameworks that own the training loop, and its figures in experiment trackers; each module needs its own."""
