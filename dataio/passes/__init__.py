"""One pass of the loop after the other: its index lists, its jobs, its setting, its place."""
