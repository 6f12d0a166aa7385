"""Training until a target is reached: the jobs, one process of one variant, and what it tells of itself."""
