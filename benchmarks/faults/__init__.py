"""The fault matrix: its scripts, the registry of them, how they are run and judged, and rival profilers."""
